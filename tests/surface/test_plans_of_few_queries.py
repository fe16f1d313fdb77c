"""Which calls have their keys divided among blocks, and among how many.

As in test_plans.py, plans need no GPU. Without one they are those of a GPU with 132 multiprocessors.
"""

import dataclasses

import pytest

from flash_attn_ext._explanation import Plan
from support.plans import F16, F32, F64, STORE_DS, STORE_P_DS, TWICE, WARP, WARP_STORE_P_DS, Call, label, mismatches

LONG = 32768


def llama(sq: int, sk: int = LONG, **more) -> Call:
    """Heads as in a model of 8B parameters."""
    return Call(sq, sk, **(dict(d=128, batch=1, heads=32, key_heads=8) | more))


def wide(sq: int, sk: int = LONG, **more) -> Call:
    """Few heads, so that tiles of queries alone leave most of a GPU idle."""
    return Call(sq, sk, **(dict(d=128, batch=1, heads=8) | more))


# What reading the keys bounds: up to 64 rows of a key head's group, from 512 keys on. The same on every GPU.
ROWS = [
    (llama(1), dict(variant="plain", head_dims=(128, 128), tile=(16, 64))),
    (llama(4), dict(variant="plain", head_dims=(128, 128), tile=(16, 64))),
    (llama(5), dict(variant="plain", head_dims=(128, 128), tile=(32, 64))),
    (llama(8), dict(variant="plain", head_dims=(128, 128), tile=(32, 64))),
    (llama(9), dict(variant="plain", head_dims=(128, 128), tile=(64, 64))),
    (llama(16), dict(variant="plain", head_dims=(128, 128), tile=(64, 64))),
    (llama(1, dtype=F16), dict(variant="plain", head_dims=(128, 128), tile=(16, 64))),
    (
        llama(1, key_heads=1),
        dict(variant="plain", head_dims=(128, 128), tile=(32, 64)),
    ),  # multi-query: all 32 heads in one tile
    (llama(1, key_heads=32), dict(variant="plain", head_dims=(128, 128), tile=(16, 64))),
    (llama(1, 512), dict(variant="plain", head_dims=(128, 128), tile=(16, 64))),
    (llama(1, batch=64), dict(variant="plain", head_dims=(128, 128), tile=(16, 64))),
    # Head dims: 64, 128, 256 and 512, the larger one of q's and v's.
    (llama(1, d=1), dict(variant="plain", head_dims=(64, 64))),
    (llama(1, d=65), dict(variant="plain", head_dims=(128, 128))),
    (llama(1, d=64, dv=128), dict(variant="plain", head_dims=(128, 128))),
    (llama(1, d=129), dict(variant="plain", head_dims=(256, 256))),
    (llama(1, d=257), dict(variant="plain", head_dims=(512, 512))),
    (llama(1, d=512), dict(variant="plain", head_dims=(512, 512))),
    (llama(1, dtype=F32), dict(variant="plain", head_dims=(128, 128))),
    (llama(1, d=129, dtype=F32), dict(variant="plain", head_dims=(256, 256))),
    # What changes a score, beside visibility.
    (llama(1, sink=True), dict(variant="plain")),
    (llama(1, options={"causal": "bottom_right"}), dict(variant="plain")),
    (llama(1, options={"window": (511, 0)}), dict(variant="plain")),
    (llama(1, slopes=True), dict(variant="extended", head_dims=(128, 128), tile=(16, 64))),
    (llama(4, mask=(1, 1, 1, LONG)), dict(variant="extended", head_dims=(128, 128), tile=(16, 64))),
    (llama(5, mask=(1, 1, 1, LONG)), dict(variant="extended", head_dims=(128, 128), tile=(64, 64))),
    (llama(1, d=64, mask=(1, 1, 1, LONG)), dict(variant="extended", head_dims=(64, 64), tile=(16, 128))),
    (llama(1, d=256, mask=(1, 1, 1, LONG)), dict(variant="extended", head_dims=(256, 256), tile=(16, 32))),
    (llama(1, slopes=True, dtype=F32), dict(variant="extended", head_dims=(128, 128), tile=(16, 32))),
    # Rows of 1 KiB: one tile for all.
    (llama(1, d=512, slopes=True), dict(variant="extended", head_dims=(512, 512), tile=(32, 32))),
    (llama(1, d=129, slopes=True, dtype=F32), dict(variant="extended", head_dims=(256, 256), tile=(32, 32))),
    (llama(1, bias=(1, 32, 1, LONG)), dict(variant="extended")),
    (llama(1, options={"softcap": 9.0}), dict(variant="extended")),
    (llama(1, options={"scale": -1.0}), dict(variant="extended")),
    (llama(1, options={"dropout_p": 0.1}), dict(variant="extended")),
]

