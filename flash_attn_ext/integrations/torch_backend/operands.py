"""Helpers of all operators: an aten call as a problem of ours, and our results as its schema declares them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import four_dimensional
from flash_attn_ext._call.problem import Problem
from flash_attn_ext.integrations._warnings import is_of_the_machine

QKV = (True, True, True, False, False, False)
QKV_AND_BIAS = (True, True, True, True, False, False)
_RESIDUAL = "_flash_attn_ext_lse_residual"


class NotTaken(ValueError):
    """The reason why a call goes to the kernel that was there before."""


class OursAlone(RuntimeError):
    """A backward pass that failed, and that no other kernel can run: the dropout bits are ours."""


def masked(problem: Problem, attn_bias: Tensor | None) -> Problem:
    """The problem with PyTorch's attn_bias (attn_mask): bool or float, broadcastable to (B, H, L, S)."""
    if attn_bias is None:
        return problem
    table = four_dimensional("attn_bias", attn_bias, "(batch, heads, queries, keys)")
    return problem._replace(mask=table) if table.dtype == torch.bool else problem._replace(bias=table)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns (out, lse). The rounding error of an lse is an attribute of it, because the schemas have no place for it.
    A copy without the attribute only gives less exact gradients."""
    out, lse, residual, _ = _C.attention_forward(problem)
    if residual is not None:
        setattr(lse, _RESIDUAL, residual)
    return out, lse


def relaid(lse: Tensor, of: Tensor) -> Tensor:
    """Makes `lse`, another arrangement of the elements of `of`, the LSE of the same call."""
    residual = getattr(of, _RESIDUAL, None)
    if residual is not None and lse is not of:
        setattr(lse, _RESIDUAL, residual)
    return lse


def backward(
    problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, saved: Tensor, wanted: tuple[bool, ...] = QKV
) -> list[Any]:
    """The gradients of q, k, v, bias, ... that are `wanted`. `saved` is the LSE as the forward pass returned it."""
    try:
        return _C.attention_backward(grad_out, None, out, lse, getattr(saved, _RESIDUAL, None), wanted, problem)
    except (RuntimeError, ValueError) as error:
        if problem.rng_seed is None or is_of_the_machine(error):
            raise
        raise OursAlone(str(error)) from error


def without_infinity(lse: Tensor) -> Tensor:
    """The LSE with 0 instead of -inf for rows that see no key, as in PyTorch's kernels. Their backward passes, which
    may get it after the switch, would turn -inf into NaN."""
    return relaid(lse.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0), lse)


def sequence_first(tensor: Tensor) -> Tensor:
    """The same values (B, H, L, D) or (B, H, L), lying in memory as (B, L, H, D) or (B, L, H), as some meta kernels
    declare. `tensor` is a result of ours, which has no gaps."""
    sizes, strides = tensor.shape, tensor.stride()
    row = sizes[3] if len(sizes) == 4 else 1
    if (
        (strides[1] == row or sizes[1] == 1)
        and (strides[2] == row * sizes[1] or sizes[2] == 1)
        and (strides[0] == row * sizes[1] * sizes[2] or sizes[0] == 1)
    ):
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def as_like(tensor: Tensor, model: Tensor) -> Tensor:
    """The same values with the strides of torch.empty_like(model), which is what the meta kernels of flash attention
    declare."""
    if tensor.stride() == model.stride():
        return tensor
    if tensor.shape != model.shape:
        raise NotTaken(f"value has head dim {tensor.size(-1)} and query {model.size(-1)}: the operator wants one")
    like = torch.empty_like(model)
    same = all(n == 1 or a == b for n, a, b in zip(like.shape, like.stride(), tensor.stride(), strict=True))
    return tensor if same else like.copy_(tensor)


def window_side(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def check_no_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise NotTaken("return_debug_mask=True asks for the dropout bits, which are not kept here")


def check_no_cache(seqused_k: Tensor | None, block_table: Tensor | None) -> None:
    if seqused_k is not None:
        raise NotTaken("seqused_k is not taken: pack the keys that are used, or call attention_with_kvcache")
    if block_table is not None:
        raise NotTaken("block_table is not taken: call attention_with_kvcache")
