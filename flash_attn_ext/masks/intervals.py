"""Intervals of keys for each query, and their algebra.

Everything is a tensor operation over all rows, so it runs on either device. What has to know a number of intervals that
depends on values reads it, which waits for a GPU; the docstrings say where.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_INTERVALS = 4
_NOWHERE = torch.iinfo(torch.int32).max  # sorts behind every begin
_ROW = ("batch", "head", "query")
_PACKED_ROW = ("head", "token")


class Intervals:
    """The keys that each query sees, as at most four intervals.

    Query i sees key j where ``tensor[..., i, 2 * m] <= j < tensor[..., i, 2 * m + 1]`` for some m. The intervals of a
    row may come in any order, overlap or be empty. A row whose intervals are all empty sees nothing.

    Args:
        tensor: int32, (batch or 1, heads or 1, queries, 2n) with n from 1 to 4, contiguous in the last dimension. For
            packed sequences (heads or 1, tokens, 2n), with positions inside the sequence.

    Raises:
        TypeError: ``tensor`` is no tensor.
        RuntimeError: its dtype, shape or strides are others.

    Example:
        >>> seen = flash_attn_ext.masks.Intervals(torch.tensor([[[[0, 1, 2, 4], [3, 5, 0, 0]]]], dtype=torch.int32))
        >>> seen.dense(5)[0, 0].int()
        tensor([[1, 0, 1, 1, 0],
                [0, 0, 0, 1, 1]], dtype=torch.int32)
        >>> seen
        Intervals(batch 1, heads 1, queries 2, 2 intervals of keys each, on cpu)
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"intervals must be an int32 tensor, got {type(tensor).__name__}")
        if tensor.dtype != torch.int32:
            raise RuntimeError(f"intervals must be int32, got {tensor.dtype}: pass intervals.int()")
        shape = tuple(tensor.shape)
        if len(shape) not in (3, 4) or shape[-1] not in range(2, 2 * MAX_INTERVALS + 1, 2):
            raise RuntimeError(
                "intervals must be (batch or 1, heads or 1, queries, 2n), or packed (heads or 1, tokens, 2n), with n "
                f"from 1 to {MAX_INTERVALS}, got {shape}: add dimensions of size 1"
            )
        if tensor.stride(-1) != 1:
            raise RuntimeError(
                "intervals must be contiguous in the last dimension, got strides "
                f"{tuple(tensor.stride())}: pass intervals.contiguous()"
            )
        self.tensor = tensor

    def __repr__(self) -> str:
        *rows, numbers = self.tensor.shape
        names = ("batch", "heads", "queries") if len(rows) == 3 else ("heads", "tokens")
        sizes = ", ".join(f"{name} {size}" for name, size in zip(names, rows, strict=True))
        return f"Intervals({sizes}, {numbers // 2} intervals of keys each, on {self.tensor.device})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Intervals:
        """The same intervals on a device, as ``torch.Tensor.to`` moves them."""
        return Intervals(self.tensor.to(device, non_blocking=non_blocking))

    def rows(self, begin: int, end: int | None = None) -> Intervals:
        """Those of the queries from ``begin`` to ``end``, as a slice takes them; ``rows(-1)`` is the last query's.

        For the new tokens behind a cache, or one part of the queries.
        """
        return Intervals(self.tensor[..., begin:end, :])

    def dense(self, keys: int) -> Tensor:
        """The boolean mask, (..., queries, keys), True = seen: for inspection and tests, since it has every pair."""
        positions = torch.arange(count("keys", keys), device=self.tensor.device)
        seen = self.tensor.new_zeros((*self.tensor.shape[:-1], keys), dtype=torch.bool)
        for begin, end in zip(*(bounds.split(1, -1) for bounds in self._bounds()), strict=True):
            seen |= (positions >= begin) & (positions < end)
        return seen

    def packed(self, cu_seqlens: Tensor, *, tokens: int | None = None) -> Intervals:
        """The form for ``attention_varlen``: each sequence has the first rows of its batch entry, cut to its length.

        Args:
            cu_seqlens: integers, (batch + 1,), of as many queries as keys. A batch of 1 is that of each sequence.
            tokens: the last entry of ``cu_seqlens``, which else is read. That waits for a GPU.

        Returns:
            (heads or 1, tokens, 2n).

        Raises:
            RuntimeError: dtypes or shapes; on the CPU also ``cu_seqlens`` that decreases or does not begin with 0, and
                a sequence that is longer than there are rows. On a GPU what is behind the last row sees nothing.
        """
        ends = integers("cu_seqlens", cu_seqlens, "(batch + 1,)", lambda dims: dims == 1)
        batch = len(ends) - 1
        if self.tensor.dim() != 4 or batch < 1 or self.tensor.shape[0] not in (1, batch):
            raise RuntimeError(
                f"packed takes intervals (batch or 1, heads or 1, queries, 2n) and cu_seqlens (batch + 1,), got "
                f"{tuple(self.tensor.shape)} and {tuple(cu_seqlens.shape)}"
            )
        check_ends(ends, first=0)
        lengths, queries = ends.diff(), self.tensor.shape[2]
        if not ends.is_cuda and int(lengths.max()) > queries:
            raise RuntimeError(f"a sequence has {int(lengths.max())} tokens, and the intervals have {queries} rows")
        at = torch.arange(int(ends[-1]) if tokens is None else count("tokens", tokens), device=ends.device)
        sequence = torch.searchsorted(ends[1:], at, right=True).clamp(max=batch - 1)
        row, length = at - ends[sequence], lengths[sequence]
        length = torch.where(row < torch.clamp(length, max=queries), length, 0)
        rows = self.tensor.expand(batch, -1, -1, -1)[sequence, :, row.clamp(max=queries - 1)]
        return Intervals(rows.minimum(length[:, None, None]).transpose(0, 1).to(torch.int32))

    def merged(self) -> Intervals:
        """The same mask with as few intervals as its rows need. Waits for a GPU.

        In each row they are sorted, and neither overlap nor touch. Empty ones come last, at the end of the last key.
        """
        begin, end, needed = merge(*self._bounds())
        return from_bounds(begin, end, needed, at_most=None)

    def __and__(self, other: Intervals) -> Intervals:
        """What both let a query see. Batch and heads broadcast. Waits for a GPU where more than four are possible."""
        if not isinstance(other, Intervals):
            return NotImplemented
        (begin, end, _), (other_begin, other_end, _) = (merge(*side._bounds()) for side in _broadcast(self, other))
        at_most = begin.shape[-1] + other_begin.shape[-1] - 1
        begin = torch.maximum(begin[..., :, None], other_begin[..., None, :]).flatten(-2)
        end = torch.minimum(end[..., :, None], other_end[..., None, :]).flatten(-2)
        return from_bounds(*merge(begin, end), at_most)

    def __or__(self, other: Intervals) -> Intervals:
        """What one of them lets a query see. Else as ``&``."""
        if not isinstance(other, Intervals):
            return NotImplemented
        (begin, end), (other_begin, other_end) = (side._bounds() for side in _broadcast(self, other))
        begin, end = torch.cat([begin, other_begin], -1), torch.cat([end, other_end], -1)
        return from_bounds(*merge(begin, end), at_most=begin.shape[-1])

    def _bounds(self) -> tuple[Tensor, Tensor]:
        return self.tensor[..., 0::2], self.tensor[..., 1::2]


