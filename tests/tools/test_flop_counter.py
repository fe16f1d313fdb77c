"""FlopCounterMode counts the products of the pairs that are visible, wherever the operators are called from."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_attn_ext
from flash_attn_ext import _C
from flash_attn_ext._call.problem import Problem
from flash_attn_ext._flops import forward_flops
from support.caches import CacheCase, call_with_cache, make_cache_inputs
from support.cases import Case, make_inputs
from support.forks import run_forked
from support.masks import attended
from support.packed import PackedCase, cu_seqlens, make_packed, sequences
from support.params import over_cases
from support.runners import call_ours

OPERATORS = torch.ops.flash_attn_ext
HEADS, D, DV = 4, 16, 8
SHAPE = dict(d=D, dv=DV, heads=HEADS, kv_heads=2)
CASES = [
    Case(sq=sq, sk=sk, causal=causal, window=window, **SHAPE)
    for sq, sk in ((40, 40), (7, 50), (50, 7), (1, 40))
    for causal in (None, "top_left", "bottom_right")
    for window in (None, (3, 5), (0, None), (None, 0), (100, 2))
]


def pairs(num_queries: int, num_keys: int, causal=None, window=None) -> int:
    """By the intervals that the kernels have."""
    left, right = window or (None, None)
    intervals = _C.visible_keys(num_queries, num_keys, causal=causal, window_left=left, window_right=right)
    return int((intervals[:, 1] - intervals[:, 0]).clamp(min=0).sum())


def pairs_of(case: Case) -> int:
    return case.batch * pairs(case.sq, case.sk, case.causal, case.window)


def counted(function) -> dict:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_flop_counts()["Global"]


def both_passes(num_pairs: int) -> dict:
    unit = 2 * HEADS * num_pairs
    return {OPERATORS.attention_forward: unit * (D + DV), OPERATORS.attention_backward: unit * (3 * D + 2 * DV)}


@over_cases(CASES)
def test_pairs_of_causality_and_window(case, device):
    inputs = make_inputs(case, torch.float32, device)
    leaves = inputs.leaves()
    assert counted(lambda: call_ours(inputs, leaves)[0].backward(inputs.dout)) == both_passes(pairs_of(case))


def test_masks_and_dropout_change_nothing(device):
    case = Case(sq=40, sk=50, bias="bhqk", mask="bhqk", dropout_p=0.5, alibi="h", sink=True, softcap=9.0, **SHAPE)
    inputs = make_inputs(case, torch.float32, device)
    leaves = inputs.leaves()
    assert counted(lambda: call_ours(inputs, leaves)[0].backward(inputs.dout)) == both_passes(pairs_of(case))


@over_cases(
    [
        Case(sq=40, sk=50, intervals=pattern, num_intervals=count, causal=causal, window=window, **SHAPE)
        for pattern, count in (("11", 1), ("b1", 3), ("bh", 4))
        for causal, window in ((None, None), ("bottom_right", (9, None)), (None, (7, 3)))
    ]
)
def test_pairs_of_intervals(case, device):
    """Of those that overlap, each pair once."""
    inputs = make_inputs(case, torch.float32, device)
    leaves = inputs.leaves()
    seen = int(attended(case, inputs.whole_mask, device).sum())
    counts = counted(lambda: call_ours(inputs, leaves)[0].backward(inputs.dout))
    assert counts[OPERATORS.attention_forward] == 2 * seen * (D + DV)
    assert counts[OPERATORS.attention_backward] == 2 * seen * (3 * D + 2 * DV)


@over_cases(
    [
        Case(sq=300, sk=400, blocks=pattern, block_sizes=sizes, **options, **SHAPE)
        for pattern, sizes in (("11", (64, 64)), ("bh", (128, 64)), ("1h", (64, 128)))
        for options in (
            dict(),
            dict(causal="bottom_right", window=(90, None)),
            dict(intervals="b1", num_intervals=3, causal="top_left"),
        )
    ]
)
def test_pairs_of_blocks(case, device):
    inputs = make_inputs(case, torch.float32, device)
    leaves = inputs.leaves()
    seen = int(attended(case, inputs.whole_mask, device).sum())
    counts = counted(lambda: call_ours(inputs, leaves)[0].backward(inputs.dout))
    assert counts[OPERATORS.attention_forward] == 2 * seen * (D + DV)
    assert counts[OPERATORS.attention_backward] == 2 * seen * (3 * D + 2 * DV)


def test_pairs_of_intervals_of_packed_sequences(device):
    case = PackedCase((20, 0, 30), (25, 3, 7), Case(intervals="1h", num_intervals=2, causal="top_left", **SHAPE))
    inputs = make_packed(case, torch.float32, device)
    seen = sum(int(attended(alone.case, alone.whole_mask, device).sum()) for alone, _, _ in sequences(case, inputs))
    lengths = [cu_seqlens(lengths, device) for lengths in (case.lengths_q, case.lengths_k)]

    def run():
        tensors = (inputs.q, inputs.k, inputs.v)
        flash_attn_ext.attention_varlen(*tensors, *lengths, causal="top_left", intervals=inputs.intervals)

    assert counted(run)[OPERATORS.attention_forward] == 2 * seen * (D + DV)


@pytest.mark.parametrize(
    ("wanted", "columns"),
    [("q", 2 * D + DV), ("k", 2 * D + DV), ("v", D + DV), ("qk", 3 * D + DV), ("kv", 2 * D + 2 * DV)],
)
def test_only_products_of_gradients_that_are_asked_for(wanted, columns, device):
    case = Case(sq=40, sk=50, **SHAPE)
    inputs = make_inputs(case, torch.float32, device).replace(differentiable=tuple(wanted))
    tensors = {name: getattr(inputs, name) for name in "qkv"} | inputs.leaves()
    counts = counted(lambda: flash_attn_ext.attention(**tensors).backward(inputs.dout))
    assert counts[OPERATORS.attention_backward] == 2 * HEADS * pairs_of(case) * columns


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        ("qkv", 3 * D + 2 * DV),
        ("q", 2 * D + DV),
        ("v", D + DV),
        (("bias",), D + DV),
    ],
    ids=str,
)
def test_products_of_forward_mode(names, columns, device):
    case = Case(sq=40, sk=50, bias="11qk", **SHAPE)
    inputs = make_inputs(case, torch.float32, device)

    def run():
        with forward_ad.dual_level():
            tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "bias")}
            duals = {name: forward_ad.make_dual(tensors[name], tensors[name]) for name in names}
            flash_attn_ext.attention(**tensors | duals)

    assert counted(run)[OPERATORS.attention_tangents] == 2 * HEADS * pairs_of(case) * columns


@pytest.mark.parametrize(("wanted", "columns"), [("qkv", 7 * D + 5 * DV), ("q", 3 * D + 2 * DV), ("v", D + DV)])
def test_products_of_second_derivatives(wanted, columns, device):
    """Those of the tangents of out are among them, which the gradient of dO is."""
    case = Case(sq=40, sk=50, causal="top_left", **SHAPE)
    inputs = make_inputs(case, torch.float32, device).replace(differentiable=tuple(wanted))
    tensors, leaves = {name: getattr(inputs, name) for name in "qkv"}, inputs.leaves()
    dout = inputs.dout.detach().requires_grad_()
    out = flash_attn_ext.attention(**(tensors | leaves), causal="top_left")
    gradients = torch.autograd.grad(out, list(leaves.values()), dout, create_graph=True)
    along = list(map(torch.ones_like, gradients))
    counts = counted(lambda: torch.autograd.grad(gradients, [*leaves.values(), dout], along))
    assert counts == {OPERATORS.attention_backward_tangents: 2 * HEADS * pairs_of(case) * columns}


@pytest.mark.parametrize(("wanted", "columns"), [("alibi_slopes", D + DV), ("bias", D + DV), ("sink", D)])
def test_gradients_of_what_changes_a_score_need_dscores(wanted, columns, device):
    """Q K^T again, and dO V^T where dS is needed; a sink's gradient is a sum of what is there."""
    case = Case(sq=40, sk=50, alibi="h", bias="bhqk", sink=True, **SHAPE)
    inputs = make_inputs(case, torch.float32, device).replace(differentiable=(wanted,))
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "alibi_slopes", "bias", "sink")}
    counts = counted(lambda: call_ours(inputs, tensors | inputs.leaves())[0].backward(inputs.dout))
    assert counts[OPERATORS.attention_backward] == 2 * HEADS * pairs_of(case) * columns


