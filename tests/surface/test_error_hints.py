"""Errors that say in which other form a call would be right: flags as a mask, dimensions that a mask lacks, a layout.

Each advice is followed, and gives the result that was meant.
"""

import pytest
import torch

from flash_attn_ext import attention, attention_varlen, attention_with_kvcache, scaled_dot_product_attention
from support.refusals import assert_says
from support.refusals import zeros as t

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8]
BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 2, 4, 5, 7, 8


def qkv(device: str, keys: int = KEYS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (QUERIES, keys, keys)
    return [torch.randn(BATCH, HEADS, n, HEAD_DIM, generator=generator).to(device) for n in lengths]


def refusal(function, *tensors, **options) -> Exception:
    with pytest.raises((RuntimeError, TypeError)) as error:
        function(*tensors, **options)
    return error.value


def keep_flags(device: str) -> torch.Tensor:
    """(queries, keys) of 0 and 1, at least one 1 in each row."""
    flags = torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.6
    flags[:, 0] = True
    return flags.long().to(device)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_flags_are_a_mask(dtype, device):
    """Cast to q's dtype they would be added to the scores."""
    flags = keep_flags(device).to(dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv(device), attn_mask=flags.bool())
    error = refusal(scaled_dot_product_attention, *qkv(device), attn_mask=flags)
    assert_says(error, ("attn_mask", str(dtype), "torch.bool", "pass attn_mask.bool()", "True = attend"))
    assert ".to(" not in str(error)
    torch.testing.assert_close(scaled_dot_product_attention(*qkv(device), attn_mask=flags.bool()), expected)

    name = str(dtype).removeprefix("torch.")
    error = refusal(attention, *qkv(device), mask=flags)
    assert_says(error, ("mask", name, "expected bool", "True = attend", "pass mask.bool()"))
    assert "bias" not in str(error)
    torch.testing.assert_close(attention(*qkv(device), mask=flags.bool()), expected)

    error = refusal(attention, *qkv(device), bias=flags)
    assert_says(error, ("bias", name, "float32", "flags of 0 and 1", "mask=", "bias.bool()", "True = attend"))
    assert ".to(" not in str(error)


def test_pytorch_refuses_integer_flags(device):
    error = refusal(torch.nn.functional.scaled_dot_product_attention, *qkv(device), attn_mask=keep_flags(device))
    assert_says(error, ("attn_mask dtype to be bool",))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_float_flags_are_a_mask_too(dtype, device):
    """The floats of another dtype may be either."""
    flags = keep_flags(device).to(dtype)
    error = refusal(scaled_dot_product_attention, *qkv(device), attn_mask=flags)
    assert_says(
        error, (str(dtype), "attn_mask.to(query.dtype)", "flags of 0 and 1", "attn_mask.bool() (True = attend)")
    )
    error = refusal(attention, *qkv(device), bias=flags)
    assert_says(error, ("bias.to(q.dtype)", "flags of 0 and 1", "bias.bool() (True = attend)"))
    error = refusal(attention, *qkv(device), mask=flags)
    assert_says(error, ("bias=", "added to the scores", "flags of 0 and 1", "mask.bool()"))


def test_flags_of_other_entries_are_a_mask(device):
    cache = torch.zeros(BATCH, HEADS, 16, HEAD_DIM, device=device)
    flags = torch.ones(BATCH, 1, 1, 16, dtype=torch.int64, device=device)
    error = refusal(attention_with_kvcache, qkv(device)[0], cache, cache, cache_seqlens=5, mask=flags)
    assert_says(error, ("mask", "int64", "True = attend", "pass mask.bool()"))
    tokens, cu = t(5, 4, 8, device=device), torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    error = refusal(attention_varlen, tokens, tokens, tokens, cu, cu, max_seqlen_k=3, mask=flags[..., :3])
    assert_says(error, ("mask", "int64", "True = attend", "pass mask.bool()"))


@pytest.mark.parametrize(
    ("shape", "way_out", "followed"),
    [
        ((BATCH, KEYS), "[:, None, None, :]", lambda mask: mask[:, None, None, :]),
        ((BATCH, QUERIES, KEYS), "[:, None]", lambda mask: mask[:, None]),
        ((BATCH, 1, KEYS), "[:, None]", lambda mask: mask[:, None]),
        ((BATCH * HEADS, QUERIES, KEYS), ".unflatten(0, (2, 4))", lambda mask: mask.unflatten(0, (BATCH, HEADS))),
    ],
    ids=["(batch, keys), as Hugging Face has them", "(batch, queries, keys)", "(batch, 1, keys)", "(batch * heads, …)"],
)
def test_dimensions_that_a_mask_lacks(shape, way_out, followed, device):
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    mask[0, ..., -2:] = False
    tensors = qkv(device)
    error = refusal(scaled_dot_product_attention, *tensors, attn_mask=mask)
    assert_says(error, ("attn_mask", str(shape), f"pass attn_mask{way_out} where it is"))
    assert_says(refusal(attention, *tensors, mask=mask), ("mask", f"pass mask{way_out} where it is"))
    assert_says(refusal(attention, *tensors, bias=mask.float()), ("bias", f"pass bias{way_out} where it is"))
    out = scaled_dot_product_attention(*tensors, attn_mask=followed(mask))
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=followed(mask))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shape", [(KEYS, QUERIES), (3, KEYS), (3, QUERIES, KEYS), (BATCH, KEYS + 1)], ids=str)
def test_a_mask_that_fits_nowhere_gets_no_advice(shape, device):
    error = refusal(scaled_dot_product_attention, *qkv(device), attn_mask=t(*shape, device=device))
    assert_says(error, ("counted from the right",))
    assert "pass" not in str(error) and "layout" not in str(error)


