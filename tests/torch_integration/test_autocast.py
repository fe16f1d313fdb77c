"""Autocast: inputs are cast to the autocast dtype, as PyTorch's attention does; gradients come back in their own."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.errors import assert_rule, compare
from support.params import computes_in
from support.runners import run_reference
from support.yardstick import fused_sdpa

LOW = [torch.bfloat16, torch.float16]
CASE = Case(sq=65, sk=97, d=16)


def inputs_of(backend, dtype=torch.float32, case=CASE):
    return make_inputs(case, dtype, backend.device)


@computes_in(torch.bfloat16)
@pytest.mark.parametrize("low", LOW, ids=str)
def test_equals_casting_by_hand(low, backend):
    inputs = inputs_of(backend)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    with torch.autocast(backend.device, dtype=low):
        out = flash_attn_ext.attention(*leaves, backend=backend.name)
    expected = flash_attn_ext.attention(*(leaf.to(low) for leaf in leaves), backend=backend.name)
    assert out.dtype == low and torch.equal(out, expected)
    ours = torch.autograd.grad(out, leaves, torch.ones_like(out))
    theirs = torch.autograd.grad(expected, leaves, torch.ones_like(out))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_mixed_dtypes_meet(low, backend):
    """A model whose V comes out of an autocast region and whose Q does not."""
    inputs = inputs_of(backend)
    mixed = (inputs.q, inputs.k.to(low), inputs.v.half())
    with torch.autocast(backend.device, dtype=low):
        ours = flash_attn_ext.scaled_dot_product_attention(*mixed)
        theirs = fused_sdpa(*mixed)
    assert ours.dtype == theirs.dtype == low
    exact = run_reference(inputs.to(torch.float64))["out"]
    assert_rule({"out": compare(ours, theirs, exact)})


@pytest.mark.parametrize("entry", ["attention", "sdpa"])
def test_float_mask_in_float32(entry, backend):
    """A float32 mask beside autocast inputs, as Hugging Face models build it."""
    inputs = inputs_of(backend, case=Case(sq=65, sk=97, d=16, bias="b1qk"))
    bias = inputs.bias.requires_grad_()
    tensors = (inputs.q, inputs.k, inputs.v)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        if entry == "sdpa":
            out = flash_attn_ext.scaled_dot_product_attention(*tensors, attn_mask=bias)
        else:
            out = flash_attn_ext.attention(*tensors, bias=bias, backend=backend.name)
        theirs = fused_sdpa(*tensors, attn_mask=bias)
    assert out.dtype == torch.bfloat16
    exact = run_reference(inputs.to(torch.float64))["out"]
    assert_rule({"out": compare(out, theirs, exact)})
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    assert gradient.dtype == torch.float32


@computes_in(torch.bfloat16)
def test_a_bias_in_float32_stays_so(backend):
    """What ``attention`` takes as it is, PyTorch casts: its bits below those of bfloat16 count."""
    inputs = inputs_of(backend, case=Case(sq=65, sk=97, d=16, bias="b1qk"))
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        out = flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, bias=inputs.bias, backend=backend.name)
    low = [t.bfloat16() for t in (inputs.q, inputs.k, inputs.v)]
    exact, rounded = (
        flash_attn_ext.attention(*low, bias=bias, backend=backend.name)
        for bias in (inputs.bias, inputs.bias.bfloat16())
    )
    assert torch.equal(out, exact) and not torch.equal(out, rounded)


@computes_in(torch.bfloat16)
def test_a_bias_in_16_bits_is_cast(backend):
    inputs = inputs_of(backend, case=Case(sq=65, sk=97, d=16, bias="b1qk"))
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        out = flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, bias=inputs.bias.half(), backend=backend.name)
    low = [t.bfloat16() for t in (inputs.q, inputs.k, inputs.v)]
    expected = flash_attn_ext.attention(*low, bias=inputs.bias.half().bfloat16(), backend=backend.name)
    assert torch.equal(out, expected)


def test_float64_is_left_alone(backend):
    """As PyTorch: float64 is not what autocast casts."""
    inputs = inputs_of(backend, torch.float64)
    tensors = (inputs.q, inputs.k, inputs.v)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        out = flash_attn_ext.attention(*tensors, backend=backend.name)
    assert out.dtype == torch.float64


def test_disabled_inside(backend):
    inputs = inputs_of(backend)
    tensors = (inputs.q, inputs.k, inputs.v)
    with torch.autocast(backend.device, dtype=torch.bfloat16), torch.autocast(backend.device, enabled=False):
        assert flash_attn_ext.attention(*tensors, backend=backend.name).dtype == torch.float32


def test_varlen(backend):
    cu = torch.tensor([0, 30, 65], dtype=torch.int32, device=backend.device)
    q, k, v = (torch.randn(65, 2, 16, device=backend.device) for _ in range(3))
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        out = flash_attn_ext.attention_varlen(q, k, v.half(), cu, cu, backend=backend.name)
    assert out.dtype == torch.bfloat16


def test_backward_outside_the_region(backend):
    inputs = inputs_of(backend)
    leaf = inputs.q.requires_grad_()
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        out = flash_attn_ext.attention(leaf * 2, inputs.k, inputs.v, backend=backend.name).float().square().sum()
    out.backward()
    assert leaf.grad.dtype == torch.float32 and bool(torch.isfinite(leaf.grad).all())
