"""Into how many shares the key-stationary backward kernel divides the queries of few keys on Hopper.

Plans need no GPU (test_plans.py). They are those of an H200, which has 132 SMs.
"""

import pytest

from support.plans import KEY_STATIONARY, TWO_PASS, Call, label, mismatches


def hopper(sq: int, sk: int, heads: int, **more) -> Call:
    options = {"backend": "sm90"} | more.pop("options", {})
    return Call(sq, sk, heads=heads, options=options, **{"batch": 1} | more)


PLANS = [
    # As many shares as fill the SMs once: 3 of 40 key tiles, 8 of 16.
    (hopper(4096, 77, 10, batch=4), dict(kernel=KEY_STATIONARY, cyclic=True, group_shares=3)),
    (hopper(16384, 256, 1, batch=8), dict(group_shares=8, workspace={"partial dK and dV": 8 * 8 * 256 * 128 * 4})),
    (hopper(4096, 77, 24, d=128), dict(group_shares=5)),
    # Several times, where few rounds waste little.
    (hopper(4096, 77, 10, batch=16), dict(group_shares=4)),
    # Query heads that share a key head are iterations of the same share.
    (hopper(4096, 77, 40, key_heads=10, batch=4), dict(group_shares=3)),
    # Sums of many shares have a price.
    (hopper(16384, 256, 1), dict(group_shares=20)),
    # Short shares of several key tiles would wait for each other.
    (hopper(1024, 256, 16), dict(group_shares=4)),
    (hopper(512, 512, 12), dict(group_shares=None)),
    (hopper(1024, 1024, 8), dict(group_shares=None)),
    # Instead of query chunks.
    (hopper(131072, 256, 8, d=128), dict(group_shares=8, query_chunks=None)),
    # SMs are full, keys are many, or the order is not cyclic.
    (hopper(2048, 32, 4, batch=64), dict(group_shares=None)),
    (hopper(8192, 1025, 4), dict(group_shares=None)),
    (hopper(4096, 77, 10, batch=4, mask=(4, 1, 4096, 77)), dict(group_shares=None, score_mode="mask")),
    (hopper(4096, 77, 10, options={"window": (None, 100)}), dict(group_shares=None, cyclic=False)),
    # Other scores.
    (hopper(4096, 77, 10, batch=4, options={"dropout_p": 0.1}), dict(group_shares=3, score_mode="dropout")),
    (hopper(4096, 77, 10, batch=4, options={"softcap": 9.0}), dict(group_shares=3, score_mode="softcap")),
    (hopper(4096, 77, 10, batch=4, bias=(4, 1, 1, 77)), dict(group_shares=3, score_mode="key bias")),
    # A mask of keys is written as a bias where that allows shares, and not where SMs are full.
    (
        hopper(4096, 77, 10, batch=4, mask=(4, 1, 1, 77)),
        dict(group_shares=3, score_mode="key bias", workspace={"mask as a bias": 4 * 77 * 2}),
    ),
    (hopper(2048, 32, 4, batch=64, mask=(64, 1, 1, 32)), dict(group_shares=None, score_mode="mask")),
    # Lists leave out hidden key tiles of each head, which a bias of each head does not.
    (hopper(4096, 300, 16, batch=4, mask=(4, 16, 1, 300)), dict(group_shares=None, score_mode="mask")),
    (hopper(4096, 77, 10, batch=4, mask=(4, 10, 1, 77)), dict(group_shares=3, score_mode="key bias")),
    (hopper(4096, 77, 10, batch=4, d=160, mask=(4, 1, 1, 77)), dict(kernel=TWO_PASS)),
    # Key tiles of padding are left out where each SM has 32 iterations or more.
    (hopper(4096, 300, 16, batch=4, mask=(4, 1, 1, 300)), dict(workspace={"keys before padding": 4 * 4})),
    (hopper(4096, 300, 16, mask=(1, 1, 1, 300)), dict(score_mode="key bias", workspace={"keys before padding": 0})),
]


@pytest.mark.parametrize(("call", "expected"), PLANS, ids=label)
def test_query_shares(call, expected):
    plan = call.plans()[1]
    assert not mismatches(plan, expected)
