"""The rules of PyTorch's scaled_dot_product_attention that differ from those of ``attention``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import (
    DenseForm,
    Names,
    autocast_dtype,
    cast,
    dense_form,
    operands_of,
    require_tensors,
)
from flash_attn_ext._call.options import check_flag, check_number, check_number_or_none
from flash_attn_ext._call.problem import Problem
from flash_attn_ext._torch_private import jagged_class, overloaded_args
from flash_attn_ext.autograd import attend
from flash_attn_ext.types import Causal

SYMBOLIC, EQUAL_HEADS = _C.SYMBOLIC, _C.EQUAL_HEADS
_NEVER_ASKED = (Tensor, Parameter, type(None), bool, int, float)
NAMES = Names(q="query", k="key", v="value", bias="attn_mask", mask="attn_mask")


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


def operands_to_ask(*arguments: Any) -> list[Any]:
    """The arguments of a call whose classes override it (``__torch_function__``), in the order in which PyTorch asks.

    A CausalBias is not among them, because it is replaced by what it stands for. Nested tensors are not either, because
    they are refused.
    """
    candidates = [one for one in arguments if type(one) not in _NEVER_ASKED]
    if not candidates:
        return []
    answered_here = (jagged_class(), _causal_bias())
    asked: list[Any] = overloaded_args([one for one in candidates if not isinstance(one, answered_here)])
    return asked


def _causal_bias() -> Any:
    from torch.nn.attention.bias import CausalBias  # a prototype: imported on use

    return CausalBias


def attend_or_decline(arguments: SdpaArguments | tuple[Any, ...]) -> Any:
    """The output of a call, or NotImplemented if there are operands to ask first. A plain tuple will do."""
    query, key, value, attn_mask = arguments[:4]
    operands = operands_of(query, key, value)
    if (operands == SYMBOLIC or not (attn_mask is None or type(attn_mask) is Tensor)) and operands_to_ask(*arguments):
        return NotImplemented
    problem, form = _problem_of(arguments, operands)
    out, *_ = attend(problem, operands)
    return out if form.rank == 4 else form.restore_out(out)


def _problem_of(arguments: SdpaArguments | tuple[Any, ...], operands: int) -> tuple[Problem, DenseForm]:
    """PyTorch's arguments as a problem in canonical form (without a seed), and how to restore its output's form."""
    q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    if operands != EQUAL_HEADS:
        require_tensors(NAMES, (q, k, v))
    if operands != SYMBOLIC:
        _check_sizes(q, k, v)
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    causal: Causal | None = "top_left" if is_causal else None
    if attn_mask is not None:
        causal, attn_mask = _causality_of(attn_mask, q, k, is_causal)
        if attn_mask is not None and operands != SYMBOLIC:
            _check_device("attn_mask", attn_mask, q)
    if operands != EQUAL_HEADS:
        q, k, v, attn_mask = _cast_and_match(q, k, v, attn_mask, enable_gqa)
    is_boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    problem = Problem(
        q=q,
        k=k,
        v=v,
        bias=None if attn_mask is None or is_boolean else _float_mask(attn_mask, q),
        mask=attn_mask if is_boolean else None,
        scale=check_number_or_none("scale", scale),
        causal=causal,
        dropout_p=check_number("dropout_p", dropout_p),
    )
    return dense_form(problem, operands, NAMES)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses sizes that C++ would refuse too, but by other names than PyTorch's."""
    _check_device("key", k, q)
    _check_device("value", v, q)
    if min(q.dim(), k.dim(), v.dim()) < 2:
        return
    if k.size(-1) != q.size(-1):
        raise RuntimeError(f"key has head dim {k.size(-1)}, expected {q.size(-1)} (that of query)")
    if v.size(-2) != k.size(-2):
        raise RuntimeError(f"value has sequence length {v.size(-2)}, expected {k.size(-2)} (that of key)")


def _check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise RuntimeError(
            f"{name} is on {tensor.device}, but query is on {q.device}; move it with {name}.to(query.device)"
        )


