"""Masks of other libraries as intervals. All but ``from_cudnn`` have a number of intervals that depends on values, so
they wait for a GPU.

A mask of which only pairs are known is evaluated a block of rows at a time, so memory stays linear in its length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext.masks.intervals import MAX_INTERVALS, Intervals, check_needed, count, from_bounds, integers, merge

BLOCK_PAIRS = 2**24  # (query, key) pairs that are evaluated at a time
# MagiAttention's numbers of the masks inside a slice: whether the diagonal bounds the end, and the begin.
_MAGI_TYPES = {0: (False, False), 1: (True, False), 2: (False, True), 3: (True, True)}


def from_mask(mask: Tensor) -> Intervals:
    """The intervals of a boolean mask. Waits for a GPU.

    Beside the mask itself, memory is that of the intervals and of a block of rows.

    Args:
        mask: bool, True = seen, with up to two leading dimensions: (batch or 1, heads or 1, queries, keys).

    Returns:
        (batch or 1, heads or 1, queries, 2n), with the smallest n that holds every row.

    Raises:
        ValueError: a row needs more than four intervals; the message names it and the number.
        TypeError: ``mask`` is no tensor. RuntimeError: its dtype or shape.

    Example:
        >>> mask = torch.tensor([[True, False, True, True], [False, False, False, False]])
        >>> flash_attn_ext.masks.from_mask(mask).tensor
        tensor([[[[0, 1, 2, 4],
                  [0, 0, 0, 0]]]], dtype=torch.int32)
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a bool tensor (..., queries, keys), got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise RuntimeError(f"mask must be bool, True = seen, got {mask.dtype}: pass mask.bool()")
    if mask.dim() not in (2, 3, 4):
        raise RuntimeError(f"mask must be (batch or 1, heads or 1, queries, keys), got {tuple(mask.shape)}")
    table = mask[(None,) * (4 - mask.dim())]
    return by_blocks(lambda begin, end: table[:, :, begin:end], tuple(table.shape), mask.device)