UNDIVIDED = [
    llama(1, 511),
    llama(1, options={"window": (510, 0)}),  # sees 511 keys
    llama(1, dtype=F64),
    # More rows are divided only where their tiles leave half of the multiprocessors idle, and up to 512 queries.
    llama(17, batch=3),
    llama(257),
    llama(256, 1023),
    wide(513),
    wide(1100),
    Call(65, 4096),
]

# Tiles of 128 queries that leave at least half of 132 multiprocessors idle, and what Hopper's kernel divides their keys
# among: the multiprocessors there are for a tile, as far as each gets 512 keys.
IDLE = [
    (llama(17), 4),
    (llama(256), 2),
    (llama(256, 1024), 2),
    (wide(65), 16),
    (wide(65, 4096), 8),
    (wide(512), 4),
    (wide(128, heads=66, key_heads=1), 2),
    (wide(256, options={"causal": "bottom_right"}), 8),
    (wide(256, sink=True), 8),
]


def plans_on(backend: str, call: Call) -> tuple[Plan, Plan]:
    return dataclasses.replace(call, options=call.options | {"backend": backend}).plans()


def forward_plan(call: Call, backend: str) -> Plan:
    return plans_on(backend, call)[0]


def blocks_of(plan: Plan) -> int | None:
    """Among how many blocks keys are divided."""
    return plan.blocks or plan.splits


@pytest.fixture(params=["sm80", "sm90"])
def planner(request) -> str:
    return request.param


@pytest.mark.parametrize(("call", "expected"), ROWS, ids=label)
def test_calls_that_reading_keys_bounds(call, expected, planner, monkeypatch):
    """One kernel on every GPU, whatever the number of multiprocessors."""
    for multiprocessors in ("1", "132"):
        monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", multiprocessors)
        plan = forward_plan(call, planner)
        assert mismatches(plan, dict(kernel="split") | expected) == {}


@pytest.mark.parametrize("call", UNDIVIDED, ids=lambda call: f"q{call.sq}-k{call.sk}")
def test_calls_whose_keys_stay_together(call, planner):
    assert blocks_of(forward_plan(call, planner)) is None


@pytest.mark.parametrize(("call", "parts"), IDLE, ids=label)
def test_calls_that_would_leave_multiprocessors_idle(call, parts, planner, monkeypatch):
    plan = forward_plan(call, planner)
    if planner == "sm80":
        assert plan.kernel == "split"
    else:
        expected = dict(kernel=WARP, variant="plain", head_dims=(128, 128), splits=parts)
        assert mismatches(plan, expected) == {}
    monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", "7")
    assert blocks_of(forward_plan(call, planner)) is None  # none is idle there


# Of 8 key heads, by multiprocessors, with room for 3 blocks each: whole blocks for a head, about 2 a multiprocessor (32
# of a head rather than 33, which four warps join), or 1 where they would have fewer than 8 tiles of 64 keys. And of
# 1024 keys, of which no block has less than 128.
BLOCKS = {1: (3, 3), 2: (6, 6), 7: (8, 8), 50: (96, 48), 132: (256, 64), 300: (296, 64)}


@pytest.mark.parametrize(("multiprocessors", "blocks"), BLOCKS.items())
def test_the_number_of_multiprocessors_is_a_switch(multiprocessors, blocks, planner, monkeypatch):
    """All that fit where heads are many."""
    monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", str(multiprocessors))
    assert tuple(blocks_of(forward_plan(llama(1, sk), planner)) for sk in (LONG, 1024)) == blocks
    assert blocks_of(forward_plan(llama(1, batch=200), planner)) == 3 * multiprocessors


