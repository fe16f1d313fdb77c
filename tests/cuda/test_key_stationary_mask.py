"""Hopper's key-stationary backward kernel with a boolean mask, which leaves out some (query tile, key tile) iterations:
masks of every shape, loop orders, few CTAs, tiles that are hidden, and NaN."""

import math
from collections.abc import Callable

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import (
    check_case,
    check_drawn,
    check_hidden_keys,
    check_hidden_tiles,
    check_on_sm_counts,
    check_packed_drawn,
)
from support.disturbance import assert_repeats
from support.masks import with_empty_tiles
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes

SM_COUNTS = (1, 2, 7, 132)
RUNS = 100
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

LENGTHS = ((257, 257), (320, 319), (383, 65), (513, 640), (300, 1500), (1100, 700))
PATTERNS = ("bhqk", "b11k", "11qk", "1h1k", "b1qk", "1hqk", "111k")
VISIBILITIES = (
    dict(),
    dict(causal="top_left"),
    dict(causal="bottom_right", dlse=True),
    dict(window=(100, 30)),
    dict(window=(200, None)),
)
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, dv=dv, mask=PATTERNS[(n + m + i) % len(PATTERNS)], **visible)
    for i, (d, dv, kv_heads) in enumerate(((64, 64, 4), (128, 128, 2), (96, 40, 1)))
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, visible in enumerate(VISIBILITIES)
] + [
    Case(sq=577, sk=640, heads=4, kv_heads=2, d=d, mask=mask, mask_keep=keep)
    for d in (64, 80, 128)
    for mask, keep in (("bhqk", 0.002), ("11qk", 0.0), ("b11k", 1.0))
]
HIDDEN = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, mask=mask, **visible)
    for sq, sk in ((450, 700), (1200, 1300))
    for d, kv_heads in ((64, 4), (128, 2), (128, 1))
    for mask in ("bhqk", "11qk")
    for visible in VISIBILITIES[:4]
]
FEW_CTAS = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, mask=mask, **visible)
    for d in (64, 80, 128)
    for sq, sk, kv_heads, mask in ((1000, 1300, 2, "bhqk"), (1200, 1200, 4, "b1qk"))
    for visible in (dict(), dict(causal="top_left"), dict(window=(200, 200)))
]
REPEATED = [
    Case(sq=1100, sk=1500, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, mask=mask, **visible)
    for d, kv_heads in ((64, 8), (96, 4), (128, 2))
    for mask in ("bhqk", "b1qk")
    for visible in (dict(), dict(causal="bottom_right"), dict(window=(300, 100)))
]
PACKED = [
    PackedCase((300, 0, 65, 700, 64), (300, 40, 129, 500, 0), Case(d=d, heads=4, kv_heads=2, mask=mask, **visible))
    for d in (64, 80, 128)
    for mask in ("bhqk", "11qk", "b11k")
    for visible in VISIBILITIES[:3]
]


@over_16_bits
@over_cases(EDGES)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(HIDDEN)
def test_tiles_that_a_mask_hides(case, dtype, gpu):
    check_hidden_tiles(case, dtype, gpu)


def documents(rows: int, columns: int) -> torch.Tensor:
    """Five of different lengths, each seeing itself."""
    ends = torch.tensor([0.05, 0.3, 0.35, 0.8])

    def document_of(length: int) -> torch.Tensor:
        return torch.bucketize(torch.arange(length) / length, ends)

    return (document_of(rows)[:, None] == document_of(columns))[None]


def padding(rows: int, columns: int) -> torch.Tensor:
    """Of three quarters of the keys."""
    return (torch.arange(columns) < columns * 3 // 4)[None, None]


def keys_of_one_head(rows: int, columns: int) -> torch.Tensor:
    """Each of four heads misses two tiles of keys: query heads of one key head have different iterations, or none."""
    mask = torch.ones(4, rows, columns, dtype=torch.bool)
    for head in range(4):
        mask[head, :, 256 * head : 256 * (head + 1)] = False
    return mask


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("make", [documents, padding, keys_of_one_head])
@pytest.mark.parametrize("visible", [dict(), dict(causal="top_left"), dict(window=(300, 100))], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("sq", "sk"), [(1500, 1500), (700, 1300)])
def test_masks_of_whole_tiles(sq, sk, d, visible, make, dtype, gpu):
    mask = make(sq, sk).to("cuda")[None]
    case = Case(sq=sq, sk=sk, heads=4, kv_heads=2, d=d, mask="1hqk" if mask.shape[1] > 1 else "11qk", **visible)
    check_drawn(lambda seed: make_inputs(case, dtype, "cuda", seed).replace(mask=mask), gpu)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("of", [lambda inputs: inputs, with_empty_tiles], ids=["whole", "with hidden tiles"])
@over_cases(FEW_CTAS)
def test_few_ctas(case, of: Callable[[Inputs], Inputs], dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch, of)


@over_dtypes((torch.bfloat16,))
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(with_empty_tiles(make_inputs(case, dtype, "cuda", draw_on="cuda")), gpu, RUNS)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("mask", ["11qk", "bhqk", "111k"])
@pytest.mark.parametrize("stride", [1, 3])
def test_strides_of_the_mask(stride, mask, dtype, gpu):
    """Rows that no wide load reads: of odd lengths, and with other keys between those of the mask."""
    case = Case(sq=333, sk=467, heads=4, kv_heads=2, d=128, mask=mask)

    def draw(seed: int) -> Inputs:
        inputs = make_inputs(case, dtype, "cuda", seed)
        wide = torch.zeros(*inputs.mask.shape[:-1], case.sk * stride, dtype=torch.bool, device="cuda")
        wide[..., ::stride] = inputs.mask
        return inputs.replace(mask=wide[..., ::stride])

    check_drawn(draw, gpu)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_nan_in_what_no_query_attends(d, poison, dtype, gpu):
    """Keys that the mask hides, some of them in a tile with others that it does not."""
    inputs = make_inputs(Case(sq=500, sk=700, d=d, heads=2, mask="11qk"), dtype, "cuda")
    inputs.mask[..., 550:] = False
    check_hidden_keys(inputs, 550, poison, gpu)