def _cast_and_match(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Applies autocast, which also casts a float32 mask, and matches numbers of heads, which PyTorch broadcasts."""
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
    return q, k, v, attn_mask


def _float_mask(attn_mask: Tensor, q: Tensor) -> Tensor:
    if attn_mask.dtype in (torch.float32, q.dtype):
        return attn_mask
    flags = "attn_mask.bool() (True = attend)"
    if attn_mask.is_floating_point():
        way_out = f"cast it with attn_mask.to(query.dtype), or where it has flags of 0 and 1, pass {flags}"
    else:
        way_out = f"pass {flags}"
    raise RuntimeError(
        f"attn_mask has dtype {attn_mask.dtype}, expected torch.bool, torch.float32 or query's dtype ({q.dtype}): "
        f"{way_out}"
    )


def _causality_of(attn_mask: Tensor, q: Tensor, k: Tensor, is_causal: bool) -> tuple[Causal | None, Tensor | None]:
    """The causality and the mask that attn_mask stands for. A torch.nn.attention.bias.CausalBias is causality."""
    if type(attn_mask) is not Tensor:
        if isinstance(attn_mask, _causal_bias()):
            if is_causal:
                raise ValueError(
                    "attn_mask is a CausalBias and is_causal=True was given too, but CausalBias should not be used "
                    "with causal=True: pass is_causal=False, since a CausalBias says itself that it is causal"
                )
            lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
            if lengths != (q.size(-2), k.size(-2)):
                raise RuntimeError(
                    f"attn_mask is a CausalBias for (L, S) = {lengths}, but query and key have "
                    f"{(q.size(-2), k.size(-2))}"
                )
            return ("bottom_right" if attn_mask.variant.name == "LOWER_RIGHT" else "top_left"), None
        require_tensors(("attn_mask",), (attn_mask,), num_required=1)
    if is_causal:
        raise RuntimeError(
            "attn_mask and is_causal=True were both given. PyTorch documents this as an error (Explicit attn_mask "
            "should not be set when is_causal=True), but some of its kernels combine the two. Put causality into the "
            "mask, or use flash_attn_ext.attention(..., causal='top_left', "
            f"{'mask' if attn_mask.dtype == torch.bool else 'bias'}=...), which combines them"
        )
    return None, attn_mask


def _match_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Makes heads fit the extension: k and v have the same number, and it divides q's."""
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise RuntimeError(f"query, key and value must have at least 2 dimensions (L, E), got {shapes}")
    if enable_gqa and min(q.dim(), k.dim(), v.dim()) < 3:
        raise RuntimeError(f"enable_gqa needs a dimension of heads, at least (H, L, E), got {shapes}")
    hq, hk, hv = (t.size(-3) if t.dim() > 2 else 1 for t in (q, k, v))
    if enable_gqa:
        if any(hq % h if h else hq for h in (hk, hv)):
            raise RuntimeError(
                f"with enable_gqa the heads of key and value must divide those of query, got {shapes}"
                f"{_hint_at_layout(q, k, v)}"
            )
        if hk != hv:  # PyTorch repeats each on its own
            k, v = _repeat_heads(k, hq), _repeat_heads(v, hq)
        return q, k, v
    heads = next((h for h in (hq, hk, hv) if h != 1), 1)
    if any(h not in (1, heads) for h in (hq, hk, hv)):
        raise RuntimeError(
            f"the numbers of heads of {shapes} do not broadcast: pass enable_gqa=True to share key heads among query "
            f"heads{_hint_at_layout(q, k, v)}"
        )
    if hq != heads:
        q = _expand_heads(q, heads)
    if hk != hv:
        k, v = _expand_heads(k, heads), _expand_heads(v, heads)
    return q, k, v


def _hint_at_layout(q: Tensor, k: Tensor, v: Tensor) -> str:
    """For heads that do not fit: says if those of (N, L, H, E) would."""
    if not q.dim() == k.dim() == v.dim() >= 3:
        return ""
    heads = k.size(-2)
    if not (heads == v.size(-2) and heads > 0 and q.size(-2) % heads == 0 and k.size(-3) == v.size(-3)):
        return ""
    return (
        "; they would fit with heads and sequence exchanged: flash_attn_ext.attention takes (batch, sequence, heads, "
        "head dim) with layout='bshd', and this function their transpose(-3, -2)"
    )


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.size(-3) == heads else tensor.repeat_interleave(heads // tensor.size(-3), dim=-3)


def _expand_heads(tensor: Tensor, heads: int) -> Tensor:
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    return tensor.expand(*tensor.shape[:-3], heads, -1, -1)
