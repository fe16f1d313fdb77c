"""TorchScript beside a replacement: it compiles and runs PyTorch's attention, whichever name it finds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flash_attn_ext


def new_model() -> nn.Module:
    """Of a new class each time: what TorchScript once failed to compile it does not compile again."""

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Attention()


def test_script_while_installed(installed, device):
    q, k, v = (torch.randn(2, 3, 5, 8, device=device) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(torch.jit.script(new_model())(q, k, v), expected)


def test_script_of_one_class_before_during_and_after():
    model = new_model()
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    expected = torch.jit.script(model)(q, k, v)
    flash_attn_ext.install_sdpa()
    try:
        during = torch.jit.script(model)(q, k, v)
    finally:
        flash_attn_ext.uninstall_sdpa()
    assert torch.equal(during, expected)
    assert torch.equal(torch.jit.script(model)(q, k, v), expected)


@pytest.mark.parametrize("module", [nn.TransformerEncoderLayer, nn.MultiheadAttention])
def test_script_of_pytorchs_own_modules(module, installed):
    model = module(32, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    inputs = (x,) if module is nn.TransformerEncoderLayer else (x, x, x)
    for ours, theirs in zip(torch.jit.script(model)(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
