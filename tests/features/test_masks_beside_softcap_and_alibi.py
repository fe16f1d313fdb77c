"""A softcap or ALiBi slopes beside a boolean mask, intervals or lists of blocks.

On Hopper both have kernels of their own beside each of these, up to head dim 128. Intervals and blocks have the score
mode of a mask.
"""

import math

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import check_case, check_drawn, check_hidden_keys, check_hidden_tiles, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import for_gpus, over_cases, over_dtypes

CHANGES = (dict(softcap=8.0), dict(alibi="h"))
HIDES = (
    dict(mask="bhqk", dlse=True),
    dict(mask="b11k", padding=True),
    dict(mask="1h1k", sink=True),
    dict(intervals="bh", num_intervals=2),
    dict(intervals="11", interval_rows=64, dlse=True),
    dict(blocks="1h", block_sizes=(128, 64)),
    dict(blocks="11", intervals="b1", block_sizes=(64, 128)),
)
VISIBILITIES = (dict(), dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(100, 30)))
LENGTHS = ((257, 257), (383, 65), (300, 420), (190, 1153))


def cases(d: int, dv: int, kv_heads: int) -> list[Case]:
    return [
        Case(sq=sq, sk=sk, d=d, dv=dv, heads=4, kv_heads=kv_heads, **change, **hides, **visible)
        for i, change in enumerate(CHANGES)
        for j, hides in enumerate(HIDES)
        for visible in VISIBILITIES[(i + j) % 2 :: 2]
        for sq, sk in LENGTHS[j % 2 :: 2]
    ]  # test_tiles_that_a_mask_hides has ALiBi beside masks where every query sees every key


CASES = {d: cases(d, dv, kv_heads) for d, dv, kv_heads in ((40, 24, 2), (64, 64, 4), (96, 96, 1), (128, 128, 2))}
# Masks that leave one interval of the keys to each batch entry. Where the lengths differ, the diagonal is not that of
# the interval.
PADDED = [
    Case(sq=sq, sk=sk, d=d, heads=2, batch=3, mask="b11k", padding=True, dlse=True, **change, **visible)
    for d in (64, 128)
    for change in CHANGES
    for sq, sk in ((300, 300), (300, 500))
    for visible in (dict(), dict(causal="top_left"), dict(window=(120, 40)))
]
# Above head dim 128 one generic kernel has a mask beside everything but a bias.
WIDE = [
    Case(sq=sq, sk=sk, d=d, dv=dv, heads=4, kv_heads=2, **hides, **visible, **change)
    for d, dv in ((192, 128), (192, 192), (256, 256), (136, 256))
    for change in (*CHANGES, dict(dropout_p=0.3), dict(scale=-0.3), dict(softcap=5.0, alibi="bh", dropout_p=0.2))
    for sq, sk, hides, visible in (
        (450, 700, dict(mask="bhqk", dlse=True), dict()),
        (300, 300, dict(mask="b11k", padding=True), dict(causal="top_left")),
        (700, 420, dict(intervals="bh", num_intervals=2), dict(window=(300, 100))),
        (520, 640, dict(blocks="1h", block_sizes=(128, 64)), dict(causal="bottom_right")),
    )
]
MORE = [
    *(Case(sq=300, sk=420, d=64, heads=2, mask="bhqk", softcap=cap, scale=0.7) for cap in (2.0**-11, 0.5, 300.0)),
    Case(sq=300, sk=420, d=64, heads=2, mask="bhqk", softcap=5.0, scale=-0.3),
    Case(sq=300, sk=420, d=64, heads=2, mask="bhqk", softcap=5.0, alibi="h"),
    Case(sq=300, sk=420, d=64, heads=2, mask="bhqk", alibi="bh", scale=-0.3),
    Case(sq=300, sk=420, d=64, heads=2, mask="b11k", alibi="bh", dropout_p=0.3),
    Case(sq=300, sk=420, d=128, heads=2, mask="11qk", softcap=5.0, bias="1h1k"),
    Case(sq=300, sk=420, d=128, heads=2, mask="11q1", alibi="h"),
    Case(sq=30, sk=1420, d=64, heads=4, kv_heads=2, mask="b11k", alibi="h", causal="bottom_right"),
]
FEW_QUERIES = Case(sq=30, sk=1420, d=64, heads=4, kv_heads=2, mask="b11k", softcap=5.0, causal="bottom_right")


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases([*CASES[40], *for_gpus(CASES[64] + CASES[96] + CASES[128] + PADDED)])
def test_matches_float64(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16,))
@over_cases([FEW_QUERIES, *for_gpus(WIDE + MORE)])
def test_beside_other_options(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16,))
@over_cases(
    for_gpus(
        Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, mask=mask, **change, **visible)
        for sq, sk in ((450, 700), (1200, 1300))
        for d, kv_heads in ((64, 4), (128, 2))
        for mask in ("bhqk", "11qk")
        for change in CHANGES
        for visible in VISIBILITIES[:2]
    )
)
def test_tiles_that_a_mask_hides(case, dtype, backend):
    check_hidden_tiles(case, dtype, backend)


@over_dtypes((torch.bfloat16,))
@over_cases(
    for_gpus(
        PackedCase((300, 0, 65, 700, 64), (300, 40, 129, 500, 0), Case(d=d, heads=4, kv_heads=2, **hides, **change))
        for d in (64, 128)
        for hides in (dict(mask="bhqk"), dict(mask="b11k", causal="bottom_right"), dict(intervals="1h"))
        for change in CHANGES
    )
)
def test_packed(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
def test_nan_in_what_no_query_attends(d, change, poison, dtype, backend):
    """Keys that the mask hides, some of them in a tile with others that it does not."""
    inputs = make_inputs(Case(sq=500, sk=700, d=d, heads=2, mask="11qk", **change), dtype, backend.device)
    inputs.mask[..., 550:] = False
    check_hidden_keys(inputs, 550, poison, backend)


@over_dtypes((torch.bfloat16,))
@over_cases(
    for_gpus(
        Case(sq=700, sk=900, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, mask="bhqk", **change)
        for d, kv_heads in ((64, 8), (96, 4), (128, 2))
        for change in CHANGES
    )
)
def test_repeats(case, dtype, backend):
    assert_repeats(make_inputs(case, dtype, backend.device), backend, 20)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@pytest.mark.parametrize("slope", [0.0, 1e-4, 3.0, -0.01], ids=str)
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
def test_slopes_of_any_size(d, slope, dtype, backend):
    """Far keys of a steep slope have no weight, and with a negative slope they have the most."""

    def draw(seed: int) -> Inputs:
        case = Case(sq=700, sk=700, d=d, heads=2, batch=1, alibi="h", mask="b1qk", mask_keep=0.5)
        inputs = make_inputs(case, dtype, backend.device, seed)
        return inputs.replace(alibi_slopes=torch.full_like(inputs.alibi_slopes, slope))

    check_drawn(draw, backend)
