"""The mask function that transformers calls once for each pattern of a forward pass.

Causality and windows become numbers, padding a row of flags for each sequence, packed sequences their cumulative
lengths (mask_form.py). Any other mask becomes intervals of keys (composed.py), or a boolean mask if some query needs
more than four.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext.integrations.transformers.composed import intervals_of
from flash_attn_ext.integrations.transformers.mask_form import (
    CAUSAL,
    CAUSAL_PREFIX,
    CAUSAL_WINDOW,
    KEYS,
    WINDOW,
    flags_form,
    intervals_form,
    packed_form,
)
from flash_attn_ext.integrations.transformers.own_attention import refuse_own_attention
from flash_attn_ext.integrations.transformers.patterns import (
    Pattern,
    builders_of,
    parts_of,
    pattern_of,
    traced_pattern,
)
from flash_attn_ext.integrations.transformers.private_names import (
    OR_MASKS,
    PACKED,
    causal_mask_function,
    is_tracing,
    position_ids_of_the_caller,
    reads_its_mask,
)
from flash_attn_ext.integrations.transformers.requests import Request, dense, kept_keys, kept_queries
from flash_attn_ext.integrations.transformers.sequences import (
    Made,
    Question,
    mark_as_made_here,
    packing_of,
    speak_of_tokens,
)
from flash_attn_ext.masks.intervals import MAX_INTERVALS

_LOGGER = logging.getLogger("flash_attn_ext")
_said: set[str] = set()


def fused_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: object,
) -> Tensor | None:
    """A mask function of transformers' AttentionMaskInterface, which documents the arguments. Returns None where every
    query sees every key, and else one of the forms of mask_form.py."""
    request = Request(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device, use_vmap
    )
    position_ids = None
    may_skip = allow_is_causal_skip if allow_is_bidirectional_skip is None else allow_is_bidirectional_skip
    if is_compiling():
        can_be_packed = attention_mask is None and isinstance(q_offset, int) and q_length == kv_length
        is_bidirectional = allow_is_bidirectional_skip is not None
        pattern = None
        if not use_vmap:  # the user's own function
            pattern = traced_pattern(mask_function, local_size, is_bidirectional, can_be_packed, config)
        is_apart = False
        is_overlaid = pattern is None or pattern.is_packed
    else:
        refuse_own_attention(type(config))
        pattern = pattern_of(mask_function)
        position_ids = position_ids_of_the_caller(1)
        builders = builders_of(mask_function)
        is_apart = PACKED in builders
        is_overlaid = use_vmap or is_apart or OR_MASKS in builders
    if pattern is not None and pattern.is_packed and _is_plain_packing(request, pattern):
        return _packed(request, pattern)
    if pattern is not None and pattern.is_packed:
        pattern = None
    # transformers forbids to skip a mask with an overlay, and the mask of one query over a static cache, for which a
    # boolean row is as good. Of any other, it is the model that reads it.
    is_read = reads_its_mask(config) or not (may_skip or is_overlaid)
    return _made(request, None if is_read else pattern, position_ids, is_read, is_apart)


def _is_causal(pattern: Pattern | None) -> bool:
    return pattern is not None and pattern.right == 0


def _is_plain_packing(request: Request, pattern: Pattern) -> bool:
    """Whether the packed form describes the sequences: causal, with neither padding nor a cache, and found by
    transformers, so each sequence is contiguous. One query is no packed sequence."""
    is_whole = 1 < request.q_length == request.kv_length and request.padding is None
    return _is_causal(pattern) and is_whole and not request.use_vmap


def _made(
    request: Request, pattern: Pattern | None, position_ids: Tensor | None, is_read: bool, is_apart: bool
) -> Tensor | None:
    """``pattern``: None where it has no form of its own. ``is_read``: whether the model needs a boolean mask.
    ``is_apart``: whether the mask function itself keeps packed sequences apart."""
    if not speak_of_tokens(position_ids, request.batch_size, request.q_length) or is_tracing(position_ids):
        position_ids = None
    keep = kept_queries(request)
    if position_ids is not None and not is_apart:
        request = request._replace(q_offset=int(request.q_offset))
        num_cached = request.q_offset - request.kv_offset
        question = Question(_is_causal(pattern), pattern is None, num_cached, request.batch_size)
        packing = packing_of(position_ids, keep, question)
        if packing is not None:
            assert pattern is not None  # else the question is about a boolean mask, and packing_of raises
            return packed_form(*packing, pattern.left)
    mask: Tensor | None
    if pattern is None:
        mask = dense(request) if is_read else _composed(request)
    elif _is_causal(pattern):
        mask = _causal(request, pattern.left)
    else:
        mask = _bidirectional(request, pattern.left) if pattern.left == pattern.right else _composed(request)
    if mask is not None and request.q_length > 1:
        mark_as_made_here(mask, Made(keep, position_ids, request.kv_length))
    return mask


def _causal(request: Request, left: int | None) -> Tensor | None:
    """The last query sees the last key that is filled. No query sees the keys of a static cache after that one."""
    offset = request.q_offset
    if isinstance(offset, Tensor):
        # The length of a static cache is on the GPU. One query needs one row, which is computed there without waiting.
        if request.q_length == 1:
            return _dense_row(request)
        if is_tracing(offset):
            return dense(request)
        offset = int(offset)
    num_keys = offset + request.q_length - request.kv_offset
    if left is not None and left >= num_keys - 1:
        left = None
    is_whole = num_keys == request.kv_length
    if not 0 < num_keys <= request.kv_length or (left is not None and not is_whole and request.q_length > 1):
        return _composed(request)
    if request.q_length == 1:
        return _padding_row(request, num_keys) if is_whole and left is None else _dense_row(request)
    keep = kept_keys(request, num_keys)
    if left is not None:
        return flags_form(CAUSAL_WINDOW, num_keys, keep, request.device, left)
    if is_whole:
        return flags_form(CAUSAL, num_keys, keep, request.device)
    return flags_form(CAUSAL_PREFIX, request.kv_length, keep, request.device, request.kv_length - num_keys)


def _bidirectional(request: Request, left: int | None) -> Tensor | None:
    num_keys = request.kv_length
    if left is None:
        return _padding_row(request, num_keys)
    if isinstance(request.q_offset, Tensor):
        return _composed(request)
    ahead = request.q_offset - request.kv_offset  # of the first query's position before the first key's
    if left >= max(ahead + request.q_length, num_keys - ahead) - 1:
        # Without a mask the layer would go by its own window, which may be one key narrower.
        return flags_form(KEYS, num_keys, kept_keys(request, num_keys), request.device)
    if request.q_length != num_keys or ahead != 0:
        return _composed(request)
    return flags_form(WINDOW, num_keys, kept_keys(request, num_keys), request.device, left)


def _packed(request: Request, pattern: Pattern) -> Tensor:
    """The packed form. A token begins a sequence if it does not see the one before it."""
    tokens = request.batch_size * request.q_length
    index = torch.arange(request.q_length, device=request.device)
    batch_idx = torch.arange(request.batch_size, device=request.device)[:, None]
    sees_previous = request.mask_function(batch_idx, index.new_zeros(()), index[None, 1:], index[None, :-1])
    begins = torch.nn.functional.pad(~sees_previous.expand(request.batch_size, -1), (1, 0), value=True)
    sequence = begins.flatten().cumsum(0) - 1
    # There may be as many sequences as tokens. In traces they cannot be counted, and the last ones stay empty.
    cu_seqlens = torch.full((tokens + 1,), tokens, dtype=torch.int32, device=request.device)
    positions = torch.arange(tokens, dtype=torch.int32, device=request.device)
    cu_seqlens = cu_seqlens.scatter_reduce(0, sequence, positions, "amin")
    longest = request.q_length
    if not is_tracing(cu_seqlens):
        last, longest = torch.stack([sequence[-1], cu_seqlens.diff().max()]).tolist()
        cu_seqlens = cu_seqlens[: last + 2]
    left = pattern.left if pattern.left is not None and pattern.left < longest - 1 else None
    return packed_form(cu_seqlens, longest, left)


def _composed(request: Request) -> Tensor:
    """Intervals, or a boolean mask where they are too many, cannot be counted in a trace, or take as many numbers as
    there are keys, and for one query."""
    if request.q_length > 1 and not is_compiling() and not is_tracing(torch.empty(0, device=request.device)):
        intervals = intervals_of(request)
        if intervals is None:
            _say_once(request)
        form = None if intervals is None else intervals_form(intervals, request.kv_length)
        if form is not None:
            return form
    return dense(request)


def _row(keep: Tensor) -> Tensor:
    return flags_form(KEYS, keep.shape[1], keep, keep.device)


def _padding_row(request: Request, num_keys: int) -> Tensor | None:
    keep = kept_keys(request, num_keys)
    return None if keep is None else _row(keep)


def _dense_row(request: Request) -> Tensor:
    """The row of keys that the only query sees."""
    return _row(dense(request).flatten(0, 2))


def _names(function: Any) -> list[str]:
    """The names of the functions from which transformers composed a mask."""
    parts = parts_of(function)
    if parts:
        return [name for part in parts for name in _names(part)]
    return [getattr(function, "__qualname__", type(function).__name__)]


def _say_once(request: Request) -> None:
    name = " and ".join(_names(request.mask_function))
    if name in _said:
        return
    _said.add(name)
    shape = (request.batch_size, 1, request.q_length, request.kv_length)
    _LOGGER.warning(
        "transformers: a query of the mask that %s make needs more than %d intervals of keys, so it is held as a "
        "boolean mask of shape %s (%.1f MiB)",
        name,
        MAX_INTERVALS,
        shape,
        math.prod(shape) / 2**20,
    )