def from_mask_mod(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    *,
    device: torch.device | str | None = None,
) -> Intervals:
    """The intervals of a ``mask_mod`` of FlexAttention, evaluated on the device in blocks of rows. Waits for a GPU.

    Every pair is evaluated once, so make the intervals once for a mask that stays the same.

    Args:
        mask_mod: takes ``(b, h, i, j)``, integer tensors without dimensions, and returns a bool tensor, True = seen.
        batch, heads: what the mask depends on; 1 where it does not.
        queries, keys: how many there are.
        device: where ``mask_mod`` is evaluated; by default PyTorch's default device.

    Returns:
        (batch, heads, queries, 2n), with the smallest n that holds every row.

    Raises:
        ValueError: a row needs more than four intervals; the message names it and the number. A size is negative, or
            ``batch`` or ``heads`` is 0. TypeError: a size is no int. RuntimeError: ``mask_mod`` returns another dtype
            than bool. And what ``mask_mod`` itself raises.

    Example:
        >>> window = flash_attn_ext.masks.from_mask_mod(lambda b, h, i, j: (i - j).abs() <= 1, 1, 1, 3, 3)
        >>> window.tensor[0, 0].tolist()
        [[0, 2], [0, 3], [1, 3]]
    """
    batch, heads = count("batch", batch, least=1), count("heads", heads, least=1)
    shape = batch, heads, count("queries", queries), count("keys", keys)
    device = torch.empty(0, device=device).device

    def evaluate(begin: int, end: int) -> Tensor:
        def of_block(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mask_mod(b, h, i + begin, j)

        return seen_of_mod(of_block, batch, heads, end - begin, keys, device)

    return by_blocks(evaluate, shape, device)


def seen_of_mod(
    mask_mod: Callable[..., Tensor], batch: int, heads: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """bool (batch, heads, queries, keys): what FlexAttention's ``mask_mod`` says of each pair."""
    from torch.nn.attention.flex_attention import create_mask  # here, since it imports the compiler

    seen = create_mask(mask_mod, batch, heads, queries, keys, str(device))
    if seen.dtype != torch.bool:
        raise RuntimeError(
            f"mask_mod returns {seen.dtype}, expected torch.bool, True where the query sees the key: return a "
            "comparison, or pass the result through .bool()"
        )
    return seen


def from_flashmask(startend_row_indices: Tensor, *, causal: bool) -> Intervals:
    """The intervals of FlashMask's ``startend_row_indices``, which hide rows of each key. Waits for a GPU.

    Key j is hidden from the queries of a range of rows, or of two. The numbers of the last dimension are these rows:

    - one, with ``causal``: hidden from it on;
    - two, with ``causal``: hidden from the first to before the second;
    - two, without: hidden from the first on, and before the second;
    - four, without: hidden from the first to before the second, and from the third to before the fourth.

    With ``causal`` query i also sees no key behind i. There are as many queries as keys.

    Args:
        startend_row_indices: integers, (batch or 1, heads or 1, keys, 1, 2 or 4). Its heads are those of keys: with
            grouped heads, repeat each for its queries' heads (``repeat_interleave``).
        causal: what was given to FlashMask beside it.

    Returns:
        (batch or 1, heads or 1, queries, 2n), with the smallest n that holds every row.

    Raises:
        ValueError: a row needs more than four intervals; the message names it and the number.
        TypeError: no tensor, or ``causal`` no bool. RuntimeError: dtype or shape.

    Example:
        >>> ends_of_documents = torch.tensor([2, 2, 4, 4])[None, None, :, None]
        >>> flash_attn_ext.masks.from_flashmask(ends_of_documents, causal=True).tensor[0, 0].tolist()
        [[0, 1], [0, 2], [2, 3], [2, 4]]
    """
    name, sizes = "startend_row_indices", (1, 2) if causal else (2, 4)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r} of type {type(causal).__name__}")
    shapes = f"(batch or 1, heads or 1, keys, {sizes[0]} or {sizes[1]}) with causal={causal}"
    table = integers(name, startend_row_indices, shapes, lambda dims: dims == 4)
    if table.shape[-1] not in sizes:
        raise RuntimeError(f"{name} must be {shapes}, got {tuple(table.shape)}")
    batch, heads, keys, size = table.shape
    bounds = table[..., None, :].unbind(-1)  # each (batch, heads, keys, 1)
    if size == 1 or (size == 2 and not causal):
        hidden = [(bounds[0], None), *([] if causal else [(None, bounds[1])])]
    else:
        hidden = list(zip(bounds[0::2], bounds[1::2], strict=True))
    key = torch.arange(keys, device=table.device)[:, None]

    def evaluate(begin: int, end: int) -> Tensor:
        query = torch.arange(begin, end, device=table.device)
        seen = (key <= query).expand(batch, heads, keys, -1) if causal else query.new_ones((), dtype=torch.bool)
        for first, stop in hidden:
            is_hidden = (True if first is None else query >= first) & (True if stop is None else query < stop)
            seen = seen & ~is_hidden
        return seen.mT

    return by_blocks(evaluate, (batch, heads, keys, keys), table.device)


def from_cudnn(mask_func: Tensor, *, batch: int | None = None) -> Intervals:
    """The intervals of the tensor that ``cudnn.flex_attention`` takes: [0, F0), [F1, F2), [F3, F4), ...

    Args:
        mask_func: integers, (heads or 1, an odd number of bounds, queries of all sequences one after the other).
        batch: number of sequences of equal length. None for packed sequences.

    Returns:
        (batch, heads or 1, queries, 2n), or without ``batch`` (heads or 1, tokens, 2n). Up to seven bounds, n is what
        they hold. With more it is the smallest that holds every row, which waits for a GPU.

    Raises:
        ValueError: a row needs more than four intervals; the message names it and the number. ``batch`` is below 1.
        TypeError: ``mask_func`` is no tensor, or ``batch`` no int. RuntimeError: dtype or shape.

    Example:
        >>> bounds = torch.tensor([[1, 1], [2, 0], [4, 0]])[None]  # of two queries
        >>> flash_attn_ext.masks.from_cudnn(bounds, batch=1).tensor
        tensor([[[[0, 1, 2, 4],
                  [0, 1, 1, 1]]]], dtype=torch.int32)
    """
    shapes = "(heads or 1, an odd number of bounds, queries)"
    bounds = integers("mask_func", mask_func, shapes, lambda dims: dims == 3)
    if bounds.shape[1] % 2 == 0:
        raise RuntimeError(f"mask_func must be {shapes}, got {tuple(bounds.shape)}")
    bounds = torch.cat([torch.zeros_like(bounds[:, :1]), bounds], 1).mT
    if batch is not None:
        batch = count("batch", batch, least=1)
        if bounds.shape[1] % batch:
            raise RuntimeError(f"mask_func has {bounds.shape[1]} queries, which do not divide into batch={batch}")
        bounds = bounds.unflatten(1, (batch, bounds.shape[1] // batch)).transpose(0, 1)
    merged = merge(bounds[..., 0::2], bounds[..., 1::2])
    return from_bounds(*merged, at_most=bounds.shape[-1] // 2)


def from_magi(
    q_ranges: Tensor, k_ranges: Tensor, attn_type_map: Tensor | None = None, *, queries: int, keys: int
) -> Intervals:
    """The intervals of MagiAttention's slices. Waits for a GPU.

    Slice s lets the queries of ``q_ranges[s]`` see the keys of ``k_ranges[s]``, both [begin, end). A query sees what
    any slice lets it see. ``attn_type_map[s]`` is 0 for all these pairs, 1 for causal with the last query at the last
    key, 2 for the inverse of causal (from the diagonal on) with the first query at the first key, 3 for both.

    Args:
        q_ranges, k_ranges: integers, (slices, 2).
        attn_type_map: integers, (slices,), of 0 to 3. By default 0.
        queries, keys: how many there are.

    Returns:
        (1, 1, queries, 2n), with the smallest n that holds every row.

    Raises:
        ValueError: a row needs more than four intervals; the message names it and the number. A range begins before 0,
            or ends behind the last query or key or before it begins; an ``attn_type_map`` of another number.
        TypeError: an argument of the wrong type. RuntimeError: dtypes or shapes.

    Example:
        >>> ranges = torch.tensor([[0, 2], [2, 4]])
        >>> seen = flash_attn_ext.masks.from_magi(ranges, ranges, torch.tensor([0, 1]), queries=4, keys=4)
        >>> seen.tensor[0, 0].tolist()
        [[0, 2], [0, 2], [2, 3], [2, 4]]
    """
    queries, keys = count("queries", queries), count("keys", keys)
    q_ranges = _ranges("q_ranges", q_ranges, queries)
    k_ranges = _ranges("k_ranges", k_ranges, keys)
    if attn_type_map is None:
        attn_type_map = q_ranges.new_zeros(len(q_ranges))
    types = integers("attn_type_map", attn_type_map, "(slices,)", lambda dims: dims == 1)
    if not len(q_ranges) == len(k_ranges) == len(types):
        raise RuntimeError(
            "q_ranges, k_ranges and attn_type_map must be of the same slices, got "
            f"{len(q_ranges)}, {len(k_ranges)} and {len(types)}"
        )
    if bool(((types < 0) | (types > 3)).any()):
        raise ValueError(f"attn_type_map must be 0 (full), 1 (causal), 2 (inverse) or 3 (both), got {types.tolist()}")
    # One entry for each query of each slice.
    lengths = q_ranges[:, 1] - q_ranges[:, 0]
    slices = torch.repeat_interleave(torch.arange(len(types), device=types.device), lengths)
    within = torch.arange(len(slices), device=types.device) - (lengths.cumsum(0) - lengths)[slices]
    begin, end = k_ranges[slices].unbind(1)
    ends_at_diagonal, begins_at_diagonal = (
        torch.tensor([kind[side] for kind in _MAGI_TYPES.values()], device=types.device)[types[slices]]
        for side in (0, 1)
    )
    end = torch.where(ends_at_diagonal, end - (lengths[slices] - 1 - within), end)
    begin = torch.where(begins_at_diagonal, begin + within, begin)
    return _of_entries(q_ranges[slices, 0] + within, begin, end, queries, keys)


def _ranges(name: str, value: Any, size: int) -> Tensor:
    ranges = integers(name, value, "(slices, 2)", lambda dims: dims == 2)
    if ranges.shape[1] != 2:
        raise RuntimeError(f"{name} must be (slices, 2), got {tuple(ranges.shape)}")
    begin, end = ranges.unbind(1)
    is_wrong = (begin < 0) | (begin > end) | (end > size)
    if bool(is_wrong.any()):
        wrong = int(is_wrong.nonzero()[0, 0])
        raise ValueError(f"{name}[{wrong}] must be [begin, end) inside 0 to {size}, got {ranges[wrong].tolist()}")
    return ranges


def _of_entries(rows: Tensor, begin: Tensor, end: Tensor, queries: int, keys: int) -> Intervals:
    """Of intervals in any order, any number of them in a row.

    The rows are laid behind each other on one line, a key apart, so that intervals of two rows neither overlap nor
    touch, and one sort merges those of all rows.
    """
    is_there = begin < end
    rows, begin, end = rows[is_there], begin[is_there], end[is_there]
    begin, order = (rows * (keys + 1) + begin).sort()
    reach = (rows * (keys + 1) + end)[order].cummax(0).values
    is_first = torch.ones_like(begin, dtype=torch.bool)
    is_first[1:] = begin[1:] > reach[:-1]
    is_last = torch.ones_like(is_first)
    is_last[:-1] = is_first[1:]
    begin, end = begin[is_first], reach[is_last]
    row = begin // (keys + 1)
    line = torch.stack([begin, end], 1) - row[:, None] * (keys + 1)
    firsts = torch.searchsorted(row, torch.arange(queries + 1, device=row.device))
    needed = firsts.diff()
    most = check_needed(needed)
    bounds = _rows_of_lists(line, needed, most)
    return Intervals(bounds[None, None])


def _rows_of_lists(lists: Tensor, needed: Tensor, most: int) -> Tensor:
    """(rows, 2 * most) int32 of the intervals (all, 2) of rows one after the other, of which each has ``needed``."""
    row = torch.repeat_interleave(torch.arange(len(needed), device=lists.device), needed)
    rank = torch.arange(len(row), device=lists.device) - (needed.cumsum(0) - needed)[row]
    bounds = torch.zeros(len(needed), most, 2, dtype=torch.int32, device=lists.device)
    bounds[row, rank] = lists.to(torch.int32)
    last_end = bounds.amax((1, 2))[:, None, None]
    is_behind = torch.arange(most, device=lists.device)[:, None] >= needed[:, None, None]
    return torch.where(is_behind, last_end, bounds).flatten(1)


def by_blocks(evaluate: Callable[[int, int], Tensor], shape: tuple[int, ...], device: torch.device) -> Intervals:
    """Of a mask (batch, heads, queries, keys), of which ``evaluate(begin, end)`` has the rows of these queries."""
    batch, heads, queries, keys = shape
    table = torch.zeros(batch, heads, queries, 2 * MAX_INTERVALS, dtype=torch.int32, device=device)
    step = max(1, BLOCK_PAIRS // max(1, batch * heads * keys))
    most = 1
    for begin in range(0, queries if table.numel() and keys else 0, step):
        end = min(begin + step, queries)
        seen = torch.nn.functional.pad(evaluate(begin, end).expand(batch, heads, end - begin, keys), (1, 1))
        # Where a row changes, an interval begins or ends.
        changes = seen[..., 1:] != seen[..., :-1]
        needed = changes.sum(-1) // 2
        most = max(most, check_needed(needed, first_row=begin))
        lists = changes.nonzero()[:, -1].reshape(-1, 2)
        block = _rows_of_lists(lists, needed.flatten(), MAX_INTERVALS)
        table[:, :, begin:end] = block.view(batch, heads, end - begin, -1)
    return Intervals(table[..., : 2 * most].contiguous())
