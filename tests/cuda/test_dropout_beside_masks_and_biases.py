"""Hopper's kernels for dropout beside a mask, intervals, lists of blocks or a bias: lengths at edges of tiles, masks
and biases of every shape, few CTAs, packed sequences, rows without keys, the gradient of the bias, and NaN. In the
backward pass a bias above head dim 64 takes the two-pass kernels."""

import math

import pytest
import torch

from support.cases import Case, Inputs, make_inputs, without_dbias
from support.checks import check_drawn, check_hidden_keys, check_hidden_tiles, check_on_sm_counts, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SM_COUNTS = (1, 2, 7, 132)
RUNS = 100
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

DIMS = ((64, 64, 4), (128, 128, 2), (96, 40, 1))  # of q and k, of v; key heads
LENGTHS = ((80, 130), (257, 257), (320, 319), (383, 120), (513, 640), (300, 1500), (1100, 704))
VISIBILITIES = (dict(), dict(causal="top_left"), dict(causal="bottom_right", dlse=True), dict(window=(100, 30)))
# Of a query that sees few keys, delta's rounding shows the more, the more is dropped (docs/numerics.md, "delta").
PROBABILITY = 0.2
MASKS = (
    dict(mask="bhqk"),
    dict(mask="11qk"),
    dict(mask="b1qk"),
    dict(mask="b11k", sink=True),
    dict(intervals="1h", num_intervals=2),
    dict(blocks="b1"),
)
BIASES = (
    dict(bias="1hqk"),
    dict(bias="bhqk", mask="b11k"),
    dict(bias="11qk", mask="b1qk"),
    dict(bias="b1qk", sink=True),
)
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, dv=dv, dropout_p=PROBABILITY, **visible, **of_scores)
    for i, (d, dv, kv_heads) in enumerate(DIMS)
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, visible in enumerate(VISIBILITIES)
    for of_scores in (MASKS[(n + m + i) % len(MASKS)], BIASES[(n + m + i) % len(BIASES)])
]
FEW_CTAS = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, dropout_p=PROBABILITY, **visible, **of_scores)
    for d in (64, 80, 128)
    for sq, sk, kv_heads, of_scores in ((1000, 1304, 2, BIASES[0]), (1200, 1200, 4, MASKS[0]), (700, 900, 1, MASKS[4]))
    for visible in (dict(), dict(causal="top_left"), dict(window=(200, 200)))
]
REPEATED = [
    Case(sq=1100, sk=1504, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, dropout_p=PROBABILITY, **of_scores)
    for d, kv_heads in ((64, 8), (96, 4), (128, 2))
    for of_scores in (MASKS[0], MASKS[4], BIASES[0], BIASES[1])
]
PACKED = [
    PackedCase(
        (300, 0, 65, 704, 64),
        (304, 40, 129, 504, 0),
        Case(d=d, heads=4, kv_heads=2, dropout_p=PROBABILITY, **visible, **of_scores),
    )
    for d in (64, 128)
    for of_scores in (MASKS[0], MASKS[3], dict(intervals="1h"), BIASES[0], BIASES[3])
    for visible in VISIBILITIES[:3]
]
GRADIENTS_OF_BIASES = [
    Case(sq=sq, sk=sk, batch=batch, heads=4, kv_heads=kv_heads, d=d, dropout_p=PROBABILITY, bias=bias, **options)
    for sq, sk, batch, kv_heads in (
        (256, 256, 5, 4),
        (129, 136, 9, 4),
        (300, 264, 3, 2),
        (513, 712, 2, 1),
        (1030, 264, 1, 4),
    )
    for d, bias in ((64, "1hqk"), (32, "11qk"), (64, "bhqk"))
    for options in (dict(), dict(causal="top_left"), dict(mask="b11k", padding=True))
]


@over_16_bits
@over_cases(EDGES)
def test_edges_of_tiles(case, dtype, gpu):
    check_drawn(lambda seed: without_dbias(make_inputs(case, dtype, "cuda", seed, draw_on="cuda")), gpu)


@over_16_bits
@over_cases(GRADIENTS_OF_BIASES)
def test_gradients_of_biases(case, dtype, gpu):
    check_drawn(lambda seed: make_inputs(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: without_dbias(make_packed(case, dtype, "cuda", seed, draw_on="cuda")), gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(FEW_CTAS)
def test_few_ctas(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch, without_dbias)


@over_dtypes((torch.bfloat16,))
@over_cases(GRADIENTS_OF_BIASES[::5])
def test_splits_of_the_gradient_of_a_bias(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16,))
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(without_dbias(make_inputs(case, dtype, "cuda", draw_on="cuda")), gpu, RUNS)


@over_dtypes((torch.bfloat16,))
@over_cases(GRADIENTS_OF_BIASES[::4])
def test_gradients_of_biases_repeat(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_16_bits
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("of_scores", [dict(mask="b1qk"), dict(bias="1hqk", mask="b1qk")], ids=str)
def test_rows_without_keys(of_scores, d, dtype, gpu):
    case = Case(sq=450, sk=704, heads=2, d=d, dropout_p=PROBABILITY, dlse=True, **of_scores)

    def draw(seed: int) -> Inputs:
        inputs = without_dbias(make_inputs(case, dtype, "cuda", seed))
        inputs.mask[0, :, 100:230] = False
        inputs.mask[1, :, :, 300:] = False
        return inputs

    check_drawn(draw, gpu)
    result = run_ours(draw(0), gpu)
    assert bool((result["lse"][0, :, 100:230] == -math.inf).all()) and bool((result["out"][0, :, 100:230] == 0).all())
    assert bool((result["dq"][0, :, 100:230] == 0).all()) and bool((result["dk"][1, :, 300:] == 0).all())


@over_dtypes((torch.bfloat16,))
@over_cases([Case(sq=450, sk=700, heads=4, d=d, dropout_p=PROBABILITY, mask="11qk") for d in (64, 128)])
def test_tiles_that_a_mask_hides(case, dtype, gpu):
    check_hidden_tiles(case, dtype, gpu)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("of_scores", [dict(mask="11qk"), dict(bias="1hqk")], ids=str)
def test_nan_in_what_no_query_attends(of_scores, d, poison, dtype, gpu):
    case = Case(sq=500, sk=704, d=d, heads=2, dropout_p=0.1, **of_scores)
    inputs = without_dbias(make_inputs(case, dtype, "cuda"))
    if case.mask:
        inputs.mask[..., 550:] = False
    else:
        inputs.bias[..., 550:] = -math.inf
    check_hidden_keys(inputs, 550, poison, gpu)
