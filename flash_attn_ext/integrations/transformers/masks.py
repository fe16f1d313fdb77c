"""The mask function that transformers calls once for each pattern of a forward pass.

Causality and windows become intervals, padding a row of flags for each sequence, packed sequences their cumulative
lengths (mask_form.py). Only what is none of these becomes a boolean mask of (queries, keys).
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext.integrations.transformers.mask_form import (
    CAUSAL,
    CAUSAL_WINDOW,
    KEYS,
    WINDOW,
    flags_form,
    packed_form,
)
from flash_attn_ext.integrations.transformers.own_attention import refuse_own_attention
from flash_attn_ext.integrations.transformers.patterns import Pattern, pattern_of, traced_pattern
from flash_attn_ext.integrations.transformers.private_names import (
    causal_mask_function,
    is_tracing,
    position_ids_of_the_caller,
    sdpa_mask,
)
from flash_attn_ext.integrations.transformers.sequences import (
    Question,
    mark_as_made_here,
    packing_of,
    speak_of_tokens,
)

_LOGGER = logging.getLogger("flash_attn_ext")
_said: set[str] = set()


class Request(NamedTuple):
    """A mask that transformers asks for: query i is token q_offset + i, and key j is token kv_offset + j."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any  # int or Tensor
    kv_offset: int
    mask_function: Any
    padding: Tensor | None  # (batch, tokens) bool, False where a token is padding
    device: torch.device | str
    use_vmap: bool


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
    if is_compiling():
        can_be_packed = attention_mask is None and isinstance(q_offset, int) and q_length == kv_length
        is_bidirectional = allow_is_bidirectional_skip is not None
        pattern = None
        if not use_vmap:  # the user's own function
            pattern = traced_pattern(mask_function, local_size, is_bidirectional, can_be_packed, config)
    else:
        refuse_own_attention(type(config))
        pattern = pattern_of(mask_function)
        position_ids = position_ids_of_the_caller(1)
    if pattern is not None and pattern.is_remapped and not pattern.is_packed:
        pattern = None
    if pattern is not None and pattern.is_packed:
        return _packed(request, pattern)
    may_skip = allow_is_causal_skip if _is_causal(pattern) else allow_is_bidirectional_skip is not False
    if pattern is None:
        _say_once(request)
    elif q_length > 1 and not may_skip:  # the model itself reads the mask
        pattern = None
    return _made(request, pattern, position_ids)


def _is_causal(pattern: Pattern | None) -> bool:
    return pattern is not None and pattern.right == 0


def _made(request: Request, pattern: Pattern | None, position_ids: Tensor | None) -> Tensor | None:
    """The form of a pattern that needs no boolean mask; None if it needs one."""
    if not speak_of_tokens(position_ids, request.batch_size, request.q_length) or is_tracing(position_ids):
        position_ids = None
    keep = _queries_kept(request)
    if position_ids is not None:
        request = request._replace(q_offset=int(request.q_offset))
        num_cached = request.q_offset - request.kv_offset
        question = Question(_is_causal(pattern), pattern is None, num_cached, request.batch_size)
        packing = packing_of(position_ids, keep, question)
        if packing is not None:
            assert pattern is not None  # else the question is about a boolean mask, and packing_of raises
            return packed_form(*packing, pattern.left)
    mask: Tensor | None
    if pattern is None:
        mask = _dense(request)
    elif _is_causal(pattern):
        mask = _causal(request, pattern.left)
    else:
        mask = _bidirectional(request, pattern.left) if pattern.left == pattern.right else _dense(request)
    if mask is not None and request.q_length > 1:
        mark_as_made_here(mask, keep, position_ids)
    return mask


