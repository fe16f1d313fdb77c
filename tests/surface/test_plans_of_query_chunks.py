"""Which backward calls of head dims up to 128 are divided into query chunks on Hopper.

Plans need no GPU (test_plans.py). They are those of an H200, a third of whose L2 holds the sums of dQ of 40960 queries
at head dim 128.
"""

import pytest

from flash_attn_ext._explanation import Plan
from support.plans import F16, KEY_STATIONARY, TWO_PASS, Call, label, mismatches, packed_plans

MIB = 2**20
WHOLE = dict(kernel=KEY_STATIONARY, query_chunks=None, launches=None, key_heads_per_launch=None)


def hopper(sq: int, sk: int | None = None, **more) -> Call:
    options = {"backend": "sm90"} | more.pop("options", {})
    return Call(sq, sk, options=options, **{"d": 128, "batch": 1, "heads": 8} | more)


def causal(sq: int, sk: int | None = None, **more) -> Call:
    return hopper(sq, sk, options={"causal": "bottom_right"}, **more)


PLANS = [
    # Chunks have about the same number of queries.
    (hopper(40960), WHOLE),
    (hopper(40961), dict(kernel=KEY_STATIONARY, query_chunks=2, launches=2, key_heads_per_launch=8)),
    (hopper(131072), dict(query_chunks=4, launches=4, key_heads_per_launch=8, adds_statistics=True)),
    (causal(131072), dict(query_chunks=4, launches=4, key_heads_per_launch=8, cyclic=False)),
    (hopper(131072, dtype=F16), dict(query_chunks=4)),
    (hopper(81920, d=64), WHOLE),
    (hopper(81984, d=64), dict(query_chunks=2)),
    (hopper(54592, d=80), WHOLE),
    (hopper(54656, d=80), dict(query_chunks=2, head_dims=(96, 96))),
    # 1024 bytes of partial dK and dV for each key and pair.
    (causal(131072), dict(workspace={"partial dK and dV": 8 * 128 * MIB})),
    # 2 GiB have room for 16 heads.
    (causal(131072, heads=32), dict(key_heads_per_launch=16, launches=8, workspace={"partial dK and dV": 2048 * MIB})),
    (causal(131072, heads=40), dict(key_heads_per_launch=14, launches=12)),
    (hopper(131072, heads=34), dict(key_heads_per_launch=12, launches=12)),
    # A query head of a group is a work tile of its own where key tiles see different queries.
    (
        causal(131072, heads=32, key_heads=8),
        dict(group_shares=4, key_heads_per_launch=4, launches=8, workspace={"partial dK and dV": 2048 * MIB}),
    ),
    (hopper(131072, heads=32, key_heads=8), dict(group_shares=None, key_heads_per_launch=8, launches=4)),
    # The keys of one head may have no room.
    (causal(131072, 1 << 20), dict(query_chunks=4, key_heads_per_launch=2)),
    (causal(1 << 19, 1 << 22, heads=1), WHOLE),
    # Few keys, and keys before a query that it does not see.
    (hopper(131072, 1100), dict(query_chunks=4)),
    (hopper(131072, options={"window": (None, 100)}), dict(query_chunks=4)),
    (hopper(131072, options={"window": (100_000, 0)}), WHOLE),
    (hopper(131072, options={"window": (100_000, None)}), WHOLE),
    # Other scores.
    (hopper(131072, options={"dropout_p": 0.1}), dict(WHOLE, score_mode="dropout")),
    (hopper(65536, mask=(1, 1, 1, 65536)), dict(WHOLE, score_mode="mask")),
    (hopper(65536, options={"softcap": 9.0}), dict(WHOLE, score_mode="softcap")),
    (hopper(65536, options={"scale": -1.0}), dict(kernel=TWO_PASS)),
]


@pytest.mark.parametrize(("call", "expected"), PLANS, ids=label)
def test_dense(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


def packed_plan(lengths: tuple[int, ...]) -> Plan:
    return packed_plans(lengths, d=128, heads=8, causal="bottom_right")[1]


def test_packed():
    """The average length decides, and the longest sequence has the most chunks."""
    assert packed_plan((100_000, 30_000)).query_chunks == 3
    assert mismatches(packed_plan((100_000, 20_000, 0)), WHOLE) == {}


@pytest.mark.parametrize(("mebibytes", "key_heads"), [("1023", 4), ("256", 2), ("255", 1), ("128", 1)])
def test_room_for_partial_sums(mebibytes, key_heads, monkeypatch):
    """Launches of two heads or more have as many in ascending as in descending order."""
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    plan = causal(131072).plans()[1]
    assert plan.key_heads_per_launch == key_heads
    assert plan.workspace["partial dK and dV"] == key_heads * 128 * MIB


def test_no_room(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "127")
    assert mismatches(causal(131072).plans()[1], WHOLE) == {}


def test_it_is_said_in_words():
    assert ", launches 4, key heads per launch 8, query chunks 4," in str(causal(131072).plans()[1])
