"""Attention for text generation: over a cache of keys and values, to which a call may append."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import four_dimensional, operands_of, require_tensors
from flash_attn_ext._call.options import (
    check_flag,
    check_integer,
    check_max_logit,
    is_sequence_first,
    problem_of,
    results_of,
)
from flash_attn_ext._call.problem import DIFFERENTIABLE, KvCache, Problem
from flash_attn_ext._sdpa import operands_to_ask
from flash_attn_ext.masks import Intervals
from flash_attn_ext.types import Backend, Causal, KvCacheOptions, Layout, MaxLogit, Window

if TYPE_CHECKING:  # at run time Python 3.10 has it in typing_extensions only
    from typing_extensions import Unpack

SYMBOLIC, PLAIN = _C.SYMBOLIC, _C.PLAIN
_NAMES = {"q": "q", "k": "k_cache", "v": "v_cache"}  # what a Problem's fields are called here


@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[KvCacheOptions],
) -> Tensor: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[KvCacheOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True] | MaxLogit,
    **options: Unpack[KvCacheOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    return_lse: Literal[True],
    return_max_logit: Literal[True] | MaxLogit,
    **options: Unpack[KvCacheOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    return_lse: bool,
    return_max_logit: Literal[False] = False,
    **options: Unpack[KvCacheOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    return_lse: bool = False,
    return_max_logit: bool | MaxLogit = False,
    **options: Unpack[KvCacheOptions],
) -> Tensor | tuple[Tensor, ...]: ...
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    cache_seqlens: Tensor | int,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: Causal | None = "bottom_right",
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    intervals: Tensor | Intervals | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    return_max_logit: bool | MaxLogit = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention over a cache of keys and values, after new ones were appended to it in place. Has no backward pass.

    Sequence b has ``cache_seqlens[b]`` keys in the cache, and after the call ``k_new``'s too. It attends to these and
    to nothing else: what the other rows and pages of the cache hold has no effect, NaN included. (FlashAttention-2, Dao
    2023, section 3.1; for few queries on a GPU split-KV divides the keys and combines the splits by their LSE. Pages:
    Kwon et al. 2023, "PagedAttention", section 4. Rotation: Su et al. 2021, "RoFormer", section 3.4.2.)

    Args:
        q: (B, Hq, Sq, D): the last Sq tokens of each sequence. float32, float64, bfloat16 or float16.
        k_cache: (B_cache, Hk, capacity, D), or in pages (num_pages, Hk, page_size, D) with a ``block_table``; q's dtype
            and device. Hk divides Hq. Any strides. On a GPU, rows that are not contiguous or do not begin at multiples
            of 16 bytes (float64: any) are read from a copy of the whole cache, which each call makes and the logger
            ``flash_attn_ext`` reports. To avoid it, allocate longer rows and pass a view of their first columns.
        v_cache: the same with Dv, which may differ from D.
        k_new, v_new: (B, Hk, Sn, D) and (B, Hk, Sn, Dv), Sn at least 1, both or neither: token i of sequence b is
            written to position ``cache_seqlens[b] + i``.
        cache_seqlens: (B,) int32 on q's device, or an int for all: the keys that were there before this call, 0
            included.
        block_table: (B, pages_per_sequence) int32: where keys [i * page_size, (i + 1) * page_size) of a sequence are.
            page_size is a multiple of 16; a sequence has room for pages_per_sequence * page_size keys. Pages may lie
            anywhere, and sequences may share those that none appends to. Entries past a sequence's length are not
            looked at.
        cache_batch_idx: (B,) int32: which entry of a cache without pages is a sequence's. Without it, entry b.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype: rotate the first rotary_dim <= D columns of the
            new keys, before they are stored, by the angles of their positions, and those of q: query i by that of new
            token i where the call is causal or has a window, else all by that of new token 0. Computed in float32
            (float64 for float64) and rounded once. They need ``k_new``.
        rotary_interleaved: a pair is columns 2 i and 2 i + 1 (GPT-J) instead of i and i + rotary_dim / 2 (GPT-NeoX).
        causal: as in :func:`attention`; by default the last query sees the last key of its sequence.
        window, alibi_slopes, softcap, sink, scale: as in :func:`attention`; diagonals end at the last key of a sequence
            unless causal="top_left".
        bias, mask: broadcastable to (B, Hq, Sq, capacity), indexed by a key's position in its sequence.
        intervals: (B|1, Hq|1, Sq, 2 n) int32, as in :func:`attention`, of positions from 0 to the capacity.
        layout: "bhsd", or "bshd" where all of q, caches and new tokens have the sequence before the heads, as in
            flash_attn: (B, Sq, Hq, D), (num_pages, page_size, Hk, D). ``out`` has it too.
        return_lse: also return the log-sum-exp of each row's scores.
        return_max_logit: also return the largest score of each head (True or "head") or row ("row"), as in
            :func:`attention`.
        backend: None for the first that can run this call, or a name.

    Returns:
        ``out``: (B, Hq, Sq, Dv) or (B, Sq, Hq, Dv), q's dtype. With ``return_lse``, ``(out, lse)``: ``lse`` (B, Hq, Sq)
        whatever the layout, natural log, float32 (float64 for float64 q). A row that sees no key, such as each of a
        sequence without any, has out = 0 and lse = -inf (lse = sink with a sink). With ``return_max_logit`` the largest
        scores come last: (Hq,), or (B, Hq, Sq) for "row".

    Raises:
        RuntimeError: shapes, dtypes, devices or memory that do not go together; a tensor that requires grad while
            gradients are on; a call that no backend can run. On the CPU also lengths past the cache or the rotary
            tables, entries and pages that do not exist, and an entry or page that one sequence appends to and another
            has too.
        ValueError: an option outside its range. TypeError: an argument of the wrong type.

    A GPU call does not wait to check ``cache_seqlens``, ``block_table`` and ``cache_batch_idx``, so a CUDA graph can
    capture it. Whatever they hold, nothing outside the tensors is touched: lengths are clamped to the cache, entries
    and pages to those that exist, positions to the rotary tables; new tokens past the end are dropped. With the
    environment variable ``FLASH_ATTN_EXT_CHECK=1``, read at each call, a GPU call waits and raises as the CPU does.

    ``torch.autocast`` does nothing here: a cache has one dtype, and everything must come in it.

    Example:
        >>> k_cache, v_cache = torch.empty(2, 4, 2, 512, 64)  # of 4 sequences, with 2 key heads and room for 512 keys
        >>> lengths = torch.tensor([0, 7, 31, 500], dtype=torch.int32)
        >>> q, k_new, v_new = torch.randn(4, 8, 1, 64), torch.randn(4, 2, 1, 64), torch.randn(4, 2, 1, 64)
        >>> out = flash_attn_ext.attention_with_kvcache(
        ...     q, k_cache, v_cache, k_new=k_new, v_new=v_new, cache_seqlens=lengths
        ... )
        >>> out.shape, torch.equal(k_cache[1, :, 7], k_new[1, :, 0])
        (torch.Size([4, 8, 1, 64]), True)
        >>> out, max_logit = flash_attn_ext.attention_with_kvcache(
        ...     q, k_cache, v_cache, cache_seqlens=lengths + 1, return_max_logit="row"
        ... )
        >>> max_logit.shape
        torch.Size([4, 8, 1])
    """
    if isinstance(intervals, Intervals):
        intervals = intervals.tensor
    if not is_compiling():
        # fmt: off
        results = _C.direct_attention_with_kvcache(
            q, k_cache, v_cache, k_new, v_new, cache_seqlens, block_table, cache_batch_idx, rotary_cos, rotary_sin,
            rotary_interleaved, causal, window, bias, mask, intervals, alibi_slopes, softcap, sink, scale, layout,
            return_lse, return_max_logit, backend,
        )
        # fmt: on
        if results is not None:
            return results
    of_cache = (k_new, v_new, cache_seqlens, block_table, cache_batch_idx, rotary_cos, rotary_sin)
    if asked := operands_to_ask(q, k_cache, v_cache, *of_cache, bias, mask, intervals, alibi_slopes, sink):
        # fmt: off
        theirs: Tensor | tuple[Tensor, ...] = handle_torch_function(
            attention_with_kvcache, asked, q, k_cache, v_cache, k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens,
            block_table=block_table, cache_batch_idx=cache_batch_idx, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved, causal=causal, window=window, bias=bias, mask=mask,
            intervals=intervals, alibi_slopes=alibi_slopes, softcap=softcap, sink=sink, scale=scale, layout=layout,
            return_lse=return_lse, return_max_logit=return_max_logit, backend=backend,
        )
        # fmt: on
        return theirs
    return_lse, max_logit = check_flag("return_lse", return_lse), check_max_logit(return_max_logit)
    rotary_interleaved = check_flag("rotary_interleaved", rotary_interleaved)
    # fmt: off
    problem = problem_of(
        q=q, k=k_cache, v=v_cache, bias=bias, mask=mask, intervals=intervals, alibi_slopes=alibi_slopes, sink=sink,
        causal=causal, window=window, softcap=softcap, dropout_p=0.0, scale=scale, backend=backend, allow_tf32=False,
        wants_row_max=max_logit is not None,
    )
    # fmt: on
    operands = operands_of(q, k_cache, v_cache)
    if operands < PLAIN:
        require_tensors(tuple(_NAMES.values()), (q, k_cache, v_cache))
    if bias is not None or mask is not None or intervals is not None:
        problem = _with_four_dimensional_tables(problem)
    if is_sequence_first(layout):
        q, k_cache, v_cache = map(_heads_first, _NAMES.values(), (q, k_cache, v_cache))
        k_new = None if k_new is None else _heads_first("k_new", k_new)
        v_new = None if v_new is None else _heads_first("v_new", v_new)
        problem = problem._replace(q=q, k=k_cache, v=v_cache, sequence_first=True)
    lengths: Any = cache_seqlens  # a number becomes a tensor once the shapes are known
    cache = KvCache(lengths, k_new, v_new, block_table, cache_batch_idx, rotary_cos, rotary_sin, rotary_interleaved)
    require_tensors(cache._fields[1:-1], cache[1:-1], num_required=0)
    if not isinstance(cache_seqlens, Tensor):
        cache = cache._replace(cache_seqlens=_equal_lengths(problem, cache))
    out, lse, row_max = _attend(problem, cache, operands)
    if problem.sequence_first:
        out = out.transpose(1, 2)
    return results_of((out, lse, row_max), return_lse, max_logit)


