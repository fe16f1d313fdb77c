"""Lazily cloned tensors (``torch._lazy_clone``) are read in place: only who writes to one gets memory of its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flash_attn_ext
from support.cases import Case, make_inputs
from support.params import over_dtypes

CASE = Case(sq=33, sk=19, d=16, heads=4, kv_heads=2, bias="11qk", mask="b11k", alibi="bh", sink=True, dlse=True)


def lazily(tensor: Tensor) -> Tensor:
    clone = torch._lazy_clone(tensor.detach())
    assert torch._C._is_cow_tensor(clone)
    return clone.requires_grad_(tensor.requires_grad)


def assert_still_lazy(**tensors: Tensor) -> None:
    assert [name for name, tensor in tensors.items() if not torch._C._is_cow_tensor(tensor)] == []


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_attention(dropout_p, dtype, backend):
    """Forward and backward: what a user gives, and the gradients that arrive."""
    inputs = make_inputs(CASE, dtype, backend.device)
    names = [name for name in ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink") if hasattr(inputs, name)]
    tensors = {name: getattr(inputs, name) for name in names}
    tensors = {name: t.requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    lazy = {name: lazily(t) for name, t in tensors.items()}
    given = dict(dout=lazily(inputs.dout), dlse=lazily(inputs.dlse))
    results = []
    for each in (tensors, lazy):
        torch.manual_seed(1)
        options = dict(dropout_p=dropout_p, return_lse=True, backend=backend.name)
        outputs = flash_attn_ext.attention(**each, **options)
        leaves = [t for t in each.values() if t.requires_grad]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, list(given.values()))])
    assert all(map(torch.equal, *results))
    assert_still_lazy(**lazy, **given)


def test_pytorchs_attention_beside_ours(device):
    for attention in (F.scaled_dot_product_attention, flash_attn_ext.scaled_dot_product_attention):
        lazy = [lazily(torch.randn(2, 3, 17, 16, device=device, requires_grad=True)) for _ in range(3)]
        out = attention(*lazy, is_causal=True)
        dout = lazily(torch.randn_like(out))
        torch.autograd.grad(out, lazy, dout)
        assert_still_lazy(**dict(zip("qkv", lazy, strict=True)), dout=dout)


def test_attention_varlen(backend):
    q, k, v = (lazily(torch.randn(12, 2, 16, device=backend.device, requires_grad=True)) for _ in range(3))
    cu_seqlens = lazily(torch.tensor([0, 5, 12], dtype=torch.int32, device=backend.device))
    out = flash_attn_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen_q=7, backend=backend.name)
    out.sum().backward()
    assert_still_lazy(q=q, k=k, v=v, cu_seqlens=cu_seqlens)


def test_through_the_operator(device):
    """What compiled functions call."""
    q, k, v = (lazily(torch.randn(1, 2, 12, 16, device=device, requires_grad=True)) for _ in range(3))
    out = torch.compile(flash_attn_ext.attention, backend="aot_eager")(q, k, v, causal="top_left")
    out.sum().backward()
    assert_still_lazy(q=q, k=k, v=v)


def test_a_copy_that_is_logged(device, caplog):
    """Saying where a tensor begins does not write to it either."""
    caplog.set_level("DEBUG", logger="flash_attn_ext")
    sink = lazily(torch.randn(4, 2, device=device))
    q, k, v = (torch.randn(1, 4, 12, 16, device=device) for _ in range(3))
    flash_attn_ext.attention(q, k, v, sink=sink[:, 0])
    assert "sink was copied" in caplog.text
    assert_still_lazy(sink=sink)


def cache_of(device: str, **tensors: Tensor) -> dict:
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=device)
    indices = torch.tensor([1, 0], dtype=torch.int32, device=device)
    return dict(cache_seqlens=lengths, cache_batch_idx=indices, **tensors)


@pytest.mark.parametrize("num_new", [0, 2])
def test_a_cache(num_new, backend):
    """One that is only read stays lazy. One that is written gets memory of its own, and what it was cloned from keeps
    its values; k and v may even be clones of one tensor."""
    base = torch.randn(2, 2, 16, 16, device=backend.device)
    before = base.clone()
    q, new = (torch.randn(2, 2, n, 16, device=backend.device) for n in (1, max(num_new, 1)))
    appended = dict(k_new=new, v_new=new) if num_new else {}
    results = []
    for make in (lazily, torch.clone):
        k_cache, v_cache = make(base), make(base)
        given = {name: make(t) for name, t in cache_of(backend.device, **appended).items()}
        out = flash_attn_ext.attention_with_kvcache(make(q), k_cache, v_cache, **given, backend=backend.name)
        results.append([out, k_cache, v_cache])
        if make is lazily:
            assert_still_lazy(**given)
            assert torch._C._is_cow_tensor(k_cache) == torch._C._is_cow_tensor(v_cache) == (num_new == 0)
    assert all(map(torch.equal, *results))
    assert torch.equal(base, before)
