"""Which kernels lists of blocks take: those of intervals, with tiles that fit the blocks where there are such."""

import pytest

from flash_attn_ext._explanation import Plan
from support.plans import KEY_STATIONARY, TWO_PASS, WARP_SPECIALISED, Call, mismatches

LONG = 2048
TILES = LONG // 64


def plans(size: int = 128, planes: tuple = (1, 1), backend: str = "sm90", **more) -> tuple[Plan, Plan]:
    more["options"] = {"backend": backend} | more.get("options", {})
    return Call(LONG, block_lists=(*planes, LONG // size), block_sizes=(size, size), **more).plans()


FORWARD = [
    (dict(), dict(kernel=WARP_SPECIALISED, score_mode="mask", tile=(128, 128))),
    (dict(size=64), dict(kernel=WARP_SPECIALISED, score_mode="mask", tile=(128, 64))),
    (dict(d=128), dict(score_mode="mask", tile=(128, 128))),
    (dict(d=128, size=64), dict(score_mode="mask", tile=(128, 64))),
    (dict(d=192, size=64), dict(score_mode="mask", tile=(128, 64))),
    (dict(d=256), dict(score_mode="mask", tile=(128, 64))),
    (dict(d=128, size=64, options={"wants_row_max": True}), dict(score_mode="mask", tile=(128, 128))),
    (dict(bias=(1, 16, LONG, LONG)), dict(score_mode="bias and mask")),
    (dict(options={"softcap": 9.0}), dict(score_mode="softcap and mask")),
    (dict(slopes=True), dict(score_mode="ALiBi and mask")),
    (dict(options={"dropout_p": 0.1}), dict(score_mode="mask and dropout")),
    (dict(mask=(8, 1, 1, LONG)), dict(score_mode="generic")),
    (dict(intervals=(1, 1, LONG, 8)), dict(score_mode="mask", tile=(128, 128))),
]
BACKWARD = [
    (dict(), dict(kernel=KEY_STATIONARY, score_mode="mask", cyclic=False)),
    (dict(d=128, size=64, options={"causal": "top_left"}), dict(kernel=KEY_STATIONARY, score_mode="mask")),
    (dict(d=192), dict(kernel=TWO_PASS)),
    (dict(d=128, bias=(1, 16, LONG, LONG)), dict(kernel=KEY_STATIONARY, score_mode="bias and mask")),
]


@pytest.mark.parametrize(("call", "expected"), FORWARD, ids=str)
def test_forward_kernels_of_hopper(call, expected):
    assert mismatches(plans(**call)[0], expected) == {}


@pytest.mark.parametrize(("call", "expected"), BACKWARD, ids=str)
def test_backward_kernels_of_hopper(call, expected):
    assert mismatches(plans(**call)[1], expected) == {}


@pytest.mark.parametrize(("planes", "count"), [((1, 1), 1), ((8, 1), 8), ((1, 16), 16), ((8, 4), 128)])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_a_byte_for_each_tile_of_pairs(backend, size, planes, count):
    """And no bits of a mask. Lists of key heads are those of their query heads."""
    forward, _ = plans(size, planes, backend, key_heads=4)
    expected = {"mask tiles": count * TILES * TILES, "mask bits": 0}
    assert mismatches(forward, dict(workspace=expected)) == {}