SHORT = [
    (llama(1, 4096), 128),
    (llama(8, 4096), 128),
    (llama(1, 16_896), 256),
    (llama(1, 16_832), 128),  # 8 x 263 tiles, less than 2 x 132 x 8
    (llama(1, 2048, batch=4), 128),
    (llama(1, 2048, batch=6), 240),  # one for each head would leave a quarter of the multiprocessors without
    (llama(1, 4096, mask=(1, 1, 1, 4096)), 256),
    (llama(1, d=64), 128),  # 8 x 256 tiles of 128 keys
]


@pytest.mark.parametrize(("call", "blocks"), SHORT, ids=label)
def test_short_stretches_have_a_multiprocessor_each(call, blocks, planner):
    assert blocks_of(forward_plan(call, planner)) == blocks


# A third block a multiprocessor, from 4 tiles of 64 keys for each on.
MASKED = [
    (llama(1, 12_608, mask=(1, 1, 1, 12_608)), 256),
    (llama(1, 12_609, mask=(1, 1, 1, 12_609)), 392),  # 8 x 198 tiles
    (llama(1, 17_409), 256),
    (llama(1, 8192, key_heads=32, mask=(1, 1, 1, 8192)), 384),
    (llama(1, 8192, key_heads=32), 256),  # 4096 tiles
]


@pytest.mark.parametrize(("call", "blocks"), MASKED, ids=label)
def test_long_calls_with_masks_have_more_blocks(call, blocks, planner):
    assert blocks_of(forward_plan(call, planner)) == blocks


def test_more_multiprocessors_divide_more_calls(planner, monkeypatch):
    """A tile of 128 queries in each of 32 heads."""
    plans = {}
    for multiprocessors in (63, 64, 300):
        monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", str(multiprocessors))
        plans[multiprocessors] = forward_plan(llama(128), planner)
    assert blocks_of(plans[63]) is None
    if planner == "sm90":
        assert (blocks_of(plans[64]), blocks_of(plans[300])) == (2, 9)
    else:
        assert (blocks_of(plans[64]), blocks_of(plans[300])) == (128, 576)


DIVIDED_DQ = [
    (llama(8, 4096), dict(kernel=STORE_DS, splits=8)),
    (wide(64, 4096), dict(kernel=STORE_DS, splits=16)),  # 256 keys each
    (wide(512, 4096), dict(kernel=STORE_DS, splits=8)),
    (wide(513, 4096), dict(kernel=STORE_DS, splits=None, launches=1)),
    (wide(64, 1023), dict(kernel=STORE_P_DS, dq_variant="extended", dq_head_dim=128, splits=None)),
    (wide(64, 1024), dict(kernel=STORE_DS, splits=4)),
    (
        wide(64, 4096, options={"dropout_p": 0.1}),
        dict(kernel=STORE_P_DS, dq_variant="extended", dq_head_dim=128, splits=16),
    ),
    (wide(64, 4096, d=256), dict(kernel=STORE_P_DS, dq_variant="plain", dq_head_dim=256, splits=16)),
    (wide(64, 4096, d=257), dict(kernel=TWICE, dq_variant="extended", dq_head_dim=512)),
    (
        wide(64, 4096, batch=17),
        dict(kernel=STORE_P_DS, dq_variant="extended", dq_head_dim=128, splits=None),
    ),  # 136 tiles
]


