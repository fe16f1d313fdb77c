"""CUDA graphs: a captured call replays on new inputs with the results of an eager call.

Decode steps over a cache: test_decode_graph.py.
"""

import math

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.graphs import captured
from support.packed import cu_seqlens
from support.params import computes_in, over_cases, over_dtypes
from support.runners import Result, call_ours, gradients

pytestmark = computes_in(torch.bfloat16)

CASES = [
    Case(sq=140, sk=270, d=64, causal="bottom_right"),
    Case(sq=140, sk=270, d=64, heads=4, kv_heads=2, layout="bshd", window=(60, 9)),
    Case(sq=290, sk=420, d=64, alibi="h", causal="bottom_right"),
    Case(sq=290, sk=420, d=64, bias="b11k", dlse=True),
    Case(sq=290, sk=421, d=64, bias="1hqk"),
    Case(sq=140, sk=270, d=40, dv=72, bias="1hqk", mask="b11k", alibi="bh", sink=True, softcap=9.0, dlse=True),
]

MASK, BIAS = dict(mask="b11k"), dict(bias="b11k")


def train(inputs: Inputs, leaves: dict[str, torch.Tensor], gpu) -> Result:
    out, lse = call_ours(inputs, leaves, gpu)
    result = {"out": out, "lse": lse}
    return result | gradients(result, inputs, leaves)


def overwrite(inputs: Inputs, leaves: dict[str, torch.Tensor], new: Inputs) -> None:
    """Other numbers where the graph reads."""
    with torch.no_grad():
        for name in Inputs.TENSORS:
            if getattr(inputs, name) is not None:
                leaves.get(name, getattr(inputs, name)).copy_(getattr(new, name))


@over_dtypes()
@over_cases(CASES)
def test_forward(case, dtype, gpu):
    inputs = make_inputs(case, dtype, "cuda")
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    with torch.no_grad():
        graph, (out, lse) = captured(lambda: call_ours(inputs, tensors, gpu))
        for seed in (1, 2):
            new = make_inputs(case, dtype, "cuda", seed)
            overwrite(inputs, {}, new)
            graph.replay()
            expected = call_ours(new, {name: getattr(new, name) for name in Inputs.TENSORS}, gpu)
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@over_dtypes()
@over_cases([Case(sq=140, sk=270, d=d, batch=3, **pads) for d in (64, 128) for pads in (MASK, BIAS)])
def test_other_padding(case, dtype, gpu):
    """Which entries have padding, and which a mask or a bias of another kind, is found by each replay."""
    inputs = make_inputs(case, dtype, "cuda")
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    key = torch.arange(case.sk, device="cuda")
    rows = [key < 200, key >= 99, key % 3 != 0, key < 0]
    with torch.no_grad():
        graph, (out, lse) = captured(lambda: call_ours(inputs, tensors, gpu))
        for first in range(len(rows)):
            kept = torch.stack([rows[(first + b) % len(rows)] for b in range(3)])[:, None, None]
            if inputs.mask is None:
                inputs.bias.zero_().masked_fill_(~kept, -math.inf)
            else:
                inputs.mask.copy_(kept)
            graph.replay()
            expected = call_ours(inputs, tensors, gpu)
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@over_dtypes()
@over_cases(CASES)
def test_forward_and_backward(case, dtype, gpu):
    inputs = make_inputs(case, dtype, "cuda")
    leaves = inputs.leaves()
    graph, results = captured(lambda: train(inputs, leaves, gpu))
    for seed in (1, 2):
        new = make_inputs(case, dtype, "cuda", seed)
        overwrite(inputs, leaves, new)
        graph.replay()
        for name, expected in train(new, new.leaves(), gpu).items():
            assert torch.equal(results[name], expected), name


@over_dtypes((torch.bfloat16, torch.float32))
def test_packed(dtype, gpu):
    """The lengths are data: a replay reads the new ones."""
    total, length = 300, 200
    cu = cu_seqlens((100, 200), "cuda")
    tensors = [torch.randn(total, 2, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(total, 2, 64, device="cuda", dtype=dtype)

    def train_packed(cu):
        options = dict(max_seqlen_q=length, max_seqlen_k=length, causal="top_left", backend=gpu.name)
        out = flash_attn_ext.attention_varlen(*tensors, cu, cu, **options)
        return [out, *torch.autograd.grad(out, tensors, dout)]

    graph, results = captured(lambda: train_packed(cu))
    for lengths in ((100, 200), (180, 120), (150, 150)):
        cu.copy_(cu_seqlens(lengths, "cuda"))
        graph.replay()
        for replayed, expected in zip(results, train_packed(cu_seqlens(lengths, "cuda")), strict=True):
            assert torch.equal(replayed, expected)


def dropping(dtype: torch.dtype, gpu):
    """A capture of forward and backward with dropout: the problem, the graph, out, dv, and a draw of PyTorch's own."""
    inputs = make_inputs(Case(sq=140, sk=270, d=64), dtype, "cuda")
    leaves = inputs.leaves()

    def function():
        out = flash_attn_ext.attention(leaves["q"], leaves["k"], leaves["v"], dropout_p=0.5, backend=gpu.name)
        draw = torch.randint(2**62, (1,), device="cuda")
        return out, draw, *torch.autograd.grad(out, list(leaves.values()), inputs.dout)

    graph, (out, draw, _, _, dv) = captured(function)
    return inputs, graph, out, dv, draw


@over_dtypes()
def test_dropout_draws_new_bits_for_each_replay(dtype, gpu):
    """As any draw from PyTorch's generator in a graph. Both passes of a replay drop the same: <dv, v> = <dout, out>."""
    inputs, graph, out, dv, _ = dropping(dtype, gpu)
    outs = []
    for _ in range(3):
        graph.replay()
        outs.append(out.clone())
        from_v, from_out = dv.double() * inputs.v.double(), out.double() * inputs.dout.double()
        # Other bits would be off by about the norm of the terms, rounding by about eps of it.
        allowed = min(64 * torch.finfo(dtype).eps, 0.125) * float(from_out.norm())
        assert float((from_v.sum() - from_out.sum()).abs()) < allowed
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])


def test_the_seed_decides_the_bits_of_a_replay(gpu):
    inputs, graph, out, _, draw = dropping(torch.bfloat16, gpu)  # the graph reads the inputs' memory: they have to live
    outs, draws = [], []
    for seed in (7, 7, 8):
        torch.cuda.manual_seed(seed)
        graph.replay()
        outs.append(out.clone())
        draws.append(draw.item())
    assert draws[0] == draws[1] != draws[2], "PyTorch's own draws"
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    del inputs


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_copies_of_unaligned_tensors_are_captured(name, gpu):
    """What a kernel cannot read is copied by the graph as well, at each replay."""
    inputs = make_inputs(Case(sq=70, sk=130, d=64), torch.bfloat16, "cuda")
    tensor = getattr(inputs, name)
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
    inputs = inputs.replace(**{name: storage[1:].view(tensor.shape).copy_(tensor)})
    leaves = inputs.leaves()
    graph, results = captured(lambda: train(inputs, leaves, gpu))
    new = make_inputs(inputs.case, torch.bfloat16, "cuda", seed=3)
    overwrite(inputs, leaves, new)
    graph.replay()
    for output, expected in train(new, new.leaves(), gpu).items():
        assert torch.equal(results[output], expected), output
