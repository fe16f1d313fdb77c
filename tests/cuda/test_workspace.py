"""What a backward pass takes from memory, and the switch that bounds it."""

import pytest
import torch

import flash_attn_ext
from support.backends import SM80, SM90
from support.params import computes_in

pytestmark = computes_in(torch.bfloat16)

MIB = 2**20


def peak_of_backward(inputs: list[torch.Tensor], backend: str, **options) -> tuple[int, list[torch.Tensor]]:
    """Bytes that the backward pass holds at its peak beyond what was there before it, and its gradients."""
    out = flash_attn_ext.attention(*inputs, backend=backend, **options)
    dout = torch.ones_like(out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(out, inputs, dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, list(gradients)


def leaves(batch: int, heads: int, length: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, length, head_dim)
    return [torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for _ in range(3)]


def test_the_fused_kernel_needs_only_delta(gpu):
    """48 MiB of gradients and half a MiB of delta; a workspace that nothing used was 64 MiB once."""
    if gpu not in (SM80, SM90):
        pytest.skip("the plan of this backend is its own")
    peak, _ = peak_of_backward(leaves(256, 8, 64, 64), gpu.name)
    assert peak <= 50 * MIB, f"{peak / MIB:.1f} MiB"


def test_materialised_scores_can_be_turned_off(gpu, monkeypatch):
    """FLASH_ATTN_EXT_WORKSPACE_MIB=0: scores are computed again, and gradients are right to rounding."""
    inputs = leaves(2, 8, 1024, 256 if gpu == SM90 else 128)  # up to 128 Hopper's own kernel materialises no scores
    materialised_peak, materialised = peak_of_backward(inputs, gpu.name)
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "0")
    peak, recomputed = peak_of_backward(inputs, gpu.name)
    gradients = sum(t.numel() * t.element_size() for t in inputs)
    assert peak <= gradients + MIB, f"{peak / MIB:.1f} MiB"
    if gpu in (SM80, SM90):
        assert materialised_peak >= gradients + 2 * 8 * 1024 * 1024 * 2
    for one, other in zip(materialised, recomputed, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("value", ["-1", "all", "1.5", "1e3"])
def test_a_wrong_switch_is_named(value, gpu, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", value)
    inputs = leaves(1, 1, 64, 64)
    with pytest.raises(ValueError, match=r"FLASH_ATTN_EXT_WORKSPACE_MIB is .*expected a whole number of MiB"):
        flash_attn_ext.attention(*inputs, backend=gpu.name)