def packed_tensors(lengths_q, lengths_k, device) -> tuple:
    q = torch.randn(sum(lengths_q), HEADS, D, device=device, requires_grad=True)
    k, v = (torch.randn(sum(lengths_k), 2, d, device=device, requires_grad=True) for d in (D, DV))
    return q, k, v, cu_seqlens(lengths_q, device), cu_seqlens(lengths_k, device)


@pytest.mark.parametrize("window", [None, (4, 1)])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_packed_sequences_by_their_lengths(causal, window, device):
    lengths_q, lengths_k = (3, 0, 20, 7), (5, 6, 11, 0)
    tensors = packed_tensors(lengths_q, lengths_k, device)
    expected = sum(pairs(*lengths, causal, window) for lengths in zip(lengths_q, lengths_k, strict=True))
    options = dict(causal=causal, window=window, max_seqlen_q=64, max_seqlen_k=64)
    counts = counted(lambda: flash_attn_ext.attention_varlen(*tensors, **options).sum().backward())
    assert {name: counts[name] for name in both_passes(0)} == both_passes(expected)


def test_unknown_lengths_count_as_their_mean():
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(t.detach()) for t in packed_tensors((3, 0, 20, 8), (5, 6, 11, 1), "cpu")]
        counts = counted(lambda: flash_attn_ext.attention_varlen(*tensors, max_seqlen_q=20, max_seqlen_k=20))
    expected = 4 * pairs(8, 6)
    assert counts[OPERATORS.attention_forward] == both_passes(expected)[OPERATORS.attention_forward]


