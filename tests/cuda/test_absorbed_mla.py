"""Head dims of MLA with absorbed weights, (576, 512) and near it: edges of tiles, one key head for up to 128 query
heads, packed batches, few queries, repeated runs, and NaN. In the portable kernels and in Hopper's."""

import math

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_case, check_hidden_keys, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes

RUNS = 20
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))
over_bfloat16 = over_dtypes((torch.bfloat16,))

DIMS = (dict(d=576, dv=512), dict(d=520, dv=512), dict(d=576, dv=64), dict(d=513, dv=257))
# Hopper's forward tiles have 128 queries, 64 for a warpgroup, and 48 keys; the portable ones 32 of each.
LENGTHS = ((1, 47), (63, 48), (64, 49), (65, 96), (127, 97), (128, 145), (129, 33), (192, 300), (257, 1), (300, 240))
VISIBLE = (
    dict(),
    dict(causal="top_left"),
    dict(causal="bottom_right", dlse=True),
    dict(window=(40, 10)),
    dict(causal="bottom_right", window=(100, None)),
    dict(window=(0, 200), dlse=True),
    dict(causal="top_left", sink=True),
)
EDGES = [
    Case(sq=sq, sk=sk, batch=2, heads=4, kv_heads=(1, 4, 2)[(n + m) % 3], **dims, **VISIBLE[(n + 3 * m) % len(VISIBLE)])
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, dims in enumerate(DIMS)
]
# One warpgroup of a tile sees many keys that the other one does not, at either end.
UNEVEN = [
    Case(sq=700, sk=sk, batch=1, heads=2, kv_heads=1, d=576, dv=512, **options)
    for sk in (700, 513, 1000)
    for options in (
        dict(causal="top_left"),
        dict(causal="bottom_right"),
        dict(window=(30, 0)),
        dict(window=(0, 30)),
        dict(window=(10, 5), causal="top_left"),
        dict(window=(0, 600)),
    )
]
GROUPS = [
    Case(sq=sq, sk=260, batch=1, heads=heads, kv_heads=1, d=576, dv=512, **options)
    for sq, heads in ((2, 16), (300, 16), (1, 128), (270, 128))
    for options in (dict(causal="bottom_right"), dict(dlse=True))
]
CHANGED = [
    Case(sq=sq, sk=130, batch=2, heads=4, kv_heads=1, d=576, dv=512, **options)
    for sq in (3, 70, 300)
    for options in (
        dict(softcap=5.0),
        dict(mask="bhqk"),
        dict(mask="b11k", padding=True),
        dict(bias="bhqk", causal="top_left"),
        dict(bias="11qk"),
        dict(bias="b11k", dlse=True),
        dict(alibi="h"),
        dict(dropout_p=0.2),
        dict(scale=-0.1),
        dict(scale=0.0),
        dict(intervals="bh", num_intervals=2),
        dict(layout="bshd", sink=True, softcap=9.0, alibi="bh", mask="1h1k"),
    )
]
PACKED = [
    PackedCase((300, 0, 65, 700, 64), (300, 40, 129, 500, 0), Case(heads=heads, kv_heads=1, d=576, dv=512, **options))
    for heads, options in (
        (4, dict()),
        (16, dict(causal="bottom_right")),
        (2, dict(window=(90, 40), dlse=True)),
        (4, dict(causal="top_left", softcap=9.0)),
    )
]
REPEATED = [
    Case(sq=500, sk=700, batch=2, heads=16, kv_heads=1, d=576, dv=512, dlse=True, **options)
    for options in (dict(causal="bottom_right"), dict(window=(300, 100)), dict(softcap=5.0))
]


@over_16_bits
@over_cases(EDGES + UNEVEN + GROUPS)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(CHANGED)
def test_what_changes_scores(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_bfloat16
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_16_bits
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("sq", [500, 40])
def test_nan_in_what_no_query_attends(sq, poison, dtype, gpu):
    """Keys that causality hides, some of them in a tile with others that it does not."""
    inputs = make_inputs(Case(sq=sq, sk=700, d=576, dv=512, heads=2, causal="top_left"), dtype, "cuda")
    check_hidden_keys(inputs, sq, poison, gpu)
