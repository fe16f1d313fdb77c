"""Hopper's forward kernels of windows at head dims from 97 to 128: tiles of 192 and of 128 queries by 64 keys, lengths
and windows that end at, before and behind their edges, packed batches, padding, and NaN."""

import math

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_hidden_keys, check_on_sm_counts, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes

# On few SMs there are many query tiles for each, which then have 192 queries.
SM_COUNTS = (1, 132)
RUNS = 100
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

WINDOWS = ((0, 0), (63, 0), (64, 0), (0, 65), (64, 64), (100, 30), (511, 0))
LENGTHS = ((191, 700), (192, 640), (193, 577), (385, 1000), (700, 193), (128, 513), (129, 1))
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=(4, 2, 1)[(i + j) % 3], d=(128, 112, 104)[(i + 2 * j) % 3], window=window)
    for i, (sq, sk) in enumerate(LENGTHS)
    for j, window in enumerate(WINDOWS)
]
OPTIONS = [
    Case(sq=450, sk=800, heads=4, kv_heads=2, d=128, window=(200, 40), **options)
    for options in (
        dict(causal="top_left"),
        dict(causal="bottom_right"),
        dict(sink=True, dlse=True),
        dict(dv=100),
        dict(layout="bshd"),
        dict(mask="b11k", padding=True),
    )
]
PACKED = [
    PackedCase((300, 0, 65, 700, 193), (300, 40, 129, 640, 0), Case(d=d, heads=4, kv_heads=2, window=window))
    for d in (128, 104)
    for window in ((63, 0), (200, 40))
]


@over_16_bits
@over_cases(EDGES)
def test_edges_of_tiles(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_16_bits
@over_cases(OPTIONS)
def test_options(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16,))
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_16_bits
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
def test_nan_in_what_no_query_attends(poison, dtype, gpu):
    """Keys behind the last query, some of them in a tile with others that it sees."""
    inputs = make_inputs(Case(sq=400, sk=700, heads=2, d=128, window=(100, 9), causal="top_left"), dtype, "cuda")
    check_hidden_keys(inputs, 400, poison, gpu)


@over_dtypes((torch.bfloat16,))
@over_cases([Case(sq=1500, sk=1500, batch=16, heads=8, d=128, window=window) for window in ((255, 0), (64, 64))])
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)
