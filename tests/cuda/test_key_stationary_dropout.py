"""Hopper's key-stationary backward kernel with dropout, which one warpgroup draws ahead of the others' iterations: loop
orders, key tiles with fewer iterations than the pipeline has stages, few CTAs, packed sequences, few queries, and
NaN."""

import math

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_case, check_hidden_keys, check_on_sm_counts, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SM_COUNTS = (1, 2, 7, 132)
RUNS = 100
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

DIMS = ((64, 64, 4), (128, 128, 2), (96, 40, 1))  # of q and k, of v; key heads
# Key tiles have one iteration or more; some are short, or no query sees them.
LENGTHS = ((40, 130), (64, 64), (100, 257), (257, 63), (320, 319), (513, 640), (300, 1500), (1100, 700))
FEW_QUERIES = ((64, 1153), (129, 2049), (300, 5000))
VISIBILITIES = (
    dict(),
    dict(causal="top_left"),
    dict(causal="bottom_right", dlse=True),
    dict(window=(100, 30)),
    dict(window=(200, None)),
    dict(window=(63, 0)),
)
# Of a query that sees few keys, delta's rounding shows the more, the more is dropped (docs/numerics.md, "delta").
PROBABILITIES = {False: (0.1, 0.2), True: (0.5, 0.9)}  # whether every query sees every key
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, dv=dv, dropout_p=PROBABILITIES[visible == {}][n % 2], **visible)
    for d, dv, kv_heads in DIMS
    for n, (sq, sk) in enumerate(LENGTHS + FEW_QUERIES)
    for visible in VISIBILITIES
]
FEW_CTAS = [
    Case(sq=sq, sk=sk, batch=2, heads=4, kv_heads=kv_heads, d=d, dropout_p=0.2, **visible)
    for d in (64, 80, 128)
    for sq, sk, kv_heads in ((1000, 1300, 2), (1200, 1200, 1), (300, 3000, 2))
    for visible in (dict(), dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(200, 200)))
]
REPEATED = [
    Case(sq=sq, sk=sk, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, dropout_p=0.2, **visible)
    for sq, sk in ((1100, 1500), (300, 4000))
    for d, kv_heads in ((64, 8), (96, 4), (128, 2))
    for visible in (dict(), dict(causal="bottom_right"), dict(window=(300, 100)))
]
PACKED = [
    PackedCase(lengths_q, lengths_k, Case(d=d, heads=4, kv_heads=2, dropout_p=0.1, **visible))
    for d in (64, 80, 128)
    for lengths_q, lengths_k in (
        ((300, 0, 65, 700, 64), (300, 40, 129, 500, 0)),
        ((3, 0, 65, 270, 64), (900, 40, 1290, 3000, 0)),
    )
    for visible in VISIBILITIES[:4]
]


@over_16_bits
@over_cases(EDGES)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(FEW_CTAS)
def test_few_ctas(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16,))
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("d", [64, 128])
def test_no_workspace(d, dtype, gpu, monkeypatch):
    """Draws take no memory, so that FLASH_ATTN_EXT_WORKSPACE_MIB bounds nothing of these calls."""
    inputs = make_inputs(Case(sq=700, sk=900, d=d, heads=4, kv_heads=2, dropout_p=0.3), dtype, "cuda")
    expected = run_ours(inputs, gpu)
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "0")
    result = run_ours(inputs, gpu)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(result[name], expected[name]), name


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_nan_in_what_no_query_attends(d, poison, dtype, gpu):
    """Causal: the keys behind the last query."""
    inputs = make_inputs(Case(sq=700, sk=900, d=d, heads=2, causal="top_left", dropout_p=0.1), dtype, "cuda")
    check_hidden_keys(inputs, 700, poison, gpu)
