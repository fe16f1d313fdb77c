"""Whether the work tiles of a packed batch that exist are listed, on Hopper. Plans need no GPU, and are of an H200."""

import pytest

from support.plans import KEY_STATIONARY, WARP_SPECIALISED, mismatches, packed_plans

LISTED = "work tiles that exist"
SHORT = (80,) * 64
HEADS = dict(d=128, heads=32, key_heads=8)
# The list has a count, those of 1024 work tiles each, and an entry for each work tile that may exist. In the backward
# pass a work tile has one query head, too.
ENTRIES = 32 * (13312 // 128 + 65)
BYTES = 4 * (1 + 32 * 65 * 64 // 1024 + ENTRIES)


def test_one_long_sequence():
    forward, backward = packed_plans((8192, *SHORT), **HEADS, causal="bottom_right")
    assert mismatches(forward, dict(kernel=WARP_SPECIALISED, workspace={LISTED: BYTES})) == {}
    of_backward = {LISTED: BYTES, "key tiles": 112 * ENTRIES}
    assert mismatches(backward, dict(kernel=KEY_STATIONARY, workspace=of_backward)) == {}


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((2048,) * 8, {}),
        ((4096, 3000, 2000), {}),
        ((2048, 80), {}),
        ((8192, *SHORT), {"backend": "sm80"}),
    ],
    ids=str,
)
def test_there_is_no_list(lengths, options):
    for plan in packed_plans(lengths, **HEADS, **options):
        assert plan.workspace.get(LISTED, 0) == 0
