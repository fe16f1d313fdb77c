"""Hopper's two-pass backward kernels, which materialise P and dS. Calls take them for most gradients of biases, where
several things change scores, where few queries have a mask, and above head dim 128. Edges of tiles, tiles that a mask
hides, several launches, query chunks, key chunks, and NaN."""

import math

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs, without_dbias
from support.checks import (
    SM_COUNT_SWITCH,
    check_case,
    check_drawn,
    check_hidden_keys,
    check_hidden_tiles,
    check_packed_drawn,
)
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed, run_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

RUNS = 100
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

DIMS = (dict(d=128), dict(d=64), dict(d=96, dv=40), dict(d=64, dv=128))
LENGTHS = ((257, 63), (320, 65), (384, 127), (300, 129), (512, 192), (577, 640), (270, 1))
OPTIONS = (
    dict(bias="11qk", mask="bhqk"),
    dict(bias="1hqk", mask="b1qk"),
    dict(mask="11q1"),
    dict(bias="1hqk"),
    dict(bias="bhqk", mask="11qk"),
    dict(bias="11qk", dropout_p=0.3),
    dict(softcap=8.0, dropout_p=0.1),
    dict(mask="b1qk", softcap=8.0, dropout_p=0.1),
    dict(scale=-0.2),
)
VISIBLE = (dict(), dict(causal="bottom_right"), dict(window=(100, 30)), dict(causal="top_left", dlse=True))
EDGES = [
    Case(sq=sq, sk=sk, batch=2, heads=4, kv_heads=(4, 2)[n % 2], **dims, **options, **VISIBLE[(n + m) % len(VISIBLE)])
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, options in enumerate(OPTIONS)
    for dims in DIMS
    if sk > 1 or "dropout_p" not in options  # what is left of dS there is rounding (docs/numerics.md, "delta")
]
LARGE_DIMS = (dict(d=256), dict(d=192, dv=128), dict(d=160), dict(d=136, dv=256))
LARGE_OPTIONS = (
    dict(mask="bhqk"),
    dict(mask="b11k"),
    dict(mask="11qk", mask_keep=0.05),
    dict(softcap=8.0),
    dict(softcap=8.0, dropout_p=0.1),
    dict(dropout_p=0.3),
    dict(alibi="bh"),
    dict(scale=-0.1),
)
LARGE_EDGES = [
    Case(
        sq=sq,
        sk=sk,
        batch=2,
        heads=4,
        kv_heads=(4, 2, 1)[(n + m) % 3],
        **LARGE_DIMS[(n + 3 * m) % len(LARGE_DIMS)],
        **options,
        **VISIBLE[(n + m) % len(VISIBLE)],
    )
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, options in enumerate(LARGE_OPTIONS)
    if sk > 1 or "dropout_p" not in options
]
FEW_QUERIES = [
    Case(sq=sq, sk=9 * sq, batch=2, heads=4, kv_heads=2, d=d, mask=mask, **VISIBLE[n])
    for n, (sq, mask) in enumerate(((270, "bhqk"), (257, "b11k"), (320, "11qk")))
    for d in (64, 128)
]
LAUNCHES = [
    Case(sq=512, sk=500, batch=3, heads=4, kv_heads=2, d=d, **options)
    for d in (64, 128)
    for options in (dict(bias="b1qk"), dict(bias="1hqk", mask="b1qk"), dict(softcap=8.0, dropout_p=0.2))
] + [
    Case(sq=512, sk=500, batch=3, heads=4, kv_heads=2, d=256, **options)
    for options in (dict(mask="b1qk", causal="bottom_right"), dict(softcap=8.0, dropout_p=0.2))
]
# 18 rows of up to 15 tiles, of which 2 MiB hold 2 to 8. (Rows of biases that TMA can read.)
CHUNKS = [
    Case(sq=1100, sk=904, batch=2, heads=4, kv_heads=kv_heads, **dims, **options)
    for kv_heads, dims, options in (
        (4, dict(d=256), dict(causal="top_left")),
        (2, dict(d=256), dict(causal="bottom_right", dlse=True)),
        (2, dict(d=256, dv=136), dict()),
        (1, dict(d=192), dict(window=(300, 200))),
        (2, dict(d=192, dv=128), dict(causal="top_left")),
        (4, dict(d=160, dv=112), dict()),
        (2, dict(d=128), dict(bias="1hqk", mask="b11k", causal="top_left")),
        (4, dict(d=64), dict(bias="bhqk")),
        (2, dict(d=64), dict(softcap=8.0, dropout_p=0.2, mask="11q1")),
        (2, dict(d=256), dict(mask="bhqk", causal="top_left")),
        (1, dict(d=192, dv=128), dict(softcap=8.0, dropout_p=0.2)),
    )
]
# Of 5 MiB a chunk of two CTAs has 78 tiles of keys: two or three key chunks.
KEY_CHUNKS = [
    Case(sq=sq, sk=9000, batch=1, heads=2, kv_heads=kv_heads, **dims, **options)
    for sq, kv_heads, dims, options in (
        (700, 2, dict(d=256), dict(dlse=True)),
        (700, 1, dict(d=256), dict(causal="bottom_right")),
        (9000, 1, dict(d=192, dv=128), dict(causal="top_left")),
        (700, 2, dict(d=192, dv=128), dict()),
        (650, 2, dict(d=136, dv=256), dict(mask="b1qk")),
        (700, 1, dict(d=192), dict(softcap=8.0, dropout_p=0.2)),
        (1200, 1, dict(d=128), dict(scale=-0.1, causal="bottom_right")),
        (700, 2, dict(d=64), dict(bias="1hqk", mask="b11k")),
    )
]
PACKED_CHUNKS = [
    PackedCase((300, 0, 65, 700, 64), (300, 40, 129, 500, 0), Case(heads=4, kv_heads=2, **options))
    for options in (
        dict(d=256),
        dict(d=192, dv=128, causal="bottom_right"),
        dict(d=64, softcap=9.0, dropout_p=0.1),
        dict(d=256, softcap=9.0, dropout_p=0.1),
    )
]
# Biases that are broadcast along keys, whose gradient needs no dS.
WHOLE_ROWS = [
    Case(sq=sq, sk=sk, batch=2, heads=4, kv_heads=(4, 2)[n % 2], d=d, bias=bias, **options)
    for n, (sq, sk) in enumerate(((320, 640), (577, 300)))
    for d in (64, 128)
    for bias, options in (
        ("bhq1", dict(dlse=True)),
        ("11q1", dict(causal="bottom_right")),
        ("1hq1", dict(sink=True, dlse=True, window=(100, 30))),
        ("b111", dict(sink=True, causal="top_left", dlse=True)),
        ("1h11", dict(sink=True, softcap=8.0, mask="b11k")),
        ("b1q1", dict(sink=True, dropout_p=0.2, alibi="h", mask="bhqk", mask_keep=0.02)),
        ("1111", dict(mask="11q1", dlse=True)),
    )
]
PACKED_WHOLE_ROWS = [
    PackedCase((300, 0, 65, 700, 64), (300, 40, 129, 500, 0), Case(d=d, heads=4, kv_heads=2, bias=bias, **options))
    for d in (64, 128)
    for bias, options in (
        ("bhq1", dict(dlse=True)),
        ("11q1", dict(causal="bottom_right")),
        ("b111", dict(sink=True, dlse=True)),
    )
]
# Generic kernels read them directly from memory. Keys that are no multiple of what a thread loads, and broadcasts.
FLOAT32_BIASES = [
    Case(sq=sq, sk=sk, batch=2, heads=4, kv_heads=(4, 2)[n % 2], d=d, bias=bias, bias_float32=True, **options)
    for n, (sq, sk) in enumerate(((320, 640), (577, 301)))
    for d in (64, 128)
    for bias, options in (
        ("1hqk", dict()),
        ("bhqk", dict(causal="bottom_right", dlse=True)),
        ("11qk", dict(mask="b11k", window=(100, 30))),
        ("1h1k", dict(dropout_p=0.2)),
        ("b1q1", dict(sink=True, softcap=8.0)),
    )
]
REPEATED = [
    Case(sq=1100, sk=1500, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, **options)
    for d, kv_heads in ((64, 8), (128, 2))
    for options in (
        dict(bias="11qk", mask="bhqk", mask_keep=0.01, causal="bottom_right"),
        dict(bias="1hqk", mask="b1qk"),
        dict(softcap=8.0, dropout_p=0.2, window=(300, 100)),
        dict(bias="b1qk", dropout_p=0.2),
        dict(bias="b1q1", sink=True),
    )
] + [
    Case(sq=1100, sk=1500, batch=3, heads=8, kv_heads=4, d=256, dlse=True, **options)
    for options in (dict(mask="bhqk", causal="bottom_right"), dict(softcap=8.0, dropout_p=0.2, window=(300, 100)))
]
PACKED = [
    PackedCase(lengths_q, lengths_k, Case(d=d, heads=4, kv_heads=2, **options))
    for d in (64, 128)
    for lengths_q, lengths_k in (((300, 0, 65, 700, 64), (300, 40, 129, 500, 0)),)
    for options in (dict(softcap=9.0, dropout_p=0.1), dict(scale=-0.2, causal="bottom_right"))
]


