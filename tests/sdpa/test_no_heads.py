"""enable_gqa where query, or key and value, have no heads."""

import pytest
import torch

from flash_attn_ext import scaled_dot_product_attention
from support.yardstick import unfused_sdpa


def tensors(backend, *heads: int) -> list[torch.Tensor]:
    return [torch.randn(2, n, 5, 8, device=backend.device) for n in heads]


@pytest.mark.parametrize(("heads", "key_heads", "value_heads"), [(4, 0, 0), (4, 2, 0), (4, 0, 2)])
def test_query_heads_cannot_share_no_heads(heads, key_heads, value_heads, backend):
    """PyTorch 2.11 divides by zero here, and the process ends."""
    with pytest.raises(RuntimeError, match="heads of key and value must divide those of query"):
        scaled_dot_product_attention(*tensors(backend, heads, key_heads, value_heads), enable_gqa=True)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(0, 0), (2, 2), (2, 0), (0, 2)])
def test_no_query_heads(key_heads, value_heads, backend):
    """They share any number of heads. PyTorch's attention takes them where there are key and value heads."""
    q, k, v = tensors(backend, 0, key_heads, value_heads)
    assert scaled_dot_product_attention(q, k, v, enable_gqa=True).shape == q.shape
    if key_heads == value_heads == 2:
        assert unfused_sdpa(q, k, v, enable_gqa=True).shape == q.shape
