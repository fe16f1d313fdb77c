"""The attention function's arguments, one by one: honoured, or refused by name."""

import re
import types

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import flash_attn_ext
from flash_attn_ext.integrations.transformers.attention import REFUSED, fused_attention
from flash_attn_ext.integrations.transformers.masks import fused_mask
from flash_attn_ext.reference import attention_reference, attention_varlen_reference

HEADS, KEY_HEADS, LENGTH, DIM = 4, 2, 11, 8
MODULE = types.SimpleNamespace(is_causal=True)


def tensors(device, q_length=LENGTH, length=LENGTH, dtype=torch.float32):
    q, k, v = torch.randn(2, HEADS, q_length, DIM), *torch.randn(2, 2, KEY_HEADS, length, DIM)
    return [t.to(device, dtype).requires_grad_() for t in (q, k, v)]


def check(ours, reference, leaves):
    """Values and gradients, against the definition in float64."""
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out, exact = ours(*leaves), reference(*exact_leaves)
    assert out.is_contiguous()
    dout = torch.randn_like(out)
    given = torch.autograd.grad(out, leaves, dout)
    expected = torch.autograd.grad(exact, exact_leaves, dout.double())
    for result, answer in zip((out, *given), (exact, *expected), strict=True):
        torch.testing.assert_close(result.double(), answer, atol=2e-5, rtol=2e-5)


def interval(device, window=None, padding=None, length=LENGTH):
    function = None
    if window is not None:
        from transformers.masking_utils import sliding_window_causal_mask_function

        function = {"mask_function": sliding_window_causal_mask_function(window), "local_size": window}
    mask = None if padding is None else padding.to(device)
    return fused_mask(2, length, length, attention_mask=mask, device=device, **(function or {}))