@over_16_bits
@over_cases(EDGES + LARGE_EDGES + FEW_QUERIES)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


def without_slopes(inputs: Inputs) -> Inputs:
    """The gradient of slopes takes portable kernels."""
    return inputs.replace(differentiable=("q", "k", "v", "bias", "sink"))


@over_16_bits
@over_cases(WHOLE_ROWS)
def test_biases_of_whole_rows(case, dtype, gpu):
    check_drawn(lambda seed: without_slopes(make_inputs(case, dtype, "cuda", seed)), gpu)


@over_16_bits
@over_cases(FLOAT32_BIASES)
def test_float32_biases_without_a_gradient(case, dtype, gpu):
    def draw(seed: int) -> Inputs:
        return without_dbias(make_inputs(case, dtype, "cuda", seed))

    check_drawn(draw, gpu)


@over_16_bits
@pytest.mark.parametrize("low", [-1e4, torch.finfo(torch.float32).min, -math.inf])
def test_low_float32_biases(low, dtype, gpu):
    """As padding masks have them: some keys, all keys of some rows."""

    def draw(seed: int) -> Inputs:
        inputs = make_inputs(Case(sq=320, sk=640, heads=2, d=64, bias="1hqk", bias_float32=True), dtype, "cuda", seed)
        inputs.bias[..., 500:] = low
        inputs.bias[:, :, 7] = low
        return inputs.replace(differentiable=("q", "k", "v"))

    check_drawn(draw, gpu)


