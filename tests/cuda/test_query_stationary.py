"""Hopper's query-stationary backward kernel: stream-K ranges of keys that begin and end anywhere, boolean masks, and
NaN."""

import math

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_case, check_hidden_keys, check_inputs, check_on_sm_counts
from support.disturbance import assert_repeats
from support.errors import assert_same_answer
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SM_COUNTS = (1, 2, 7, 50, 131, 132)
RUNS = 100
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

EDGES = [
    Case(sq=sq, sk=sk, batch=2, heads=3, d=d, dv=dv, dlse=sq % 2 == 0)
    for d, dv in ((64, 64), (128, 128), (72, 40))
    for sq in (1, 16, 63, 64, 65, 127, 128)
    for sk in (1024, 1025, 1087, 1152, 2500)
    if sk > 8 * sq
]
# CTAs with tiles of several heads, CTAs with tiles of one head, and heads that several CTAs share.
RANGES = [
    Case(sq=sq, sk=sk, batch=batch, heads=heads, d=d)
    for d in (64, 128)
    for sq, sk, batch, heads in ((128, 1100, 5, 7), (64, 1024, 1, 1), (100, 8193, 1, 3), (16, 1024, 40, 8))
]
RANGES += [Case(sq=100, sk=1100, batch=5, heads=7, d=d, mask=mask) for d in (64, 128) for mask in ("b11k", "bhqk")]
REPEATED = [
    Case(sq=sq, sk=sk, batch=3, heads=8, d=d, mask=mask)
    for sq, sk in ((100, 4000), (128, 1090))
    for d in (64, 128)
    for mask in (None, "bhqk")
]
MASKS = (
    dict(mask="b11k"),
    dict(mask="bhqk", dlse=True),
    dict(mask="11qk", sink=True),
    dict(mask="bh1k"),
    dict(mask="1hqk", scale=0.3),
    dict(mask="b1qk", layout="bshd"),
    dict(mask="b11k", sink=True, dlse=True),
)
MASKED = [
    Case(sq=sq, sk=sk, batch=2, heads=3, d=d, dv=dv, **MASKS[(3 * i + 2 * j + k) % len(MASKS)])
    for k, (d, dv) in enumerate(((64, 64), (128, 128), (72, 40), (32, 32)))
    for i, sq in enumerate((1, 16, 63, 64, 65, 100, 127, 128))
    for j, sk in enumerate((257, 640, 1025, 1087, 1152, 2500))
    if sk > 8 * sq or sq > 64
]


@over_16_bits
@over_cases(EDGES)
def test_edges_of_tiles(case, dtype, gpu, on_hopper):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(MASKED)
def test_masks(case, dtype, gpu, on_hopper):
    check_case(case, dtype, gpu)


@over_16_bits
@pytest.mark.parametrize("d", [64, 128])
def test_hidden_queries_and_tiles(d, dtype, gpu, on_hopper):
    """Queries without a key, the dlse of one of which is NaN, and tiles of keys that nothing attends to."""
    inputs = make_inputs(Case(sq=100, sk=1000, d=d, heads=3, mask="bhqk", dlse=True), dtype, "cuda")
    inputs.mask[:, :, 5] = inputs.mask[:, :, 64:] = False
    inputs.mask[..., 128:320] = inputs.mask[..., 960:] = False
    result = check_inputs(inputs, gpu)
    assert bool((result["dq"][:, :, 5] == 0).all()) and bool((result["dq"][:, :, 64:] == 0).all())
    assert bool((result["dk"][:, :, 128:320] == 0).all()) and bool((result["dv"][:, :, 960:] == 0).all())
    inputs.dlse[:, :, 5] = math.nan
    spoiled = run_ours(inputs, gpu)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(spoiled[name], result[name])


@over_16_bits
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(("sq", "sk", "d"), [(32, 1500, 64), (100, 900, 64), (100, 900, 128)])
def test_nan_in_what_a_mask_hides(sq, sk, d, poison, dtype, gpu, on_hopper):
    inputs = make_inputs(Case(sq=sq, sk=sk, batch=4, heads=8, d=d, mask="b11k"), dtype, "cuda")
    inputs.mask[..., sk - 90 :] = False
    check_hidden_keys(inputs, sk - 90, poison, gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(RANGES)
def test_stream_k_ranges(case, dtype, gpu, on_hopper, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16,))
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu, on_hopper):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_16_bits
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
def test_a_spoiled_dout_spoils_what_depends_on_it(d, poison, dtype, gpu, on_hopper):
    """One row of dout: its own dQ, and all of dK and dV, but nothing of other heads."""
    inputs = make_inputs(Case(sq=100, sk=1500, d=d, batch=1, heads=3), dtype, "cuda")
    clean = run_ours(inputs, gpu)
    inputs.dout[:, 1, 70] = poison
    result = run_ours(inputs, gpu)
    others = torch.arange(100, device="cuda") != 70
    for name in ("dk", "dv"):
        assert not bool(result[name][:, 1].isfinite().all(-1).any())
        assert_same_answer(result[name], clean[name], gpu, name, (slice(None), [0, 2]))
    assert not bool(result["dq"][:, 1, 70].isfinite().any())
    assert_same_answer(result["dq"], clean["dq"], gpu, "dq", (slice(None), [0, 2]))
    assert_same_answer(result["dq"], clean["dq"], gpu, "dq", (slice(None), 1, others))