def test_dimensions_that_a_mask_lacks_in_other_entries(device):
    cache = torch.zeros(BATCH, HEADS, 16, HEAD_DIM, device=device)
    mask = torch.ones(BATCH, 16, dtype=torch.bool, device=device)
    call = dict(cache_seqlens=5, mask=mask)
    error = refusal(attention_with_kvcache, qkv(device)[0], cache, cache, **call)
    assert_says(error, ("[2, 4, 5, 16]", "pass mask[:, None, None, :] where it is (batch, keys)"))
    tokens, cu = t(8, 4, 8, device=device), torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    packed = dict(max_seqlen_q=5, max_seqlen_k=5)
    error = refusal(attention_varlen, tokens, tokens, tokens, cu, cu, mask=mask[:, :5], **packed)
    assert_says(error, ("[2, 4, 5, 5]", "pass mask[:, None, None, :] where it is (batch, keys)"))
    error = refusal(attention_varlen, tokens, tokens, tokens, cu, cu, mask=mask[:, None, :5], **packed)
    assert_says(error, ("pass mask[:, None] where it is (batch, queries, keys)",))


# A call of (batch, sequence, heads, head dim) tensors, one that is wrong in the other order.
S, S_K, H, H_K = 100, 120, 4, 2
EXCHANGED = ("heads and sequence exchanged", "layout='bshd'", "sequence, heads, head dim")


def sequence_first(device: str, queries: int = S, keys: int = S_K, key_heads: int = H_K) -> list[torch.Tensor]:
    shapes = ((BATCH, queries, H, HEAD_DIM), *[(BATCH, keys, key_heads, HEAD_DIM)] * 2)
    return [t(*shape, device=device) for shape in shapes]


def test_heads_that_fit_the_other_layout(device):
    error = refusal(attention, *sequence_first(device))
    assert_says(error, ("q has 100 heads and k has 120", *EXCHANGED))
    assert attention(*sequence_first(device), layout="bshd").shape == (BATCH, S, H, HEAD_DIM)

    heads_first = [tensor.transpose(1, 2) for tensor in sequence_first(device)]
    error = refusal(attention, *heads_first, layout="bshd")
    assert_says(error, ("heads and sequence exchanged", "layout='bhsd'", "heads, sequence, head dim"))

    cache = sequence_first(device)
    assert_says(refusal(attention_with_kvcache, *cache, cache_seqlens=1), ("k_cache has 120", *EXCHANGED))


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_heads_that_fit_pytorchs_function_transposed(enable_gqa, device):
    tensors = sequence_first(device, key_heads=H_K if enable_gqa else H)
    error = refusal(scaled_dot_product_attention, *tensors, enable_gqa=enable_gqa)
    assert_says(error, ("query (2, 100, 4, 8)", *EXCHANGED, "transpose(-3, -2)"))
    transposed = [tensor.transpose(-3, -2) for tensor in tensors]
    assert scaled_dot_product_attention(*transposed, enable_gqa=enable_gqa).shape == (BATCH, H, S, HEAD_DIM)


def test_what_belongs_to_heads_or_scores_in_the_other_layout(device):
    """Where q and k have as many tokens, the call itself fits both ways."""
    tensors = sequence_first(device, keys=S)
    square = torch.ones(S, S, dtype=torch.bool, device=device)
    for name, value in (("mask", square), ("alibi_slopes", t(H, device=device)), ("sink", t(H, device=device))):
        assert_says(refusal(attention, *tensors, **{name: value}), (name, *EXCHANGED))
        assert attention(*tensors, **{name: value}, layout="bshd").shape == (BATCH, S, H, HEAD_DIM)
    error = refusal(scaled_dot_product_attention, *sequence_first(device, keys=S, key_heads=H), attn_mask=square)
    assert_says(error, ("attn_mask", *EXCHANGED))


def test_heads_that_fit_neither_layout_get_no_advice(device):
    error = refusal(attention, t(2, 3, 5, 8, device=device), *[t(2, 2, 7, 8, device=device)] * 2)
    assert "layout" not in str(error)
    error = refusal(scaled_dot_product_attention, t(2, 3, 5, 8, device=device), *[t(2, 2, 7, 8, device=device)] * 2)
    assert "layout" not in str(error)
