"""flash-attention 2's functions of tensors that hold k and v, or q, k and v.

Each passes views of its tensor, which is read in place, to the function of functions.py.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from flash_attn_ext._call.canonical import require_tensors
from flash_attn_ext.integrations.flash_attn.arguments import WindowSize
from flash_attn_ext.integrations.flash_attn.functions import WithProbs, flash_attn_func, flash_attn_varlen_func


@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> WithProbs: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs: ...
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """:func:`flash_attn_func` with k and v in one tensor, ``kv`` (batch, seqlen_k, 2, heads_k, headdim), read in place.

    Everything else, results and errors too, is as there.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> q, kv = torch.randn(2, 128, 8, 64), torch.randn(2, 256, 2, 8, 64)
        >>> flash_attn.flash_attn_kvpacked_func(q, kv).shape
        torch.Size([2, 128, 8, 64])
    """
    k, v = _unpacked("kv", kv, "(batch, seqlen, 2, heads, headdim)")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> WithProbs: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs: ...
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """:func:`flash_attn_func` with q, k and v in one tensor, ``qkv`` (batch, seqlen, 3, heads, headdim), read in place.

    Everything else, results and errors too, is as there.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 128, 3, 8, 64), causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    q, k, v = _unpacked("qkv", qkv, "(batch, seqlen, 3, heads, headdim)")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> WithProbs: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs: ...
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """:func:`flash_attn_varlen_func` with k and v in one tensor, ``kv`` (total_k, 2, heads_k, headdim), read in place.

    Everything else, results and errors too, is as there.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> q, kv = torch.randn(8, 4, 64), torch.randn(8, 2, 4, 64)  # 8 tokens of 2 sequences
        >>> cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 5, 5).shape
        torch.Size([8, 4, 64])
    """
    k, v = _unpacked("kv", kv, "(total, 2, heads, headdim)")
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(*(q, k, v, *packing, *options))


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> WithProbs: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs: ...
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor, ``qkv`` (total, 3, heads, headdim), read in place.

    ``cu_seqlens`` and ``max_seqlen`` are those of queries and keys. Everything else, results and errors too, is as
    there.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> qkv = torch.randn(8, 3, 4, 64)  # 8 tokens of 2 sequences
        >>> cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 5, causal=True).shape
        torch.Size([8, 4, 64])
    """
    q, k, v = _unpacked("qkv", qkv, "(total, 3, heads, headdim)")
    packing = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(*(q, k, v, *packing, *options))


def _unpacked(name: str, packed: Tensor, shape: str) -> tuple[Tensor, ...]:
    """Views of the tensors that are stacked in the third dimension from the end."""
    require_tensors((name,), (packed,), num_required=1)
    num_parts = len(name)  # a letter for each
    if packed.dim() != shape.count(",") + 1 or packed.shape[-3] != num_parts:
        raise RuntimeError(f"{name} must be {shape}, got shape {tuple(packed.shape)}")
    return packed.unbind(-3)
