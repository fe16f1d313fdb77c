"""Tensors whose values are not in their memory: PyTorch negates lazily, knows zeros without memory, and has subclasses
that only stand for something. Nothing reads such memory."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import flash_attn_ext
from support.cases import Case, make_inputs
from support.params import over_dtypes
from support.runners import run_ours

CASE = Case(sq=13, sk=19, d=8, heads=4, kv_heads=2, causal="bottom_right", bias="11qk", mask="b11k", sink=True)
DENSE = ("q", "k", "v", "dout")


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values. The imaginary part of a conjugate is such a view."""
    view = torch._neg_view(-tensor)
    assert view.is_neg()
    return view


def wrapped(tensor: torch.Tensor) -> TwoTensor:
    return TwoTensor(tensor, tensor)


def qkv(device: str) -> list[torch.Tensor]:
    return [torch.randn(2, 3, n, 8, device=device) for n in (5, 7, 7)]


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("names", [*((name,) for name in DENSE), DENSE], ids=str)
def test_lazily_negated(names, dtype, backend):
    inputs = make_inputs(CASE, dtype, backend.device)
    expected = run_ours(inputs, backend)
    found = run_ours(inputs.replace(**{name: negated(getattr(inputs, name)) for name in names}), backend)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_gradient_of_a_conjugate(backend):
    """It arrives lazily negated."""
    leaves = [tensor.requires_grad_() for tensor in qkv(backend.device)]
    out, lse = flash_attn_ext.attention(*leaves, return_lse=True, backend=backend.name)
    found = []
    for part in (lambda x: torch.complex(torch.zeros_like(x), x).conj().imag, torch.neg):
        loss = part(out).square().sum() + part(lse).sum()
        found.append(torch.autograd.grad(loss, leaves, retain_graph=True))
    for lazily, plainly in zip(*found, strict=True):
        torch.testing.assert_close(lazily, plainly)


def test_zeros_without_memory(backend):
    leaves = [tensor.requires_grad_() for tensor in qkv(backend.device)]
    out = flash_attn_ext.attention(*leaves, backend=backend.name)
    zeros = torch._efficientzerotensor(out.shape, device=out.device)
    assert all(bool((gradient == 0).all()) for gradient in torch.autograd.grad(out, leaves, zeros))
    q, k, _ = (leaf.detach() for leaf in leaves)
    none = torch._efficientzerotensor(k.shape, device=k.device)
    assert bool((flash_attn_ext.attention(q, k, none, backend=backend.name) == 0).all())


TABLES = dict(bias=(5, 7), mask=(5, 7), alibi_slopes=(3,), sink=(3,))


def refused(call, tensors: list[torch.Tensor], says: tuple[str, ...], **options) -> None:
    with pytest.raises(RuntimeError) as error:
        call(*tensors, **options)
    assert all(part in str(error.value) for part in says), str(error.value)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sink"])
def test_other_tensors_are_refused_where_they_are_negated(name, device):
    table = negated(torch.ones(TABLES[name], device=device))
    says = (name, "computes lazily", f"{name}.clone()")
    refused(flash_attn_ext.attention, qkv(device), says, **{name: table})
    refused(flash_attn_ext.attention_with_kvcache, qkv(device), says, cache_seqlens=7, **{name: table})


@pytest.mark.parametrize("name", TABLES)
def test_other_tensors_are_refused_where_only_they_are_of_a_subclass(name, device):
    plain = torch.ones(TABLES[name], device=device)
    table = wrapped(plain > 0 if name == "mask" else plain)
    says = (name, "subclass", "pass", "plain tensor")
    refused(flash_attn_ext.attention, qkv(device), says, **{name: table})
    refused(flash_attn_ext.attention_with_kvcache, qkv(device), says, cache_seqlens=7, **{name: table})

    def transformed(q, k, v):
        return torch.func.vjp(lambda q: flash_attn_ext.attention(q, k, v, **{name: table}), q)

    refused(transformed, qkv(device), says)


def test_lengths_are_refused_where_only_they_are_of_a_subclass(device):
    q, k, v = qkv(device)
    lengths = torch.full((2,), 7, dtype=torch.int32, device=device)
    says = ("cache_seqlens", "subclass", "plain tensor")
    refused(flash_attn_ext.attention_with_kvcache, [q, k, v], says, cache_seqlens=wrapped(lengths))
    ends = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    tokens = torch.randn(5, 2, 8, device=device)
    says = ("cu_seqlens_k", "subclass", "plain tensor")
    refused(flash_attn_ext.attention_varlen, [tokens] * 3, says, cu_seqlens_q=ends, cu_seqlens_k=wrapped(ends))
