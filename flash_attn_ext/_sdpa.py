"""The rules of PyTorch's scaled_dot_product_attention that differ from those of ``attention``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_ext._canonical import (
    PLAIN_FORM,
    DenseForm,
    Problem,
    are_canonical,
    autocast_dtype,
    cast,
    default_scale,
    dense_form,
    require_tensors,
    table_form,
)
from flash_attn_ext._options import check_flag, check_number


class SdpaArguments(NamedTuple):
    """The arguments of the call: PyTorch's names, order and defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def sdpa_problem(arguments: SdpaArguments) -> tuple[Problem, DenseForm]:
    """The canonical form of a call (without a seed), and how to give its output back. A plain tuple will do."""
    q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    canonical = are_canonical(q, k, v) and q.size(1) == k.size(1)
    if not canonical or attn_mask is not None:
        require_tensors(SdpaArguments._fields, arguments[:4])
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    causal = "top_left" if is_causal else None
    if attn_mask is not None:
        if type(attn_mask) is not Tensor:
            causal, attn_mask = _causal_bias(attn_mask, q, k, is_causal)
        if is_causal:
            raise RuntimeError(
                "attn_mask and is_causal=True were both given, which PyTorch does not allow: put causality into the "
                "mask, or use flash_attn_ext.attention(..., causal='top_left', mask=...), which combines them"
            )
    if canonical:
        form = PLAIN_FORM
    else:
        q, k, v, attn_mask, form = _bring_into_form(q, k, v, attn_mask, enable_gqa)
    bias = mask = None
    if attn_mask is not None:
        attn_mask = table_form("attn_mask", attn_mask, q, k.size(2), form)
        bias, mask = (None, attn_mask) if attn_mask.dtype == torch.bool else (_float_mask(attn_mask, q), None)
    scale = default_scale(q) if scale is None else check_number("scale", scale)
    dropout_p = check_number("dropout_p", dropout_p)
    return Problem(q, k, v, bias, mask, None, None, None, None, None, scale, None, causal, None, None, dropout_p), form


def _bring_into_form(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, DenseForm]:
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
        attn_mask = None if attn_mask is None else cast(attn_mask, dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(
            f"query, key and value must have the same dtype, got query {q.dtype}, key {k.dtype}, value {v.dtype}: cast "
            "key and value to query.dtype"
        )
    if not (q.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]):
        q, k, v = _match_heads(q, k, v, enable_gqa)
    q, k, v, form = dense_form(q, k, v, ("query", "key", "value"))
    return q, k, v, attn_mask, form


def _float_mask(attn_mask: Tensor, q: Tensor) -> Tensor:
    if attn_mask.dtype not in (torch.float32, q.dtype):
        raise RuntimeError(
            f"attn_mask has dtype {attn_mask.dtype}, expected torch.bool, torch.float32 or query's dtype ({q.dtype}): "
            "cast it with attn_mask.to(query.dtype)"
        )
    return attn_mask


def _causal_bias(attn_mask: Tensor, q: Tensor, k: Tensor, is_causal: bool) -> tuple[str | None, Tensor | None]:
    """torch.nn.attention.bias.CausalBias is a mask by its type alone: it becomes the causality that it stands for."""
    from torch.nn.attention.bias import CausalBias, CausalVariant  # prototype of PyTorch, imported where it is in use

    if not isinstance(attn_mask, CausalBias):
        return None, attn_mask
    if is_causal:
        raise ValueError(
            "attn_mask is a CausalBias and is_causal=True was given too, which PyTorch does not allow: pass "
            "is_causal=False, since a CausalBias says itself that it is causal"
        )
    lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if lengths != (q.size(-2), k.size(-2)):
        raise RuntimeError(
            f"attn_mask is a CausalBias for (L, S) = {lengths}, but query and key have {(q.size(-2), k.size(-2))}"
        )
    return ("bottom_right" if attn_mask.variant == CausalVariant.LOWER_RIGHT else "top_left"), None


def _match_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that fit the extension: k and v have the same number, and it divides q's."""
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise RuntimeError(f"query, key and value must have at least 2 dimensions (L, E), got {shapes}")
    if enable_gqa and min(q.dim(), k.dim(), v.dim()) < 3:
        raise RuntimeError(f"enable_gqa needs a dimension of heads, at least (H, L, E), got {shapes}")
    hq, hk, hv = (t.size(-3) if t.dim() > 2 else 1 for t in (q, k, v))
    if enable_gqa:
        if any(hq % h if h else hq for h in (hk, hv)):
            raise RuntimeError(f"with enable_gqa the heads of key and value must divide those of query, got {shapes}")
        if hk != hv:  # PyTorch repeats each on its own
            k, v = _repeat_heads(k, hq), _repeat_heads(v, hq)
        return q, k, v
    heads = next((h for h in (hq, hk, hv) if h != 1), 1)
    if any(h not in (1, heads) for h in (hq, hk, hv)):
        raise RuntimeError(
            f"the numbers of heads of {shapes} do not broadcast: pass enable_gqa=True to share key heads among query "
            "heads"
        )
    if hq != heads:
        q = _expand_heads(q, heads)
    if hk != hv:
        k, v = _expand_heads(k, heads), _expand_heads(v, heads)
    return q, k, v


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.size(-3) == heads else tensor.repeat_interleave(heads // tensor.size(-3), dim=-3)


def _expand_heads(tensor: Tensor, heads: int) -> Tensor:
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    return tensor.expand(*tensor.shape[:-3], heads, -1, -1)