def _attend(problem: Problem, cache: KvCache, operands: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Plain tensors go straight to the extension, and those without values of their own through its operator."""
    if operands >= PLAIN:
        return _C.attention_with_kvcache(problem, cache)
    if operands != SYMBOLIC:
        raise RuntimeError(
            "attention_with_kvcache has no derivative and no batching rule, so it does not go under torch.func "
            "transforms or forward mode; use flash_attn_ext.attention there"
        )
    if torch.is_grad_enabled():
        _refuse_gradients(problem, cache)
    for name, tensor in (("k_cache", problem.k), ("v_cache", problem.v)):
        if not is_compiling() and tensor.is_neg():
            raise RuntimeError(
                f"{name} is a view that PyTorch computes lazily, so its values are not in memory; pass {name}.clone()"
            )
    results: tuple[Tensor, Tensor, Tensor] = torch.ops.flash_attn_ext.attention_with_kvcache(*problem, *cache)
    return results


def _refuse_gradients(problem: Problem, cache: KvCache) -> None:
    """Raises the error that csrc/host/cache/kv_cache_checks.cpp raises for tensors that hold memory."""
    given = {_NAMES.get(name, name): getattr(problem, name) for name in DIFFERENTIABLE} | cache._asdict()
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{name} requires grad, but attention_with_kvcache has no backward pass; call it under torch.no_grad() "
                f"or with {name}.detach(), or use flash_attn_ext.attention"
            )


def _with_four_dimensional_tables(problem: Problem) -> Problem:
    require_tensors(("bias", "mask", "intervals"), (problem.bias, problem.mask, problem.intervals), num_required=0)
    full = "(batch, heads, queries, capacity)"
    return problem._replace(
        bias=four_dimensional("bias", problem.bias, full),
        mask=four_dimensional("mask", problem.mask, full),
        intervals=four_dimensional("intervals", problem.intervals, "(batch, heads, queries, 2 n)"),
    )


def _heads_first(name: str, tensor: Tensor) -> Tensor:
    require_tensors((name,), (tensor,))
    if tensor.dim() != 4:
        raise RuntimeError(
            f"{name} has shape {tuple(tensor.shape)}, expected 4 dimensions: (batch, sequence, heads, head dim), or of "
            "a cache in pages (pages, page size, heads, head dim)"
        )
    return tensor.transpose(1, 2)


def _equal_lengths(problem: Problem, cache: KvCache) -> Tensor:
    """One length for all sequences as a tensor. Its value can be checked here, whatever the device."""
    length = check_integer("cache_seqlens", cache.cache_seqlens, "be an int32 tensor of shape (batch,) or an int")
    if length is None:
        raise TypeError("cache_seqlens must be an int32 tensor of shape (batch,) or an int, got None")
    ranks = {problem.q.dim(), problem.k.dim(), 4 if cache.k_new is None else cache.k_new.dim()}
    if ranks != {4} or (cache.block_table is not None and cache.block_table.dim() != 2):
        return torch.zeros(problem.q.shape[:1], dtype=torch.int32, device=problem.q.device)  # C++ refuses the ranks
    pages = 1 if cache.block_table is None else cache.block_table.size(1)
    num_new = 0 if cache.k_new is None else cache.k_new.size(2)
    highest = pages * problem.k.size(2) - num_new
    if not 0 <= length <= highest:
        raise ValueError(
            f"cache_seqlens is {length}, expected 0 to {highest}: the cache has room for {highest + num_new} keys of a "
            f"sequence, and k_new has {num_new}; cache_seqlens counts the keys from before this call"
        )
    return torch.full((problem.q.size(0),), length, dtype=torch.int32, device=problem.q.device)