OPTIONS = {
    "nothing": ({}, {}),
    "scaling": (dict(scaling=0.2), dict(scale=0.2)),
    "softcap": (dict(softcap=1.5), dict(softcap=1.5)),
    "sliding_window": (dict(sliding_window=3), dict(window=(2, 0))),
    "not causal": (dict(is_causal=False), dict(causal=None)),
    "not causal, sliding_window": (dict(is_causal=False, sliding_window=3), dict(causal=None, window=(2, 2))),
    "ignored": (dict(use_cache=True, position_ids=None, output_attentions=False, cache=None), {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_without_a_mask(name, device):
    given, meant = OPTIONS[name]
    check(
        lambda q, k, v: fused_attention(MODULE, q, k, v, None, **given)[0],
        lambda q, k, v: attention_reference(q, k, v, **(dict(causal="bottom_right") | meant))[0].transpose(1, 2),
        tensors(device),
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_sinks_bias_and_masks(side, window, device):
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    if side is not None:
        keep[1, slice(0, 4) if side == "left" else slice(-4, None)] = False
    mask = interval(device, window, keep)
    sink = torch.randn(HEADS, device=device, requires_grad=True)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, requires_grad=True)
    check(
        lambda q, k, v, s, b: fused_attention(
            MODULE, q, k, v, mask, sliding_window=window, s_aux=s, position_bias=b, is_causal=True
        )[0],
        lambda q, k, v, s, b: attention_reference(
            q,
            k,
            v,
            causal="bottom_right",
            window=None if window is None else (window - 1, 0),
            mask=keep[:, None, None].to(device),
            sink=s,
            bias=b,
        )[0].transpose(1, 2),
        [*tensors(device), sink, bias],
    )


def test_float_masks_are_added(device):
    mask = torch.randn(2, 1, LENGTH, LENGTH, device=device)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, requires_grad=True)
    check(
        lambda q, k, v, b: fused_attention(MODULE, q, k, v, mask, position_bias=b)[0],
        lambda q, k, v, b: attention_reference(q, k, v, bias=b + mask.double())[0].transpose(1, 2),
        [*tensors(device), bias],
    )


@pytest.mark.parametrize("lengths_are_tensors", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cumulative_lengths(is_causal, lengths_are_tensors, device):
    cu_q = torch.tensor([0, 4, 4, 11], dtype=torch.int64, device=device)
    cu_k = torch.tensor([0, 5, 7, 14], dtype=torch.int32, device=device)
    longest = torch.tensor(7, device=device) if lengths_are_tensors else 7
    q = torch.randn(1, HEADS, 11, DIM, device=device, requires_grad=True)
    k, v = (torch.randn(1, KEY_HEADS, 14, DIM, device=device, requires_grad=True) for _ in range(2))
    packed = dict(cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k, max_length_q=longest, max_length_k=longest)
    causal = "bottom_right" if is_causal else None
    check(
        lambda q, k, v: fused_attention(MODULE, q, k, v, None, is_causal=is_causal, sliding_window=3, **packed)[0],
        lambda q, k, v: attention_varlen_reference(
            *(t[0].transpose(0, 1) for t in (q, k, v)), cu_q, cu_k, causal=causal, window=(2, 0 if is_causal else 2)
        )[0][None],
        [q, k, v],
    )


def test_dropout_is_that_of_attention(device):
    q, k, v = tensors(device)
    torch.manual_seed(3)
    out, weights = fused_attention(MODULE, q, k, v, None, dropout=0.4)
    torch.manual_seed(3)
    expected = flash_attn_ext.attention(q, k, v, causal="bottom_right", dropout_p=0.4)
    assert weights is None and torch.equal(out, expected.transpose(1, 2))
    assert not torch.equal(out, fused_attention(MODULE, q, k, v, None)[0])


def test_sinks_in_sixteen_bits(device):
    """A model in bfloat16 has them in bfloat16."""
    q, k, v = tensors(device, dtype=torch.bfloat16)
    sink = torch.randn(HEADS, device=device, dtype=torch.bfloat16, requires_grad=True)
    out, _ = fused_attention(MODULE, q, k, v, None, s_aux=sink)
    expected = flash_attn_ext.attention(q, k, v, causal="bottom_right", sink=sink.float())
    assert torch.equal(out, expected.transpose(1, 2))
    assert torch.autograd.grad(out.sum(), sink)[0].dtype == torch.bfloat16


def test_one_query_sees_every_key(device):
    q, k, v = tensors(device, q_length=1)
    out, _ = fused_attention(MODULE, q, k, v, None)
    torch.testing.assert_close(out, flash_attn_ext.attention(q, k, v).transpose(1, 2))


# Listed here as well, so that a name that the function no longer refuses fails.
NAMES_REFUSED = (
    "cache",
    "block_table",
    "indices",
    "block_indices",
    "output_attentions",
    "head_mask",
    "alibi",
    "sinks",
)


def test_the_list_of_what_is_refused():
    assert sorted(REFUSED) == sorted(NAMES_REFUSED)


@pytest.mark.parametrize("name", NAMES_REFUSED)
def test_refused_by_name(name):
    with pytest.raises(ValueError, match=f"does not take {name}: "):
        fused_attention(MODULE, *tensors("cpu"), None, **{name: True})


CONTRADICTIONS = {
    "attention_mask is None and is_causal is True for 5 queries and 11 keys": (dict(), 5, None),
    "sliding_window is 0, expected 1 or more keys": (dict(sliding_window=0), LENGTH, None),
    "sliding_window is 3, but attention_mask has no window": (dict(sliding_window=3), LENGTH, {}),
    "sliding_window is 3, but attention_mask has a window of 5 keys": (dict(sliding_window=3), LENGTH, dict(window=5)),
    "cu_seq_lens_q and cu_seq_lens_k must be given both or neither": (dict(cu_seq_lens_q=[0, 11]), LENGTH, None),
    "cu_seq_lens_q is for one row of packed sequences": (
        dict(cu_seq_lens_q=[0, 11], cu_seq_lens_k=[0, 11]),
        LENGTH,
        None,
    ),
    "position_bias does not go with packed sequences": (
        dict(cu_seq_lens_q=[0, 11], cu_seq_lens_k=[0, 11], position_bias=[0.0]),
        LENGTH,
        None,
    ),
    "cu_seq_lens_q does not go with an attention_mask": (
        dict(cu_seq_lens_q=[0, 11], cu_seq_lens_k=[0, 11]),
        LENGTH,
        dict(padding=torch.arange(LENGTH)[None].expand(2, -1) > 2),
    ),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_are_refused(message):
    given, q_length, mask = CONTRADICTIONS[message]
    given = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in given.items()}
    q, k, v = tensors("cpu", q_length=q_length)
    mask = None if mask is None else interval("cpu", **mask)
    if "does not go with an attention_mask" in message:
        q, k, v, mask = q[:1], k[:1], v[:1], mask[:1]
    with pytest.raises(ValueError, match=message):
        fused_attention(MODULE, q, k, v, mask, **given)


@pytest.mark.parametrize("shape", [(2, 1, LENGTH, LENGTH - 2), (3, 1, LENGTH, LENGTH), (1, 1, LENGTH, 2 * LENGTH)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_other_queries_or_keys_are_refused(shape, dtype):
    message = f"attention_mask has shape {shape}, expected {(2, HEADS, LENGTH, LENGTH)} = (batch, heads, queries, keys)"
    with pytest.raises(ValueError, match=re.escape(message)):
        fused_attention(MODULE, *tensors("cpu"), torch.ones(shape, dtype=dtype))


def test_masks_of_fewer_dimensions_are_refused():
    """A (batch, keys) mask says nothing of causality, so the model has to make one of it."""
    for shape in ((2, LENGTH), (2, LENGTH, LENGTH)):
        with pytest.raises(ValueError, match=r"keys\) mask to the model, .* one as attention_mask\[:, None\]"):
            fused_attention(MODULE, *tensors("cpu"), torch.ones(shape, dtype=torch.bool))
