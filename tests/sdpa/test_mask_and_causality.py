"""attn_mask together with is_causal=True: what PyTorch does on each of its paths. Ours refuses it in its words."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flash_attn_ext
from flash_attn_ext import scaled_dot_product_attention

WORDS = "Explicit attn_mask should not be set when is_causal=True"


def call(device: str, kind: str = "bool"):
    """q, k, v and a mask in which no query loses its first key."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    tensors = [torch.randn(2, 3, 64, 32, generator=generator).to(device, dtype) for _ in range(3)]
    mask = torch.rand(64, 64, generator=generator) < 0.6
    mask[:, 0] = True
    mask = mask.to(device)
    if kind != "bool":
        mask = torch.zeros(64, 64, device=device, dtype=dtype).masked_fill(~mask, -torch.inf)
    return tensors, mask.requires_grad_() if kind == "float with gradient" else mask


def combined(tensors, mask) -> torch.Tensor:
    keep = mask if mask.dtype == torch.bool else mask == 0
    return F.scaled_dot_product_attention(*tensors, attn_mask=keep & torch.ones_like(keep).tril())


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_pytorchs_cpu_kernel_combines_both_or_refuses(kind):
    """2.11 combines them, 2.15 refuses."""
    tensors, mask = call("cpu", kind)
    try:
        out = F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)
    except RuntimeError as error:
        if WORDS not in str(error):
            raise
        return
    torch.testing.assert_close(out, combined(tensors, mask))


@pytest.mark.parametrize("kind", ["bool", "float", "float with gradient"])
def test_pytorchs_unfused_path_refuses_both(kind, device):
    tensors, mask = call(device, kind)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match=WORDS):
        F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)


def test_pytorchs_default_on_the_cpu_depends_on_the_call():
    """Its kernel takes no mask with a gradient, no dropout and no three dimensions; the other path refuses."""
    tensors, mask = call("cpu")
    with pytest.raises(RuntimeError, match=WORDS):
        F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True, dropout_p=0.1)
    with pytest.raises(RuntimeError, match=WORDS):
        F.scaled_dot_product_attention(*(t[0] for t in tensors), attn_mask=mask, is_causal=True)
    tensors, mask = call("cpu", "float with gradient")
    with pytest.raises(RuntimeError, match=WORDS):
        F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("backend", [None, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], ids=str)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="about PyTorch's kernels on a GPU")
def test_pytorchs_gpu_kernels_combine_both_or_refuse(backend):
    tensors, mask = call("cuda")
    context = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
    try:
        with context:
            out = F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)
    except RuntimeError:
        return
    torch.testing.assert_close(out, combined(tensors, mask), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("kind", ["bool", "float", "float with gradient"])
def test_ours_refuses_both_and_names_the_function_that_combines_them(kind, device):
    tensors, mask = call(device, kind)
    option = "mask" if kind == "bool" else "bias"
    with pytest.raises(RuntimeError, match=WORDS) as error:
        scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)
    assert f"flash_attn_ext.attention(..., causal='top_left', {option}=...)" in str(error.value)
    assert "does not allow" not in str(error.value)  # PyTorch's CPU kernel does
    out = flash_attn_ext.attention(*tensors, causal="top_left", **{option: mask})
    tolerance = 5e-3 if device == "cuda" else 1e-5
    torch.testing.assert_close(out, combined(tensors, mask), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_causal_bias_and_is_causal_raise_in_pytorchs_words(variant, device):
    tensors, _ = call(device)
    for attention in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            attention(*tensors, attn_mask=variant(64, 64), is_causal=True)
