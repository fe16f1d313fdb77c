"""flash-attention 2's ``flash_attn_with_kvcache``, on this library's ``attention_with_kvcache``."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from flash_attn_ext._call.options import check_flag, check_length, check_number_or_none
from flash_attn_ext.functional import attention_with_kvcache
from flash_attn_ext.integrations.flash_attn.arguments import WindowSize, require_shape, window_of


@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    *,
    return_softmax_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn.flash_attn_with_kvcache``: attention to a cache, which new keys and values join in place first.

    On :func:`flash_attn_ext.attention_with_kvcache`, which says more of each rule. There is no backward pass.

    Args:
        q: (batch, seqlen_q, heads, headdim), float32, float64, bfloat16 or float16.
        k_cache: (batch_cache, capacity, heads_k, headdim), or (num_pages, page_size, heads_k, headdim) with a
            ``block_table``. heads_k divides heads.
        v_cache: the same with headdim_v, which may differ from headdim.
        k, v: (batch, seqlen_new, heads_k, headdim), (batch, seqlen_new, heads_k, headdim_v): new keys and values,
            which are written behind the first ``cache_seqlens`` of each sequence. Both or neither.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype; with ``k`` only. Rotates k and q (Su et al.
            2021, "RoFormer", section 3.4.2) from position ``cache_seqlens`` on; without ``causal`` and a window all of
            q is rotated by that position.
        cache_seqlens: (batch,) int32 on q's device, or an int: how many keys each sequence has in the cache, without
            the new ones. None: the whole capacity, which leaves no room for new ones.
        cache_batch_idx: (batch,) int32, which entry of the cache is whose. None: sequence i has entry i. Not with a
            ``block_table``.
        cache_leftpad: must be None.
        block_table: (batch, pages of a sequence) int32. page_size is a multiple of 16 (flash_attn: of 256).
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in :func:`flash_attn_func`, where the last query
            is beside the last valid key.
        rotary_interleaved: True: dimensions (0, 1), (2, 3), … are rotated together, as in GPT-J. False: dimension i and
            i + rotary_dim / 2, as in GPT-NeoX.
        num_splits: no effect, any int. The number of splits of the keys follows from the shapes and the device, so that
            results are bitwise reproducible.
        return_softmax_lse: also return the log-sum-exp of each row's scores.

    Returns:
        ``out`` (batch, seqlen_q, heads, headdim_v); with ``return_softmax_lse`` ``(out, softmax_lse)``: ``softmax_lse``
        (batch, heads, seqlen_q), float32 (float64 for float64 q), -inf for a row that sees no key.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not go together, a tensor that requires grad in grad mode; on
            the CPU also lengths, indices and pages outside the cache (a GPU clamps them).
        ValueError: an option outside its range. TypeError: an argument of the wrong type.
        NotImplementedError: a ``cache_leftpad``.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> k_cache, v_cache = torch.empty(2, 4, 512, 2, 64)  # of 4 sequences, with room for 512 keys and 2 key heads
        >>> q, k, v = torch.randn(4, 1, 8, 64), torch.randn(4, 1, 2, 64), torch.randn(4, 1, 2, 64)
        >>> flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True).shape
        torch.Size([4, 1, 8, 64])
    """
    if cache_leftpad is not None:
        raise NotImplementedError(
            "cache_leftpad must be None, got padding on the left, which flash_attn_ext has no caches with: let each "
            "sequence begin at position 0 of its entry, and say how long it is by cache_seqlens"
        )
    require_shape("(batch, seqlen_q, heads, headdim)", q=q)
    entry = "(batch_cache, capacity" if block_table is None else "(num_pages, page_size"
    require_shape(f"{entry}, heads_k, headdim)", k_cache=k_cache, v_cache=v_cache)
    causal = check_flag("causal", causal)
    rotary_interleaved = check_flag("rotary_interleaved", rotary_interleaved)
    check_length("num_splits", num_splits)
    if cache_seqlens is None:
        cache_seqlens = _whole_cache(k_cache, block_table, k)
    return attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k_new=k,
        v_new=v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved and rotary_cos is not None,  # True without tables asks for no rotation
        causal="bottom_right" if causal else None,
        window=window_of(window_size),
        alibi_slopes=alibi_slopes,
        softcap=check_number_or_none("softcap", softcap) or None,
        scale=check_number_or_none("softmax_scale", softmax_scale),
        layout="bshd",
        return_lse=check_flag("return_softmax_lse", return_softmax_lse),
    )


def _whole_cache(k_cache: Tensor, block_table: Tensor | None, k: Tensor | None) -> int:
    if k is not None:
        raise RuntimeError(
            "cache_seqlens must be given with k and v, got None: it says behind how many keys of each sequence the new "
            "ones are written"
        )
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