def _causal(request: Request, left: int | None) -> Tensor | None:
    """The last query sees the last key that is filled. No query sees the keys of a static cache after that one."""
    offset = request.q_offset
    if isinstance(offset, Tensor):
        # The length of a static cache is on the GPU. One query needs one row, which is computed there without waiting.
        if request.q_length == 1:
            return _dense_row(request)
        if is_tracing(offset):
            return _dense(request)
        offset = int(offset)
    num_keys = offset + request.q_length - request.kv_offset
    if left is not None and left >= num_keys - 1:
        left = None
    is_whole = num_keys == request.kv_length
    if not 0 < num_keys <= request.kv_length or (left is not None and not is_whole and request.q_length > 1):
        return _dense(request)
    if request.q_length == 1:
        return _padding_row(request, num_keys) if is_whole and left is None else _dense_row(request)
    kind = CAUSAL if left is None else CAUSAL_WINDOW
    return flags_form(kind, num_keys, _keep(request, num_keys), request.device, left or 0)


def _bidirectional(request: Request, left: int | None) -> Tensor | None:
    num_keys = request.kv_length
    if left is None:
        return _padding_row(request, num_keys)
    if isinstance(request.q_offset, Tensor):
        return _dense(request)
    ahead = request.q_offset - request.kv_offset  # of the first query's position before the first key's
    if left >= max(ahead + request.q_length, num_keys - ahead) - 1:
        return _padding_row(request, num_keys)
    if request.q_length != num_keys or ahead != 0:
        return _dense(request)
    return flags_form(WINDOW, num_keys, _keep(request, num_keys), request.device, left)


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


def _keep(request: Request, num_keys: int) -> Tensor | None:
    """(batch, num_keys) bool, or None if no key is padding. On a GPU, single tokens are not checked for that, because a
    loop of them would wait."""
    if request.padding is None:
        return None
    end = request.kv_offset + num_keys
    keep = request.padding[:, request.kv_offset : end]
    if keep.shape[1] < num_keys:
        keep = torch.nn.functional.pad(keep, (0, num_keys - keep.shape[1]))
    may_read = not is_tracing(keep) and (keep.device.type == "cpu" or request.q_length > 1)
    return None if may_read and bool(keep.all()) else keep


def _row(keep: Tensor) -> Tensor:
    return flags_form(KEYS, keep.shape[1], keep, keep.device)


def _padding_row(request: Request, num_keys: int) -> Tensor | None:
    keep = _keep(request, num_keys)
    return None if keep is None else _row(keep)


def _dense_row(request: Request) -> Tensor:
    """The row of keys that the only query sees."""
    return _row(_dense(request).flatten(0, 2))


def _dense(request: Request) -> Tensor:
    """A boolean mask, by transformers' own function."""
    mask: Tensor | None = sdpa_mask(
        batch_size=request.batch_size,
        q_length=request.q_length,
        kv_length=request.kv_length,
        q_offset=request.q_offset,
        kv_offset=request.kv_offset,
        mask_function=request.mask_function,
        attention_mask=request.padding,
        allow_is_causal_skip=False,
        use_vmap=request.use_vmap,
        device=request.device,
    )
    assert mask is not None  # allow_is_causal_skip
    return mask


def _queries_kept(request: Request) -> Tensor | None:
    """(batch, q_length) bool, False where a query is padding; None if none is, or there is one query."""
    if request.padding is None or request.q_length == 1:
        return None
    index = torch.arange(request.q_length, device=request.padding.device) + request.q_offset
    missing = request.kv_offset + request.kv_length - request.padding.shape[1]
    return torch.nn.functional.pad(request.padding, (0, max(missing, 0)))[:, index]


def _say_once(request: Request) -> None:
    if is_compiling() or request.q_length == 1:
        return
    name = getattr(request.mask_function, "__qualname__", type(request.mask_function).__name__)
    if name in _said:
        return
    _said.add(name)
    shape = (request.batch_size, 1, request.q_length, request.kv_length)
    _LOGGER.warning(
        "transformers: a mask is made by %s, which is not causality, a window, padding or packed sequences alone, so "
        "it is held as a boolean mask of shape %s (%.1f MiB)",
        name,
        shape,
        math.prod(shape) / 2**20,
    )