@pytest.mark.parametrize(("call", "expected"), DIVIDED_DQ, ids=label)
def test_the_keys_of_dq(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


# On Hopper, up to 128 queries that see all of more than 8 keys each, with a key head of their own, stay.
KEPT = [
    (wide(64, 4096), dict(kernel="warp-specialised, few queries", head_dims=(128, 128), blocks=128)),
    (wide(128, 4096), dict(head_dims=(128, 128), blocks=128)),
    (wide(64, 1024), dict(head_dims=(128, 128), blocks=128)),  # a tile of 64 keys for each block
    (wide(1, 1024, batch=9), dict(head_dims=(128, 128), blocks=132)),  # 72 heads
    (wide(64, 1024, heads=3), dict(head_dims=(128, 128), blocks=48)),
    (wide(64, 4096, d=72), dict(head_dims=(128, 128))),
    (wide(64, 4096, d=64), dict(head_dims=(64, 64))),
    (wide(64, 4096, d=40, dv=64), dict(head_dims=(64, 64))),
    (wide(64, 4096, d=40, dv=72), dict(head_dims=(128, 128))),
    (wide(64, 4096, dtype=F16), dict(head_dims=(128, 128))),
    (wide(64, 4096, sink=True), dict(head_dims=(128, 128))),
]

# Others: sums of dQ for each phase of tiles of keys where there are more than 8 keys for each query: as many as a head
# has tiles at work on 132 multiprocessors, or half as many where a tile of keys has several visits. Else all visitors
# of a query take turns.
CAUSAL = {"causal": "bottom_right"}
PHASES = [
    (llama(8, 4096), dict(phases=8, sums_of_dq=8)),
    (wide(64, 4096, options=CAUSAL), dict(phases=16, sums_of_dq=16)),
    (wide(64, 1024, options=CAUSAL), dict(phases=8, sums_of_dq=8)),  # a tile of keys each
    (wide(128, 4096, options=CAUSAL), dict(phases=8, sums_of_dq=8)),
    (wide(129, 4096), dict(phases=8, sums_of_dq=8)),
    (wide(64, batch=4, options=CAUSAL), dict(phases=4, sums_of_dq=4)),
    (
        wide(64, 4096, d=64, options=CAUSAL),
        dict(kernel=WARP, head_dims=(64, 64), tile=(64, 128), cyclic=False, phases=16),
    ),
    (
        wide(64, batch=17, options=CAUSAL),
        dict(kernel=WARP, cyclic=False, phases=1, announces_visits=True),
    ),  # more heads than blocks
    (wide(512, 4096), dict(kernel=WARP, cyclic=True)),
    # No more than sums of 8 visits for each tile at work.
    (llama(128, key_heads=1), dict(phases=32, sums_of_dq=32)),
    (llama(512, key_heads=1), dict(phases=8, sums_of_dq=8)),
    (wide(513, 8192), dict(launches=1)),
    # Few that are visible, too.
    (wide(64, 1023), dict(kernel=STORE_P_DS, dq_variant="extended", dq_head_dim=128, splits=None)),
    (wide(64, 513, d=64), dict(kernel=STORE_DS, dkdv_variant="extended", dkdv_head_dim=64)),
    (
        wide(64, 4096, options={"window": (100, 30)}),
        dict(kernel=STORE_P_DS, dq_variant="extended", dq_head_dim=128, splits=None),
    ),
    (wide(64, 4096, options={"softcap": 9.0}), dict(kernel=WARP_STORE_P_DS)),
]


@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0}, {"sq": 0}, {"sk": 0}], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_empty_calls_have_plans(d, empty, planner):
    call = Call(**(dict(sq=64, sk=4096, d=d, heads=8, options={"backend": planner}) | empty))
    assert not any("warp-specialised" in plan.kernel for plan in call.plans())


@pytest.mark.parametrize(("call", "expected"), KEPT, ids=label)
def test_queries_that_stay(call, expected):
    expected = dict(kernel="warp-specialised, few queries") | expected
    assert mismatches(plans_on("sm90", call)[1], expected) == {}


@pytest.mark.parametrize(("call", "expected"), PHASES, ids=label)
def test_phases_with_sums_of_their_own(call, expected):
    assert mismatches(plans_on("sm90", call)[1], expected) == {}


@pytest.mark.parametrize(("multiprocessors", "parts"), [(7, None), (8, 2), (50, 12), (132, 16), (300, 16)])
def test_the_switch_counts_in_the_backward_pass(multiprocessors, parts, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", str(multiprocessors))
    plan = wide(64, 4096).plans()[1]
    assert plan.splits == parts and (parts is None or plan.kernel == STORE_DS)