def test_lengths_that_are_symbols():
    """Counting settles none of them: compilers count too, and their graphs are for all lengths."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)

    def symbolic(tensor: torch.Tensor) -> torch.Tensor:
        sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
        return mode.from_tensor(tensor, symbolic_context=sizes)

    q, k, v = (symbolic(torch.empty(shape)) for shape in ((31, 4, 16), (23, 2, 16), (23, 2, 8)))
    cu = symbolic(torch.zeros(6, dtype=torch.int32))
    problem = Problem(q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal="bottom_right", window_left=3)
    known = len(environment.guards)
    flops = forward_flops(*problem)
    assert len(environment.guards) == known
    assert flops.node.hint == 2 * HEADS * 5 * pairs(7, 5, "bottom_right", (3, 0)) * (D + DV)


@pytest.mark.parametrize("page_size", [None, 16])
def test_keys_that_a_cache_has_after_the_call(page_size, backend):
    base = Case(sq=3, d=D, dv=DV, heads=HEADS, kv_heads=2, causal="bottom_right", window=(9, 0))
    lengths = (0, 5, 29)
    case = CacheCase(lengths, new=3, capacity=32, page_size=page_size, base=base)
    inputs = make_cache_inputs(case, torch.float32, backend.device)
    counts = counted(lambda: call_with_cache(inputs, backend))
    expected = sum(pairs(3, length + 3, "bottom_right", (9, 0)) for length in lengths)
    assert counts == {OPERATORS.attention_with_kvcache: 2 * HEADS * expected * (D + DV)}


def test_modules_and_recomputation(device):
    """A checkpoint runs the forward pass twice, and modules are told apart."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_ext.attention(q, k, v)

    case = Case(sq=40, sk=50, **SHAPE)
    inputs = make_inputs(case, torch.float32, device)
    module = torch.nn.Sequential()
    module.add_module("block", Attention())
    leaves = inputs.leaves().values()
    with FlopCounterMode(display=False) as counter:
        out = checkpoint(module.block, *leaves, use_reentrant=False)
        out.backward(inputs.dout)
    expected = both_passes(pairs_of(case))
    expected[OPERATORS.attention_forward] *= 2
    assert counter.get_flop_counts()["Attention"] == expected


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_call(device):
    case = Case(sq=40, sk=50, causal="top_left", **SHAPE)
    inputs = make_inputs(case, torch.float32, device)
    # Without fullgraph: in newer PyTorch, what is compiled runs eagerly under a counter.
    compiled = torch.compile(flash_attn_ext.attention, dynamic=True, backend="aot_eager")
    counts = counted(lambda: compiled(inputs.q, inputs.k, inputs.v, causal="top_left"))
    expected = both_passes(pairs_of(case))[OPERATORS.attention_forward]
    assert counts[OPERATORS.attention_forward] == expected


@pytest.mark.parametrize("first", ["torch.utils.flop_counter", "flash_attn_ext"])
def test_the_order_of_imports_does_not_matter(first):
    """And importing this library does not import the counter, whose triton takes longer than all the rest."""
    script = f"""
import sys, importlib, torch
importlib.import_module({first!r})
assert {first!r} != "flash_attn_ext" or "torch.utils.flop_counter" not in sys.modules
finders = len(sys.meta_path)
import flash_attn_ext, torch.utils.flop_counter as counter
assert torch.ops.flash_attn_ext.attention_with_kvcache in counter.flop_registry
assert not any("flash_attn_ext" in type(finder).__module__ for finder in sys.meta_path)
"""
    process = run_forked(script)
    assert process.returncode == 0, process.stderr


def test_numbers_that_vary_count_nothing():
    """The overloads of compilers' graphs, whose last arguments are numbers as tensors."""
    q, k = torch.randn(1, HEADS, 7, D), torch.randn(1, 2, 9, D)
    problem = Problem(q=q, k=k, v=k, scale=0.0)
    varying = (torch.tensor(0.5, dtype=torch.float64), None, None)
    with FlopCounterMode(display=False) as counter:
        results = OPERATORS.attention_forward.varying(*problem, *varying)
        forward = counter.get_total_flops()
        OPERATORS.attention_backward.varying(
            torch.ones_like(q), None, *results[:3], [True] * 3 + [False] * 3, *problem, *varying
        )
    assert forward == 2 * HEADS * 7 * 9 * 2 * D
    assert counter.get_total_flops() == forward + 2 * HEADS * 7 * 9 * 5 * D
