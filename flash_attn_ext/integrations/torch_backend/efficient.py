"""Efficient attention's operators: ``_scaled_dot_product_efficient_attention`` on (B, H, L, D), and
``_efficient_attention_forward`` on (B, L, H, D) or packed (1, T, H, D), with their backward passes.

The LSE is (B, H, L), with L rounded up to a multiple of 32 and padded with infinity. Each packed sequence has a row of
its own in it. Without compute_log_sumexp it is empty, and there is no backward pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn_ext._call.problem import Problem
from flash_attn_ext.integrations.torch_backend import seeds
from flash_attn_ext.integrations.torch_backend.operands import (
    QKV,
    QKV_AND_BIAS,
    NotTaken,
    as_like,
    backward,
    forward,
    masked,
    relaid,
    sequence_first,
    without_infinity,
)
from flash_attn_ext.types import Causal

_LSE_MULTIPLE = 32
_BIAS_MULTIPLE = 16
_CAUSALITY: tuple[Causal | None, ...] = (None, "top_left", "bottom_right")  # by custom_mask_type


def _forward(problem: Problem, with_lse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, lse, seed, offset). The LSE is padded, but not yet by sequence."""
    problem, first, offset = seeds.with_drawn(problem, torch.int64)
    out, lse = forward(problem)
    if not with_lse:
        return out, lse.new_empty((*_sequences(problem), 0)), first, offset
    if problem.bias is not None or problem.causal == "bottom_right":
        lse = without_infinity(lse)
    if problem.cu_seqlens_q is not None:
        return out, _by_sequence(lse, problem), first, offset
    missing = -lse.size(-1) % _LSE_MULTIPLE
    padded = torch.nn.functional.pad(lse, (0, missing), value=math.inf) if missing else lse
    return out, relaid(padded, lse), first, offset


def _backward(problem: Problem, grad_out: Tensor, out: Tensor, logsumexp: Tensor, state, wanted):
    problem = seeds.with_seed_of(problem, *state)
    lse = logsumexp[..., : problem.q.size(2)] if problem.cu_seqlens_q is None else _packed(logsumexp, problem)
    return backward(problem, grad_out, out, lse, logsumexp, wanted)


def _sequences(problem: Problem) -> tuple[int, int]:
    batch = problem.q.size(0) if problem.cu_seqlens_q is None else problem.cu_seqlens_q.size(0) - 1
    return batch, problem.q.size(1)


def _by_sequence(lse: Tensor, problem: Problem) -> Tensor:
    """(H, T) -> (batch, H, longest)."""
    assert problem.cu_seqlens_q is not None and problem.max_seqlen_q is not None
    ends = problem.cu_seqlens_q.long()
    longest = math.ceil(problem.max_seqlen_q / _LSE_MULTIPLE) * _LSE_MULTIPLE
    tokens = ends[:-1, None] + torch.arange(longest, device=lse.device)
    if lse.size(1) == 0:
        return lse.new_full((*_sequences(problem), longest), math.inf)
    rows = lse[:, tokens.clamp(max=lse.size(1) - 1)].transpose(0, 1)
    return torch.where((tokens < ends[1:, None])[:, None], rows, math.inf).contiguous()


def _packed(logsumexp: Tensor, problem: Problem) -> Tensor:
    """(batch, H, longest) -> (H, T)."""
    assert problem.cu_seqlens_q is not None
    ends = problem.cu_seqlens_q.long()
    tokens = torch.arange(problem.q.size(0), device=logsumexp.device)
    sequence = torch.searchsorted(ends[1:], tokens, right=True).clamp(max=ends.size(0) - 2)
    return logsumexp[sequence, :, tokens - ends[sequence]].t()


def _bias_gradient(gradient: Tensor) -> Tensor:
    """The gradient of a bias in PyTorch's layout: rows begin at multiples of 16 elements."""
    missing = -gradient.size(-1) % _BIAS_MULTIPLE
    if missing == 0:
        return gradient
    room = gradient.new_empty((*gradient.shape[:-1], gradient.size(-1) + missing))
    return room[..., : gradient.size(-1)].copy_(gradient)


