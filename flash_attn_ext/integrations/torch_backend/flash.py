"""Flash attention's operators on CUDA: ``_scaled_dot_product_flash_attention`` on (B, H, L, D), and
``_flash_attention_forward`` on (B, L, H, D) or packed (T, H, D), with their backward passes. Since torch 2.12 there is
a form of the latter that writes to a given tensor.

Causality is aligned at the bottom right if there are not as many keys as queries.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flash_attn_ext._call.problem import Problem
from flash_attn_ext.integrations.torch_backend import seeds
from flash_attn_ext.integrations.torch_backend.operands import (
    NotTaken,
    as_like,
    backward,
    check_no_cache,
    check_no_debug_mask,
    forward,
    window_side,
)
from flash_attn_ext.types import Causal


@functools.cache
def _no_debug_mask(device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def scaled_dot_product_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    check_no_debug_mask(return_debug_mask)
    causal: Causal | None = "bottom_right" if is_causal else None
    problem = Problem(query, key, value, scale=scale, causal=causal, dropout_p=dropout_p)
    problem, rng_state, offset = seeds.with_drawn(problem, torch.uint64)
    out, lse = forward(problem)
    lengths = query.size(2), key.size(2)
    no_debug_mask = _no_debug_mask(query.device, query.dtype)
    return as_like(out, query), lse, None, None, *lengths, rng_state, offset, no_debug_mask


def scaled_dot_product_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    causal: Causal | None = "bottom_right" if is_causal else None
    problem = Problem(query, key, value, scale=scale, causal=causal, dropout_p=dropout_p)
    problem = seeds.with_seed_of(problem, philox_seed, philox_offset)
    gradients = backward(problem, grad_out, out, logsumexp, logsumexp)
    return as_like(gradients[0], query), as_like(gradients[1], key), as_like(gradients[2], value)


def _problem(tensors, lengths, dropout_p, is_causal, scale, window) -> Problem:
    """A problem of (B, L, H, D), or of packed tensors with (cum_seq_q, cum_seq_k, max_q, max_k)."""
    cum_seq_q, cum_seq_k, max_q, max_k = lengths
    packed = cum_seq_q is not None
    if not packed:
        tensors = [tensor.transpose(1, 2) for tensor in tensors]
    q, k, v = tensors
    return Problem(
        q,
        k,
        v,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        max_seqlen_q=max_q if packed else None,
        max_seqlen_k=max_k if packed else None,
        scale=scale,
        causal="bottom_right" if is_causal else None,
        window_left=window_side(window[0]),
        window_right=window_side(window[1]),
        dropout_p=dropout_p,
    )


def flash_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    check_no_debug_mask(return_debug_mask)
    check_no_cache(seqused_k, block_table)
    if alibi_slopes is not None:
        raise NotTaken("alibi_slopes are not taken: the operator's backward pass does not get them")
    if num_splits is not None:
        raise NotTaken("num_splits is not taken: the number of splits follows from the lengths")
    lengths, window = (cum_seq_q, cum_seq_k, max_q, max_k), (window_size_left, window_size_right)
    problem = _problem((query, key, value), lengths, dropout_p, is_causal, scale, window)
    problem, rng_state, offset = seeds.with_drawn(problem, torch.uint64)
    out, lse = forward(problem)
    if cum_seq_q is None:
        out = out.transpose(1, 2)
    return as_like(out, query), lse, rng_state, offset, _no_debug_mask(query.device, query.dtype)


def flash_forward_into(out, *arguments, **options):
    """``out`` comes before the arguments of flash_forward."""
    result, lse, *_ = flash_forward(*arguments, **options)
    out.copy_(result)
    return lse


def flash_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    lengths, window = (cum_seq_q, cum_seq_k, max_q, max_k), (window_size_left, window_size_right)
    problem = _problem((query, key, value), lengths, dropout_p, is_causal, scale, window)
    problem = seeds.with_seed_of(problem, rng_state, unused)
    dense = cum_seq_q is None
    if dense:
        grad_out, out = grad_out.transpose(1, 2), out.transpose(1, 2)
    gradients = backward(problem, grad_out, out, logsumexp, logsumexp)
    if dense:
        gradients = [gradient.transpose(1, 2) for gradient in gradients[:3]]
    return as_like(gradients[0], query), as_like(gradients[1], key), as_like(gradients[2], value)
