"""The CPU's flash attention, ``_scaled_dot_product_flash_attention_for_cpu`` on (B, H, L, D), and its backward pass.

Causality is aligned at the top left. The LSE lies in memory as (B, L, H), gradients as (B, L, H, D).
"""

from __future__ import annotations

from flash_attn_ext._call.problem import Problem
from flash_attn_ext.integrations.torch_backend.operands import (
    NotTaken,
    as_like,
    backward,
    forward,
    masked,
    relaid,
    sequence_first,
    without_infinity,
)


def _problem(query, key, value, dropout_p, is_causal, attn_mask, scale) -> Problem:
    if dropout_p > 0:
        raise NotTaken("dropout_p > 0: the operator has no place for a seed")
    problem = Problem(query, key, value, scale=scale, causal="top_left" if is_causal else None)
    return problem if attn_mask is None else masked(problem, attn_mask)


def scaled_dot_product_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    out, lse = forward(_problem(query, key, value, dropout_p, is_causal, attn_mask, scale))
    if attn_mask is not None:
        lse = without_infinity(lse)
    return as_like(out, query), relaid(sequence_first(lse), lse)


def scaled_dot_product_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    problem = _problem(query, key, value, dropout_p, is_causal, attn_mask, scale)
    gradients = backward(problem, grad_out, out, logsumexp, logsumexp)
    return sequence_first(gradients[0]), sequence_first(gradients[1]), sequence_first(gradients[2])
