"""Hopper's two-pass backward kernels above head dim 256, whose dQ comes from materialised dS. Edges of tiles, slices
and column parts, packed batches, several launches, query chunks, key chunks, repeated runs, and NaN."""

import math

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.checks import SM_COUNT_SWITCH, check_case, check_hidden_keys, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed, run_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

RUNS = 20
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))
over_bfloat16 = over_dtypes((torch.bfloat16,))

DIMS = (
    dict(d=512),
    dict(d=320),
    dict(d=264),
    dict(d=384, dv=128),
    dict(d=64, dv=512),
    dict(d=448, dv=8),
    dict(d=576, dv=512),
    dict(d=520, dv=64),
)
# One key tile and a little more or less; one span of keys and a little more; rows of three warpgroups.
LENGTHS = ((257, 63), (320, 65), (384, 127), (300, 129), (512, 192), (577, 513), (270, 1), (449, 1100))
VISIBLE = (
    dict(),
    dict(causal="bottom_right"),
    dict(window=(100, 30)),
    dict(causal="top_left", dlse=True),
    dict(causal="bottom_right", window=(70, None)),
    dict(dlse=True),
)
EDGES = [
    Case(sq=sq, sk=sk, batch=2, heads=4, kv_heads=(4, 2, 1)[(n + m) % 3], **dims, **VISIBLE[(n + m) % len(VISIBLE)])
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, dims in enumerate(DIMS)
]
LAUNCHES = [
    Case(sq=512, sk=500, batch=3, heads=4, kv_heads=2, **dims, **options)
    for dims, options in (
        (dict(d=512), dict(causal="bottom_right")),
        (dict(d=264, dv=320), dict()),
        (dict(d=576, dv=512), dict(causal="top_left", dlse=True)),
    )
]
# 18 rows of up to 15 tiles, of which 2 MiB hold 2 to 8.
CHUNKS = [
    Case(sq=1100, sk=904, batch=2, heads=4, kv_heads=kv_heads, **dims, **options)
    for kv_heads, dims, options in (
        (4, dict(d=512), dict(causal="top_left")),
        (2, dict(d=320), dict(causal="bottom_right", dlse=True)),
        (2, dict(d=512, dv=136), dict()),
        (1, dict(d=128, dv=384), dict(window=(300, 200))),
        (1, dict(d=576, dv=512), dict(causal="bottom_right")),
    )
]
# Of 5 MiB a chunk of two CTAs has 78 tiles of keys: two or three key chunks.
KEY_CHUNKS = [
    Case(sq=sq, sk=9000, batch=1, heads=2, kv_heads=kv_heads, **dims, **options)
    for sq, kv_heads, dims, options in (
        (700, 2, dict(d=512), dict(dlse=True)),
        (700, 1, dict(d=320), dict(causal="bottom_right")),
        (9000, 1, dict(d=264, dv=128), dict(causal="top_left")),
        (700, 1, dict(d=576, dv=512), dict(causal="bottom_right", dlse=True)),
    )
]
PACKED = [
    PackedCase((300, 0, 65, 700, 64), (300, 40, 129, 500, 0), Case(heads=4, kv_heads=kv_heads, **options))
    for kv_heads, options in (
        (2, dict(d=512)),
        (1, dict(d=512, causal="bottom_right")),
        (4, dict(d=320, dv=264, window=(90, 40))),
        (2, dict(d=72, dv=384, causal="top_left")),
        (1, dict(d=576, dv=512, causal="bottom_right")),
    )
]
REPEATED = [
    Case(sq=1100, sk=1500, batch=3, heads=8, kv_heads=4, dlse=True, **options)
    for options in (
        dict(d=512, causal="bottom_right"),
        dict(d=320, window=(300, 100)),
        dict(d=576, dv=512, causal="top_left"),
    )
]


@over_16_bits
@over_cases(EDGES)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_bfloat16
@over_cases(LAUNCHES)
def test_several_launches(case, dtype, gpu, monkeypatch):
    """With few heads' scores at a time, gradients are the same to the bit."""
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
    """With some of a key head's queries at a time, gradients are the same to the bit."""
    inputs = make_inputs(case, dtype, "cuda")
    kinds = [inputs, *(inputs.replace(differentiable=names) for names in (("q", "k"), ("q", "v")))]
    whole = [run_ours(kind, gpu) for kind in kinds]
    in_query_chunks()
    check_case(case, dtype, gpu)
    for kind, expected in zip(kinds, whole, strict=True):
        cut = run_ours(kind, gpu)
        for name in {"dq", "dk", "dv"} & set(expected):
            assert torch.equal(expected[name], cut[name]), name


@over_bfloat16
@over_cases(KEY_CHUNKS)
def test_key_chunks(case, dtype, gpu, monkeypatch):
    """With some of a key head's queries and keys at a time, gradients are the same to the bit."""
    inputs = make_inputs(case, dtype, "cuda")
    whole = run_ours(inputs, gpu)
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "5")
    monkeypatch.setenv(SM_COUNT_SWITCH, "2")
    plan = flash_attn_ext.explain(inputs.q, inputs.k, inputs.v, backend=gpu.name, **case.options())
    assert plan.backward.key_chunks
    cut = run_ours(inputs, gpu)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(whole[name], cut[name]), name
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_bfloat16
@over_cases(PACKED)
def test_packed_query_chunks(case, dtype, gpu, in_query_chunks):
    inputs = make_packed(case, dtype, "cuda")
    whole = run_packed(case, inputs, gpu)
    in_query_chunks()
    cut = run_packed(case, inputs, gpu)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(whole[name], cut[name]), name


@over_bfloat16
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_bfloat16
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [512, 264, 576])
def test_nan_in_what_no_query_attends(d, poison, dtype, gpu):
    """Keys that causality hides, some of them in a tile with others that it does not."""
    inputs = make_inputs(Case(sq=500, sk=700, d=d, dv=min(d, 512), heads=2, causal="top_left"), dtype, "cuda")
    check_hidden_keys(inputs, 500, poison, gpu)
