"""Hopper's key-stationary backward kernel with a softcap: edges of tiles, caps and scales, loop orders, packed batches,
repeated runs, and NaN."""

import math

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_case, check_hidden_keys, check_on_sm_counts, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes

SM_COUNTS = (1, 2, 7, 132)
RUNS = 20
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))
over_bfloat16 = over_dtypes((torch.bfloat16,))

LENGTHS = ((257, 257), (320, 319), (383, 65), (513, 640), (300, 1500), (1100, 700))
DIMS = ((64, 64, 4), (128, 128, 2), (104, 40, 1))
VISIBILITIES = (
    dict(),
    dict(causal="top_left"),
    dict(causal="bottom_right", dlse=True),
    dict(window=(100, 30)),
    dict(window=(200, None)),
)
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, dv=dv, softcap=(8.0, 0.5, 50.0)[(n + m) % 3], **visible)
    for d, dv, kv_heads in DIMS
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, visible in enumerate(VISIBILITIES)
]
# The least and the largest cap that the kernel takes, and one more on either side.
CAPS = [
    Case(sq=320, sk=384, heads=2, d=d, softcap=softcap, causal="bottom_right", **options)
    for d in (64, 128)
    for softcap in (2.0**-11, 2.0**-10, 1.0, 2.0**8, 2.0**9)
    for options in (dict(), dict(scale=-0.3), dict(scale=4.0))
] + [Case(sq=320, sk=384, heads=2, d=d, softcap=5.0, sink=True, dlse=True) for d in (64, 128)]
FEW_CTAS = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, softcap=8.0, **visible)
    for d in (64, 128)
    for sq, sk, kv_heads in ((1000, 1300, 2), (1200, 1200, 4))
    for visible in (dict(), dict(causal="top_left"), dict(window=(200, 200)))
]
PACKED = [
    PackedCase((300, 0, 65, 700, 64), (300, 40, 129, 500, 0), Case(d=d, heads=4, kv_heads=2, softcap=8.0, **visible))
    for d in (64, 128)
    for visible in VISIBILITIES[:4]
]
REPEATED = [
    Case(sq=1100, sk=1500, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, softcap=20.0, **visible)
    for d, kv_heads in ((64, 8), (128, 2))
    for visible in (dict(), dict(causal="bottom_right"), dict(window=(300, 100)))
]


@over_16_bits
@over_cases(EDGES + CAPS)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_bfloat16
@over_cases(FEW_CTAS)
def test_few_ctas(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_bfloat16
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_16_bits
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_nan_in_what_no_query_attends(d, poison, dtype, gpu):
    """Keys that causality hides, some of them in a tile with others that it does not."""
    inputs = make_inputs(Case(sq=500, sk=700, d=d, heads=2, softcap=9.0, causal="top_left"), dtype, "cuda")
    check_hidden_keys(inputs, 500, poison, gpu)