def scaled_dot_product_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    problem = masked(
        Problem(query, key, value, scale=scale, causal=_CAUSALITY[is_causal], dropout_p=dropout_p), attn_bias
    )
    out, lse, seed, offset = _forward(problem, compute_log_sumexp)
    return sequence_first(out), lse, seed, offset


def scaled_dot_product_backward(
    grad_out_,
    query,
    key,
    value,
    attn_bias,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
):
    problem = masked(
        Problem(query, key, value, scale=scale, causal=_CAUSALITY[is_causal], dropout_p=dropout_p), attn_bias
    )
    wanted = QKV_AND_BIAS if grad_input_mask[3] and problem.bias is not None else QKV
    gradients = _backward(problem, grad_out_, out, logsumexp, (philox_seed, philox_offset), wanted)
    bias_gradient = None
    if gradients[3] is not None:
        bias_gradient = _bias_gradient(gradients[3].reshape(attn_bias.shape))
    return *(sequence_first(gradient) for gradient in gradients[:3]), bias_gradient


def _problem(tensors, lengths, bias, dropout_p, custom_mask_type, scale) -> Problem:
    """A problem of (B, L, H, D), or of packed (1, T, H, D) with (cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k)."""
    packed = lengths[0] is not None
    if packed and bias is not None:
        raise NotTaken("bias with cu_seqlens is not taken")
    if packed and any(length is None for length in lengths[1:]):
        raise NotTaken("cu_seqlens_q is taken with cu_seqlens_k, max_seqlen_q and max_seqlen_k, not without")
    q, k, v = (tensor.squeeze(0) if packed else tensor.transpose(1, 2) for tensor in tensors)
    problem = Problem(q, k, v, scale=scale, causal=_CAUSALITY[custom_mask_type], dropout_p=dropout_p)
    if packed:
        # PyTorch's kernel reads how many keys a sequence has only from cu_seqlens_k, so max_seqlen_k may be too small.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, _ = lengths
        return problem._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q)
    return masked(problem, bias)


def _caller_form(tensor: Tensor, packed: bool) -> Tensor:
    return tensor.unsqueeze(0) if packed else tensor.transpose(1, 2)


def _check_extent(seqlen_k, window_size) -> None:
    if seqlen_k is not None or window_size is not None:
        raise NotTaken("seqlen_k and window_size are not taken")


def efficient_forward(
    query,
    key,
    value,
    bias,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    custom_mask_type,
    compute_log_sumexp=False,
    *,
    scale=None,
    seqlen_k=None,
    window_size=None,
):
    _check_extent(seqlen_k, window_size)
    lengths, packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), cu_seqlens_q is not None
    problem = _problem((query, key, value), lengths, bias, dropout_p, custom_mask_type, scale)
    out, lse, seed, offset = _forward(problem, compute_log_sumexp)
    out = _caller_form(out, packed).contiguous()
    longest_q = max_seqlen_q if packed else query.size(1)
    return out, lse, seed, offset, longest_q, key.size(1) if max_seqlen_k is None else max_seqlen_k


def efficient_backward(
    grad_out_,
    query,
    key,
    value,
    bias,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    logsumexp,
    dropout_p,
    philox_seed,
    philox_offset,
    custom_mask_type,
    bias_requires_grad,
    *,
    scale=None,
    num_splits_key=None,
    window_size=None,
    shared_storage_dqdkdv=False,
):
    _check_extent(None, window_size)
    if shared_storage_dqdkdv:
        raise NotTaken("shared_storage_dqdkdv is not taken: gradients have a memory each")
    lengths, packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), cu_seqlens_q is not None
    problem = _problem((query, key, value), lengths, bias, dropout_p, custom_mask_type, scale)
    grad_out, out = (tensor.squeeze(0) if packed else tensor.transpose(1, 2) for tensor in (grad_out_, out))
    wanted = QKV_AND_BIAS if bias_requires_grad and problem.bias is not None else QKV
    gradients = _backward(problem, grad_out, out, logsumexp, (philox_seed, philox_offset), wanted)
    bias_gradient = query.new_empty(()) if bias is None else None
    if gradients[3] is not None:
        bias_gradient = _bias_gradient(gradients[3].reshape(bias.shape))
    dq, dk, dv = (_caller_form(gradient, packed) for gradient in gradients[:3])
    return as_like(dq, query), as_like(dk, key), as_like(dv, value), bias_gradient
