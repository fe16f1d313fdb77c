"""Numbers may come as Python's, NumPy's, or one-element tensors: the same result for each."""

import numpy as np
import pytest
import torch

import flash_attn_ext

INTEGERS = [int, np.int64, np.int32, np.uint8, torch.tensor, lambda n: torch.tensor([n], dtype=torch.int32)]
FLOATS = [float, np.float32, np.float64, torch.tensor, lambda x: torch.tensor([x], dtype=torch.float64)]


def qkv(device: str, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device) for _ in range(3)]


@pytest.mark.parametrize("make", INTEGERS)
def test_window(make, device):
    tensors = qkv(device, 2, 3, 9, 8)
    expected = flash_attn_ext.attention(*tensors, window=(2, 1))
    assert torch.equal(flash_attn_ext.attention(*tensors, window=(make(2), make(1))), expected)
    assert torch.equal(flash_attn_ext.attention(*tensors, window=make(2)), flash_attn_ext.attention(*tensors, window=2))


@pytest.mark.parametrize("make", INTEGERS)
def test_max_seqlen(make, device):
    tensors = qkv(device, 9, 3, 8)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    expected = flash_attn_ext.attention_varlen(*tensors, cu, cu, max_seqlen_q=5, max_seqlen_k=6)
    ours = flash_attn_ext.attention_varlen(*tensors, cu, cu, max_seqlen_q=make(5), max_seqlen_k=make(6))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("make", FLOATS)
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_floats(name, make, device):
    tensors = qkv(device, 2, 3, 9, 8)
    expected = flash_attn_ext.attention(*tensors, **{name: 0.5})
    assert torch.equal(flash_attn_ext.attention(*tensors, **{name: make(0.5)}), expected)


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(1j)], ids=str)
@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_no_numbers(name, value, device):
    with pytest.raises(TypeError, match=f"{name} must be a number, got a tensor of dtype {value.dtype}"):
        flash_attn_ext.attention(*qkv(device, 2, 3, 9, 8), **{name: value})
