"""Hopper's key-stationary backward kernel with a bias that gets no gradient, alone or beside a mask. TMA loads the bias
of a (query tile, key tile) iteration to where its dS will lie. Loop orders, lengths at edges of tiles, few CTAs, packed
sequences, low and empty rows, and NaN."""

import dataclasses
import math

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import check_drawn, check_hidden_keys, check_on_sm_counts, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SM_COUNTS = (1, 2, 7, 132)
RUNS = 100
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

DIMS = ((64, 64, 4), (128, 128, 2), (96, 40, 1))  # of q and k, of v; key heads
LENGTHS = ((130, 130), (257, 63), (320, 319), (513, 640), (300, 1500), (1100, 700))
PATTERNS = ("bhqk", "11qk", "1hqk", "b1qk")
VISIBILITIES = (
    dict(),
    dict(causal="top_left"),
    dict(causal="bottom_right", dlse=True),
    dict(window=(100, 30)),
    dict(window=(200, None)),
    dict(sink=True),
)
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, dv=dv, bias=PATTERNS[(n + m + i) % len(PATTERNS)], **visible)
    for i, (d, dv, kv_heads) in enumerate(DIMS)
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, visible in enumerate(VISIBILITIES)
]
# What hides keys beside a bias: masks of keys and of pairs, intervals and lists of blocks.
HIDING = (
    dict(mask="b11k", padding=True),
    dict(mask="bhqk"),
    dict(intervals="1h", num_intervals=2),
    dict(mask="11qk"),
    dict(blocks="b1"),
    dict(mask="b1qk"),
    dict(intervals="bh", num_intervals=4),
)
MASKED = [
    dataclasses.replace(case, dropout_p=dropout_p, **HIDING[(n + 3 * (n // len(HIDING))) % len(HIDING)])
    for n, case in enumerate(EDGES)
    for dropout_p in ((0.0, 0.2) if case.d == 64 else (0.0,))
]
MASKED_FEW_CTAS = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, bias=bias, **hiding)
    for d in (64, 80, 128)
    for sq, sk, kv_heads, bias in ((1000, 1304, 2, "bhqk"), (1200, 1200, 4, "11qk"))
    for hiding in (dict(mask="bhqk"), dict(mask="b11k", padding=True), dict(intervals="1h", causal="top_left"))
]
FEW_CTAS = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, bias=bias, **visible)
    for d in (64, 80, 128)
    for sq, sk, kv_heads, bias in ((1000, 1304, 2, "bhqk"), (1200, 1200, 4, "11qk"))
    for visible in (dict(), dict(causal="top_left"), dict(window=(200, 200)))
]
REPEATED = [
    Case(sq=1100, sk=1504, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, bias=bias, **visible)
    for d, kv_heads in ((64, 8), (96, 4), (128, 2))
    for bias in ("bhqk", "11qk")
    for visible in (dict(), dict(causal="bottom_right"), dict(window=(300, 100)))
]
MASKED_REPEATED = [
    Case(sq=1100, sk=1504, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, bias="bhqk", **hiding)
    for d, kv_heads in ((64, 8), (96, 4), (128, 2))
    for hiding in (dict(mask="b11k", padding=True), dict(mask="11qk", causal="bottom_right"), dict(intervals="b1"))
] + [Case(sq=1100, sk=1504, heads=8, d=64, bias="1hqk", mask="b1qk", dropout_p=0.2)]
MASKED_PACKED = [
    PackedCase((300, 0, 65, 704, 64), (304, 40, 129, 504, 0), Case(d=d, heads=4, kv_heads=2, bias=bias, **hiding))
    for d in (64, 80, 128)
    for bias, hiding in (
        ("bhqk", dict(mask="b11k", padding=True)),
        ("11qk", dict(mask="bhqk", causal="bottom_right")),
        ("b1qk", dict(intervals="1h", num_intervals=2)),
    )
]
PACKED = [
    PackedCase((300, 0, 65, 704, 64), (304, 40, 129, 504, 0), Case(d=d, heads=4, kv_heads=2, bias=bias, **visible))
    for d in (64, 80, 128)
    for bias in ("bhqk", "11qk", "b1qk")
    for visible in VISIBILITIES[:4]
]


def without_dbias(inputs: Inputs) -> Inputs:
    """With a bias as TMA reads it, in rows of whole 16 bytes, behind whose ends there is NaN."""
    *broadcast, rows, columns = inputs.bias.shape
    wide = inputs.bias.new_full((*broadcast, rows, columns + -columns % 8), math.nan)
    wide[..., :columns] = inputs.bias
    return inputs.replace(bias=wide[..., :columns], differentiable=("q", "k", "v"))


def make(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    return without_dbias(make_inputs(case, dtype, "cuda", seed, draw_on="cuda"))


@over_16_bits
@over_cases(EDGES + MASKED)
def test_edges_of_tiles(case, dtype, gpu):
    check_drawn(lambda seed: make(case, dtype, seed), gpu)


@over_16_bits
@over_cases(PACKED + MASKED_PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: without_dbias(make_packed(case, dtype, "cuda", seed, draw_on="cuda")), gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(FEW_CTAS + MASKED_FEW_CTAS)
def test_few_ctas(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch, without_dbias)


@over_dtypes((torch.bfloat16,))
@over_cases(REPEATED + MASKED_REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(make(case, dtype), gpu, RUNS)


@over_16_bits
@pytest.mark.parametrize("value", ["-inf", "finfo.min", "-1e4", "3e4"])
@pytest.mark.parametrize("d", [64, 128])
def test_low_and_empty_rows(d, value, dtype, gpu):
    """-inf rows are empty, of others the LSE does not hold the weights, or is far from 0."""
    number = torch.finfo(dtype).min if value == "finfo.min" else float(value)

    def draw(seed: int) -> Inputs:
        inputs = make(Case(sq=320, sk=320, d=d, bias="11qk", dlse=True), dtype, seed)
        inputs.bias[:, :, [0, 17, 63, 64, 300]] = number
        inputs.bias[:, :, 100:200, 7:300] = -math.inf
        inputs.bias[:, :, 128:192] = -math.inf
        return inputs

    check_drawn(draw, gpu)
    result = run_ours(draw(0), gpu)
    assert bool((result["dq"][:, :, 128:192] == 0).all())


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("hides", ["bias", "mask"])
def test_nan_in_what_no_query_attends(hides, d, poison, dtype, gpu):
    """Keys that the bias or the mask hides, some of them in a tile with others that it does not."""
    mask = "b11k" if hides == "mask" else None
    inputs = make(Case(sq=500, sk=700, batch=2, d=d, heads=2, bias="11qk", mask=mask), dtype)
    if hides == "mask":
        inputs.mask[..., 550:] = False
        inputs.bias[..., 550:] = poison
    else:
        inputs.bias[..., 550:] = -math.inf
    check_hidden_keys(inputs, 550, poison, gpu)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("mask", [None, "11qk"])
@pytest.mark.parametrize("d", [64, 128])
def test_no_workspace(d, mask, dtype, gpu, monkeypatch):
    """Nothing is kept of scores, so that FLASH_ATTN_EXT_WORKSPACE_MIB bounds nothing of these calls."""
    inputs = make(Case(sq=700, sk=904, d=d, heads=4, kv_heads=2, bias="bhqk", mask=mask), dtype)
    expected = run_ours(inputs, gpu)
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "0")
    result = run_ours(inputs, gpu)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(result[name], expected[name]), name