@over_16_bits
@over_cases(PACKED_WHOLE_ROWS)
def test_biases_of_whole_packed_rows(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_16_bits
@pytest.mark.parametrize("options", [dict(bias="1hqk"), dict(dropout_p=0.2)], ids=str)
@pytest.mark.parametrize(("d", "kv_heads"), [(64, 4), (128, 2), (128, 1)])
def test_tiles_that_a_mask_hides(d, kv_heads, options, dtype, gpu):
    case = Case(sq=450, sk=700, batch=2, heads=4, kv_heads=kv_heads, d=d, mask="bhqk", **options)
    check_hidden_tiles(case, dtype, gpu)


@over_16_bits
@pytest.mark.parametrize(("dims", "kv_heads"), [(dict(d=256), 2), (dict(d=192, dv=128), 1), (dict(d=144), 4)], ids=str)
def test_tiles_that_only_a_mask_hides(dims, kv_heads, dtype, gpu):
    check_hidden_tiles(Case(sq=450, sk=700, batch=2, heads=4, kv_heads=kv_heads, mask="bhqk", **dims), dtype, gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(LAUNCHES)
def test_several_launches(case, dtype, gpu, monkeypatch):
    """With few heads' scores at a time; gradients but dBias, whose sums are cut, are the same to the bit."""
    inputs = make_inputs(case, dtype, "cuda")
    whole = run_ours(inputs, gpu)
    for mebibytes in ("2", "5"):
        monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
        check_case(case, dtype, gpu)
        cut = run_ours(inputs, gpu)
        for name in ("dq", "dk", "dv"):
            assert torch.equal(whole[name], cut[name]), name


@pytest.fixture
def in_query_chunks(monkeypatch):
    """Called, it leaves room for few queries of a key head; a GPU of few SMs has enough to do with them."""

    def begin() -> None:
        monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "2")
        monkeypatch.setenv(SM_COUNT_SWITCH, "12")

    return begin


@over_16_bits
@over_cases(CHUNKS)
def test_query_chunks(case, dtype, gpu, in_query_chunks):
    """With some of a key head's queries at a time; gradients but dBias, as above, are the same to the bit."""
    inputs = make_inputs(case, dtype, "cuda")
    # A bias without a gradient has another kernel.
    kinds = [inputs, *(inputs.replace(differentiable=(*names, "bias")) for names in (("q", "k"), ("q", "v")))]
    whole = [run_ours(kind, gpu) for kind in kinds]
    in_query_chunks()
    check_case(case, dtype, gpu)
    for kind, expected in zip(kinds, whole, strict=True):
        cut = run_ours(kind, gpu)
        for name in {"dq", "dk", "dv"} & set(expected):
            assert torch.equal(expected[name], cut[name]), name


@over_dtypes((torch.bfloat16,))
@over_cases(KEY_CHUNKS)
def test_key_chunks(case, dtype, gpu, monkeypatch):
    """With some of a key head's queries and keys at a time; gradients are the same to the bit."""
    inputs = make_inputs(case, dtype, "cuda").replace(differentiable=("q", "k", "v"))
    whole = run_ours(inputs, gpu)
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "5")
    monkeypatch.setenv(SM_COUNT_SWITCH, "2")
    tensors = dict(bias=inputs.bias, mask=inputs.mask, dropout_p=case.dropout_p, **case.options())
    assert flash_attn_ext.explain(inputs.q, inputs.k, inputs.v, backend=gpu.name, **tensors).backward.key_chunks
    cut = run_ours(inputs, gpu)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(whole[name], cut[name]), name
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(PACKED_CHUNKS)
def test_packed_query_chunks(case, dtype, gpu, in_query_chunks):
    inputs = make_packed(case, dtype, "cuda")
    whole = run_packed(case, inputs, gpu)
    in_query_chunks()
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)
    cut = run_packed(case, inputs, gpu)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(whole[name], cut[name]), name


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_nan_in_what_no_query_attends(d, poison, dtype, gpu):
    """Keys that the mask hides, some of them in a tile with others that it does not."""
    inputs = make_inputs(Case(sq=500, sk=700, d=d, heads=2, bias="1hqk", mask="11qk"), dtype, "cuda")
    inputs.mask[..., 550:] = False
    result = check_hidden_keys(inputs, 550, poison, gpu)
    assert bool((result["dbias"][..., 550:] == 0).all())


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(
    ("options", "first"), [(dict(mask="11qk"), 550), (dict(softcap=9.0, causal="top_left"), 500)], ids=str
)
def test_nan_at_larger_head_dims(options, first, poison, dtype, gpu):
    """Keys that the mask or causality hides, some of them in a tile with others that it does not."""
    inputs = make_inputs(Case(sq=500, sk=700, d=256, heads=2, **options), dtype, "cuda")
    if inputs.mask is not None:
        inputs.mask[..., first:] = False
    check_hidden_keys(inputs, first, poison, gpu)
