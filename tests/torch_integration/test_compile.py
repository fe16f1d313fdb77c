"""torch.compile(fullgraph=True) and torch.export see one operator, with the same results as eager."""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import flash_attn_ext
from support.cases import Case, make_inputs
from support.packed import cu_seqlens
from support.params import over_cases
from support.runners import call_ours

CASES = [
    Case(sq=40, sk=50, d=16),
    Case(sq=40, sk=50, d=16, causal="bottom_right", window=(30, 3), heads=4, kv_heads=2, layout="bshd", dlse=True),
    Case(sq=40, sk=50, d=16, dv=8, bias="1hqk", mask="b11k", alibi="bh", sink=True, softcap=5.0, dlse=True),
    Case(sq=40, sk=50, d=16, intervals="b1", num_intervals=2, causal="top_left"),
    Case(sq=140, sk=150, d=16, blocks="1k", heads=4, kv_heads=2),
]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def aot_eager(graph):
    return torch.compile(graph, backend="aot_eager")


def model_of(case: Case, inputs, backend):
    """Attention between other operators, so that there is a graph to capture."""

    def function(q, k, v, bias, alibi_slopes, sink):
        if case.layout == "bshd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = flash_attn_ext.attention(
            q * 2,
            k,
            v.sin(),
            **case.options(),
            bias=bias,
            mask=inputs.mask,
            intervals=inputs.intervals,
            block_lists=inputs.block_lists,
            alibi_slopes=alibi_slopes,
            sink=sink,
            layout=case.layout,
            return_lse=True,
            backend=backend.name,
        )
        return out.cos(), lse * 3

    return function


def run(function, inputs):
    leaves = inputs.leaves()
    names = ("q", "k", "v", "bias", "alibi_slopes", "sink")
    outputs = function(*(leaves.get(name) for name in names))
    loss = sum(output.square().sum() for output in outputs)
    return [*outputs, *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.parametrize("dynamic", [False, True])
@over_cases(CASES)
def test_full_graph(case, dynamic, backend):
    """aot_eager traces forward and backward through the fake kernels and runs the graph without generating code."""
    inputs = make_inputs(case, torch.float32, backend.device)
    function = model_of(case, inputs, backend)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for ours, expected in zip(run(compiled, inputs), run(function, inputs), strict=True):
        torch.testing.assert_close(ours, expected)


def test_inductor(backend):
    case = CASES[1]
    inputs = make_inputs(case, torch.float32, backend.device)
    function = model_of(case, inputs, backend)
    compiled = torch.compile(function, fullgraph=True)
    for ours, expected in zip(run(compiled, inputs), run(function, inputs), strict=True):
        torch.testing.assert_close(ours, expected)


def test_dynamic_shapes_compile_once(backend):
    """Other lengths and batch sizes run in the same graph."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k, v):
        return flash_attn_ext.attention(q, k, v, causal="bottom_right", backend=backend.name) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    # Sizes that begin different: the compiler takes equal ones for one symbol.
    for batch, sq, sk in ((3, 40, 50), (4, 33, 64), (5, 65, 129)):
        inputs = make_inputs(Case(batch=batch, sq=sq, sk=sk, d=16), torch.float32, backend.device)
        tensors = (inputs.q, inputs.k, inputs.v)
        torch.testing.assert_close(compiled(*tensors), function(*tensors))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


def test_sdpa_entry(backend):
    inputs = make_inputs(Case(sq=40, sk=50, d=16, bias="b1qk"), torch.float32, backend.device)

    def function(q, k, v, mask):
        return flash_attn_ext.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2).relu()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    tensors = (inputs.q, inputs.k, inputs.v, inputs.bias)
    torch.testing.assert_close(compiled(*tensors), function(*tensors))


def test_varlen(backend):
    lengths = (30, 0, 45)
    cu = cu_seqlens(lengths, backend.device)
    tensors = [torch.randn(75, 2, 16, device=backend.device, requires_grad=True) for _ in range(3)]

    def function(q, k, v, cu):
        return flash_attn_ext.attention_varlen(
            q * 2, k, v, cu, cu, max_seqlen_q=45, max_seqlen_k=45, causal="bottom_right", backend=backend.name
        ).sin()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for attention in (compiled, function):
        out = attention(*tensors, cu)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_dropout(backend):
    """New bits on each call, the same ones under the same seed, and the backward agrees with the forward."""
    inputs = make_inputs(Case(sq=140, sk=270, d=16), torch.float64, backend.device)
    q, k, v = (t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v))

    def function(q, k, v):
        return flash_attn_ext.attention(q, k, v, dropout_p=0.5, backend=backend.name)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(compiled(q, k, v))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[2], compiled(q, k, v))
    (dv,) = torch.autograd.grad(outs[2], [v], inputs.dout)
    torch.testing.assert_close((dv * v).sum(), (outs[2] * inputs.dout).sum())


class Block(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return flash_attn_ext.attention(q, k, v, mask=mask, causal="bottom_right", softcap=5.0) * 2


def test_export(backend):
    """The exported program holds the operator and runs on other lengths."""
    length = torch.export.Dim("length", min=2, max=512)

    def arguments(n: int):
        q, k, v = (torch.randn(2, 2, n, 16, device=backend.device) for _ in range(3))
        return q, k, v, torch.rand(2, 1, 1, n, device=backend.device) < 0.8

    shapes = {"q": {2: length}, "k": {2: length}, "v": {2: length}, "mask": {3: length}}
    program = torch.export.export(Block(), arguments(40), dynamic_shapes=shapes)
    assert "flash_attn_ext.attention_forward" in str(program.graph)
    for n in (40, 129):
        tensors = arguments(n)
        torch.testing.assert_close(program.module()(*tensors), Block()(*tensors))


def test_dropout_in_a_trace(backend):
    """Each call of what torch.jit.trace recorded draws, as an eager call does."""
    tensors = [torch.randn(1, 2, 5, 4, device=backend.device) for _ in range(3)]

    def function(q, k, v):
        return flash_attn_ext.attention(q, k, v, scale=0.25, dropout_p=0.3, backend=backend.name)

    traced = torch.jit.trace(function, tuple(tensors), check_trace=False)
    results = []
    for attempt in (function, traced):
        torch.manual_seed(1)
        results += [attempt(*tensors), attempt(*tensors)]
    eager, eager_again, found, found_again = results
    assert torch.equal(found, eager) and torch.equal(found_again, eager_again) and not torch.equal(found, found_again)


@pytest.mark.parametrize("bias", [None, "1hqk"])
def test_compiled_autograd(bias, backend):
    """The compiled backward of a graph that eager calls left, made again where an option differs."""
    for window in (None, (0, None), (2, 0)):
        case = Case(sq=40, sk=50, d=16, window=window, bias=bias, dlse=True)
        inputs = make_inputs(case, torch.float32, backend.device)
        results = []
        for compiled in (False, True):
            leaves = inputs.leaves()
            out, lse = call_ours(inputs, leaves, backend)
            loss = (out * inputs.dout).sum() + (lse * inputs.dlse).sum()
            with compiled_autograd._enable(aot_eager) if compiled else nullcontext():
                loss.backward()
            results.append([leaf.grad for leaf in leaves.values()])
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager)