def _broadcast(one: Intervals, other: Intervals) -> tuple[Intervals, Intervals]:
    """Both with the batch and the heads of either."""
    a, b = one.tensor, other.tensor
    if a.device != b.device:
        raise RuntimeError(f"both intervals must be on one device, got {a.device} and {b.device}: move one with to()")
    sizes = list(zip(a.shape[:-1], b.shape[:-1], strict=False))
    fit = a.dim() == b.dim() and all(m == n or (1 in (m, n) and at < len(sizes) - 1) for at, (m, n) in enumerate(sizes))
    if not fit:
        raise RuntimeError(
            f"both intervals must have the same number of queries, and the same batch and heads or 1, got "
            f"{tuple(a.shape)} and {tuple(b.shape)}: choose the queries with rows()"
        )
    rows = [m if n == 1 else n for m, n in sizes]
    return Intervals(a.expand(*rows, a.shape[-1])), Intervals(b.expand(*rows, b.shape[-1]))


def merge(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The intervals of each row sorted, with those that overlap or touch made one, and how many are left.

    begin, end: (..., m). The results have the same shape; behind the last interval stand empty ones at its end.
    """
    is_empty = begin >= end
    if begin.shape[-1] == 1:  # nothing to sort
        return begin.masked_fill(is_empty, 0), end.masked_fill(is_empty, 0), (~is_empty).sum(-1)
    begin, order = begin.masked_fill(is_empty, _NOWHERE).sort(-1)
    is_empty = begin == _NOWHERE
    end = end.gather(-1, order)
    reach = end.masked_fill(is_empty, 0).cummax(-1).values
    is_first, is_last = ~is_empty, ~is_empty
    is_first[..., 1:] &= begin[..., 1:] > reach[..., :-1]
    is_last[..., :-1] &= is_first[..., 1:] | is_empty[..., 1:]
    begins = begin.masked_fill(~is_first, _NOWHERE).sort(-1).values
    ends = reach.masked_fill(~is_last, _NOWHERE).sort(-1).values
    is_behind = begins == _NOWHERE
    last_end = reach[..., -1:]
    return torch.where(is_behind, last_end, begins), torch.where(is_behind, last_end, ends), is_first.sum(-1)


def from_bounds(begin: Tensor, end: Tensor, needed: Tensor, at_most: int | None) -> Intervals:
    """Intervals of merged rows, of which ``needed`` says how many each has, and ``at_most`` what they have at most.

    Raises ValueError where a row has more than four. What ``at_most`` leaves open is read from the device.
    """
    if at_most is None or at_most > MAX_INTERVALS:
        at_most = check_needed(needed)
    bounds = torch.stack([begin, end], -1)[..., :at_most, :]
    return Intervals(bounds.flatten(-2).to(torch.int32))


def check_needed(needed: Tensor, first_row: int = 0) -> int:
    """The largest of the rows' numbers of intervals, and at least 1. Raises ValueError where it is above four.

    first_row: the position of the first query among all.
    """
    if needed.numel() == 0:
        return 1
    most = int(needed.max())
    if most <= MAX_INTERVALS:
        return max(most, 1)
    at = [int(i) for i in torch.unravel_index(needed.argmax(), needed.shape)]
    at[-1] += first_row
    names = _ROW if len(at) == 3 else _PACKED_ROW
    row = ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=True))
    raise ValueError(
        f"{row} needs {most} intervals of keys, and a row has at most {MAX_INTERVALS}: give a part of the mask as "
        "causal=, window= or mask=, which intervals= intersects, or the whole mask as mask="
    )


def count(name: str, value: Any, least: int = 0) -> int:
    """A number of tokens, keys or the like, as an int."""
    number: int | None = None
    if type(value) is int or isinstance(value, torch.SymInt):
        number = value  # type: ignore[assignment]  # of a symbol operator.index would make a constant
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None:
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def check_ends(ends: Tensor, first: int | None = None) -> None:
    """Raises RuntimeError for ``cu_seqlens`` on the CPU that decreases, or does not begin with ``first`` (None: with 0
    or more)."""
    if ends.device.type != "cpu" or torch.compiler.is_compiling():
        return
    try:
        begin, decreases = int(ends[0]), bool((ends.diff() < 0).any())
    except RuntimeError:  # in a trace or under vmap there are no values
        return
    begins_wrong = begin < 0 if first is None else begin != first
    if decreases or begins_wrong:
        problem = "decreases" if decreases else f"begins with {begin}"
        expected = "0 or more" if first is None else str(first)
        raise RuntimeError(
            f"cu_seqlens {problem}, expected the running sum of lengths, which begins with {expected}: pass "
            "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        )


def integers(name: str, value: Any, shapes: str, allowed: Callable[[int], bool]) -> Tensor:
    """A tensor of integers with a number of dimensions that is ``allowed``, as int64."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be an integer tensor {shapes}, got {type(value).__name__}")
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        raise RuntimeError(f"{name} must be an integer tensor, got {value.dtype}: pass {name}.int()")
    if not allowed(value.dim()):
        raise RuntimeError(f"{name} must be {shapes}, got {tuple(value.shape)}")
    return value.long()
