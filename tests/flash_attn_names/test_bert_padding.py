"""flash_attn.bert_padding: unpad_input, pad_input and the indexing below them."""

import pytest
import torch

from flash_attn_ext.integrations import flash_attn
from flash_attn_ext.integrations.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
)
from flash_attn_ext.reference import attention_reference

MASK = [
    [1, 1, 1, 0, 0],  # padded on the right
    [0, 0, 0, 0, 0],  # empty
    [0, 0, 1, 1, 1],  # on the left
    [1, 0, 1, 0, 1],  # with holes
]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8])
def test_unpad(dtype, device):
    x = torch.randn(4, 5, 2, 3, device=device)
    mask = torch.tensor(MASK, device=device).to(dtype)
    tokens, indices, cu_seqlens, max_seqlen, used = unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 12, 13, 14, 15, 17, 19] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 3, 3, 6, 9] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 3 and type(max_seqlen) is int
    assert used.tolist() == [3, 0, 3, 3] and used.dtype == torch.int32
    assert {t.device for t in (tokens, indices, cu_seqlens, used)} == {x.device}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unused_places_are_packed_and_not_counted(dtype):
    x = torch.randn(1, 5, 3)
    mask, unused = torch.tensor([[1, 1, 0, 0, 0]]).to(dtype), torch.tensor([[0, 1, 1, 1, 0]]).to(dtype)
    tokens, indices, cu_seqlens, max_seqlen, used = unpad_input(x, mask, unused)
    assert torch.equal(tokens, x[0, :4])
    assert (indices.tolist(), cu_seqlens.tolist(), max_seqlen, used.tolist()) == ([0, 1, 2, 3], [0, 4], 4, [2])


@pytest.mark.parametrize("inner", [(), (3,), (2, 3)])
def test_round_trip_with_gradient(inner, device):
    x = torch.randn(4, 5, *inner, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.tensor(MASK, dtype=torch.bool, device=device)
    kept = mask.reshape(4, 5, *[1] * len(inner))
    tokens, indices, *_ = unpad_input(x, mask)
    back = pad_input(tokens, indices, 4, 5)
    assert torch.equal(back, x * kept)
    weights = torch.randn_like(back)
    (gradient,) = torch.autograd.grad(back, x, weights)
    assert torch.equal(gradient, weights * kept)


def test_gradcheck():
    indices = torch.tensor([4, 0, 2])
    x, values = (torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    assert torch.autograd.gradcheck(lambda t: index_first_axis(t, indices), x)
    assert torch.autograd.gradcheck(lambda t: index_put_first_axis(t, indices, 5), values)
    repeated = torch.tensor([1, 1, 3])
    assert torch.autograd.gradcheck(lambda t: index_first_axis(t, repeated), x)


def test_padding_may_hold_anything():
    x = torch.randn(4, 5, 3)
    mask = torch.tensor(MASK, dtype=torch.bool)
    x[~mask] = torch.nan
    tokens, indices, *_ = unpad_input(x, mask)
    assert torch.equal(pad_input(tokens, indices, 4, 5), x.masked_fill(~mask[..., None], 0))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_empty(shape):
    x, mask = torch.randn(shape), torch.ones(shape[:2], dtype=torch.bool)
    tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, mask)
    assert tokens.shape == (shape[0] * shape[1], shape[2])
    assert (cu_seqlens.tolist(), max_seqlen) == ([shape[1] * i for i in range(shape[0] + 1)], shape[1] * bool(shape[0]))
    assert pad_input(tokens, indices, *shape[:2]).shape == shape


def test_a_padded_batch(device):
    """As models use it: out of a padded batch, through attention, and back."""
    qkv = torch.randn(4, 5, 3, 2, 8, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.tensor(MASK[:3], dtype=torch.bool, device=device)
    mask = torch.cat([mask, ~mask[:1]])
    tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(qkv, mask)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(tokens, cu_seqlens, max_seqlen, causal=True)
    out = pad_input(out, indices, 4, 5)
    (gradient,) = torch.autograd.grad(out.square().sum(), qkv)
    q, k, v = qkv.unbind(2)
    expected = attention_reference(
        q, k, v, causal="bottom_right", mask=mask[:, None, None, :], layout="bshd", return_lse=False
    )
    expected = expected * mask[..., None, None]
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), qkv)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_errors():
    x = torch.randn(4, 5, 3)
    with pytest.raises(RuntimeError, match=r"attention_mask must be \(batch, seqlen\) of hidden_states \(4, 5, 3\)"):
        unpad_input(x, torch.ones(4, 6, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"unused_mask must be \(batch, seqlen\)"):
        unpad_input(x, torch.ones(4, 5, dtype=torch.bool), torch.ones(4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"attention_mask has dtype torch.float32, expected bool or an integer"):
        unpad_input(x, torch.ones(4, 5))
    with pytest.raises(RuntimeError, match=r"indices must have one entry for each token, got shape \(3,\)"):
        pad_input(x[0], torch.arange(3), 1, 5)
