"""Query chunks of Hopper's key-stationary backward kernel, for sequences whose sums of dQ leave L2.

A call of so many tokens is too large for the reference. Without room for partial dK and dV it has no query chunks, and
every shorter sequence tests the kernel that it takes then. In causal calls all additions have the same order, and so
the gradients have the same bits. In cyclic order they are close.
"""

import math

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.checks import check_hidden_keys
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed, run_packed
from support.params import over_cases, over_dtypes
from support.runners import Result, run_ours

RUNS = 5
GRADIENTS = ("dq", "dk", "dv")
WORKSPACE = "FLASH_ATTN_EXT_WORKSPACE_MIB"
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

# More than a third of L2, of an H100 and of an H200, for the sums of dQ of a head. Lengths end inside a tile.
LONG = {64: 82_011, 96: 54_871, 128: 41_019}


def long(d: int, more_keys: int = 0, **more) -> Case:
    queries = LONG[next(compiled for compiled in LONG if d <= compiled)]
    return Case(**{"sq": queries, "sk": queries + more_keys, "d": d, "batch": 1, "heads": 2, **more})


CAUSAL = [
    long(64, causal="top_left"),
    long(80, causal="top_left", dlse=True),
    long(128, causal="bottom_right", batch=2, heads=1),
    long(128, causal="top_left", heads=3, dv=72),
    # Keys that no query sees, and queries that see no key.
    long(128, 3000, causal="top_left"),
    long(128, -9000, causal="bottom_right"),
    long(128, 20_000, causal="bottom_right"),
    long(128, window=(None, 700)),
    # Each query head of the group is a work tile of its own.
    long(128, causal="top_left", heads=4, kv_heads=1),
    long(64, causal="top_left", heads=6, kv_heads=2),
]
CYCLIC = [
    long(64),
    long(80, -5000),
    long(128, 3000, dlse=True),
    long(128, heads=4, kv_heads=2),
    long(128, heads=1, batch=3, dv=72),
]
PACKED = [
    PackedCase(lengths, lengths, Case(d=128, heads=2, kv_heads=kv_heads, causal=causal))
    for lengths in ((90_001, 40_000, 0, 41_000), (64_000, 60_123))
    for kv_heads, causal in ((2, "bottom_right"), (1, "bottom_right"), (2, None))
]


def query_chunks_of(inputs: Inputs, backend: str) -> int | None:
    case = inputs.case
    return flash_attn_ext.explain(inputs.q, inputs.k, inputs.v, backend=backend, **case.options()).backward.query_chunks


def assert_close(result: Result, expected: Result) -> None:
    """Sums of float32 in another order: a gradient may round to the next number of its dtype."""
    for name in GRADIENTS:
        one, other = result[name].float(), expected[name].float()
        eps = torch.finfo(result[name].dtype).eps
        torch.testing.assert_close(one, other, rtol=2 * eps, atol=eps * other.square().mean().sqrt().item())


@over_16_bits
@over_cases(CAUSAL)
def test_causal(case, dtype, gpu, monkeypatch):
    inputs = make_inputs(case, dtype, "cuda", draw_on="cuda")
    assert query_chunks_of(inputs, gpu.name) is not None
    in_chunks = run_ours(inputs, gpu)
    monkeypatch.setenv(WORKSPACE, "0")
    assert query_chunks_of(inputs, gpu.name) is None
    whole = run_ours(inputs, gpu)
    for name in GRADIENTS:
        assert torch.equal(in_chunks[name], whole[name]), name


@over_16_bits
@over_cases(CYCLIC)
def test_cyclic(case, dtype, gpu, monkeypatch):
    inputs = make_inputs(case, dtype, "cuda", draw_on="cuda")
    assert query_chunks_of(inputs, gpu.name) is not None
    in_chunks = run_ours(inputs, gpu)
    monkeypatch.setenv(WORKSPACE, "0")
    assert_close(in_chunks, run_ours(inputs, gpu))


@over_dtypes((torch.bfloat16,))
@over_cases(PACKED)
def test_packed(case, dtype, gpu, monkeypatch):
    inputs = make_packed(case, dtype, "cuda", draw_on="cuda")
    in_chunks = run_packed(case, inputs, gpu)
    monkeypatch.setenv(WORKSPACE, "0")
    whole = run_packed(case, inputs, gpu)
    if case.base.causal is None:
        assert_close(in_chunks, whole)
        return
    for name in GRADIENTS:
        assert torch.equal(in_chunks[name], whole[name]), name


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("causal", ["top_left", None], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (6, 3)])
def test_some_heads_at_a_time(heads, kv_heads, causal, dtype, gpu, monkeypatch):
    """Room for the partial dK and dV of one or two heads: launches of these have the bits of all heads together."""
    inputs = make_inputs(long(128, heads=heads, kv_heads=kv_heads, causal=causal), dtype, "cuda", draw_on="cuda")
    together = run_ours(inputs, gpu)
    monkeypatch.setenv(WORKSPACE, "90")
    plan = flash_attn_ext.explain(inputs.q, inputs.k, inputs.v, backend=gpu.name, causal=causal).backward
    assert plan.key_heads_per_launch < kv_heads
    apart = run_ours(inputs, gpu)
    for name in GRADIENTS:
        assert torch.equal(together[name], apart[name]), name


@over_dtypes((torch.bfloat16,))
@over_cases([long(128, heads=3, causal="top_left"), long(64, heads=2), long(128, heads=4, kv_heads=1)])
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
def test_nan_in_what_no_query_attends(poison, dtype, gpu):
    """Causal: the keys behind the last query."""
    case = long(128, 900, causal="top_left")
    check_hidden_keys(make_inputs(case, dtype, "cuda", draw_on="cuda"), case.sq, poison, gpu)
