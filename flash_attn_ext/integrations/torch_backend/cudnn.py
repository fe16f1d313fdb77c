"""cuDNN's operators: ``_scaled_dot_product_cudnn_attention`` on (B, H, L, D), and ``_cudnn_attention_forward`` on that
or packed (T, H, D), with their backward passes. Since torch 2.15 there is a form of the latter that
writes to a given tensor.

Causality is aligned at the top left. The LSE is (B, H, L, 1); packed, it is (H, T), before torch 2.14 (T, H, 1).
"""

from __future__ import annotations

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
    masked,
    relaid,
)

_PACKED_LSE_IS_FLAT = torch.__version__ >= (2, 14)  # type: ignore[operator]  # a TorchVersion compares with tuples


def _problem(tensors, lengths, attn_bias, dropout_p, is_causal, scale) -> Problem:
    """A problem, which is packed if `lengths` are (cum_seq_q, cum_seq_k, max_q, max_k), and dense without them."""
    cum_seq_q, cum_seq_k, max_q, max_k = lengths
    q, k, v = tensors
    problem = Problem(
        q,
        k,
        v,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        scale=scale,
        causal="top_left" if is_causal else None,
        dropout_p=dropout_p,
    )
    return masked(problem, attn_bias)


def _forward(problem: Problem) -> tuple:
    """Returns (out, lse, seed, offset)."""
    problem, first, offset = seeds.with_drawn(problem, torch.int64)
    out, lse = forward(problem)
    if problem.cu_seqlens_q is None:
        rows = lse.unsqueeze(-1)
    else:
        rows = lse if _PACKED_LSE_IS_FLAT else lse.t().contiguous().unsqueeze(-1)
    return out, relaid(rows, lse), first, offset


def _backward(problem: Problem, grad_out: Tensor, out: Tensor, logsumexp: Tensor, state: tuple[Tensor, Tensor]):
    problem = seeds.with_seed_of(problem, *state)
    if problem.cu_seqlens_q is None:
        lse = logsumexp.squeeze(-1)
    else:
        lse = logsumexp if _PACKED_LSE_IS_FLAT else logsumexp.squeeze(-1).t()
    gradients = backward(problem, grad_out, out, lse, logsumexp)
    return tuple(as_like(gradient, of) for gradient, of in zip(gradients[:3], problem[:3], strict=True))


_DENSE = (None, None, None, None)


def scaled_dot_product_forward(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    check_no_debug_mask(return_debug_mask)
    problem = _problem((query, key, value), _DENSE, attn_bias, dropout_p, is_causal, scale)
    out, lse, seed, offset = _forward(problem)
    return out, lse, None, None, query.size(2), key.size(2), seed, offset, None


def scaled_dot_product_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    problem = _problem((query, key, value), _DENSE, attn_bias, dropout_p, is_causal, scale)
    return _backward(problem, grad_out, out, logsumexp, (philox_seed, philox_offset))


def cudnn_forward(
    query,
    key,
    value,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
    seqused_k=None,
    block_table=None,
):
    check_no_debug_mask(return_debug_mask)
    check_no_cache(seqused_k, block_table)
    lengths = _lengths(cum_seq_q, cum_seq_k, max_q, max_k, attn_bias)
    problem = _problem((query, key, value), lengths, attn_bias, dropout_p, is_causal, scale)
    out, lse, seed, offset = _forward(problem)
    return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, None


def cudnn_forward_into(
    out,
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    is_causal=False,
    *,
    scale=None,
    seqused_k=None,
    block_table=None,
):
    tensors, lengths = (query, key, value), (cum_seq_q, cum_seq_k, max_q, max_k)
    options = dict(is_causal=is_causal, scale=scale, seqused_k=seqused_k, block_table=block_table)
    result, lse, *_ = cudnn_forward(*tensors, None, *lengths, True, **options)
    out.copy_(result)
    return lse


def cudnn_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    lengths = _lengths(cum_seq_q, cum_seq_k, max_q, max_k, attn_bias)
    problem = _problem((query, key, value), lengths, attn_bias, dropout_p, is_causal, scale)
    return _backward(problem, grad_out, out, logsumexp, (philox_seed, philox_offset))


def _lengths(cum_seq_q, cum_seq_k, max_q, max_k, attn_bias) -> tuple:
    if cum_seq_q is None:
        return _DENSE
    if attn_bias is not None:
        raise NotTaken("attn_bias with packed sequences is not taken")
    return cum_seq_q, cum_seq_k, max_q, max_k
