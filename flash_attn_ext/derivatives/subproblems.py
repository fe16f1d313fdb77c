"""Cuts a problem into dense problems of one or more batch entries and key heads, whose tiles fit a budget.

A packed sequence is cut out by itself. Its bounds have to be known on the host, so a call with packed sequences waits
for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from flash_attn_ext._call.problem import Problem
from flash_attn_ext.derivatives.kinds import KINDS, Kind

RESULT = "result of "
_CUT_FIELDS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink", "intervals", "blocks")


class TileSize(NamedTuple):
    """Queries and keys of a tile, and the most scores that the tiles of all heads of a `Subproblem` may have."""

    queries: int
    keys: int
    scores: int


# An operation on a tile has to take longer than the launch of a GPU's kernel, or than waking a CPU's threads. On the
# CPU a tile should also stay in the cache.
CPU_TILE = TileSize(512, 512, 2**19)
GPU_TILE = TileSize(1024, 1024, 2**25)


def tile_size(device_type: str, group: int) -> TileSize:
    """group: query heads that share a key head and one tile. If they exceed the budget, a tile has fewer queries."""
    size = CPU_TILE if device_type == "cpu" else GPU_TILE
    return size._replace(queries=min(size.queries, max(size.scores // (group * size.keys), 1)))


class Selection(NamedTuple):
    """The batch entries, key heads and tokens of a `Subproblem`; the latter are None for dense problems."""

    batch: slice
    key_heads: slice
    group: int  # query heads that share a key head
    queries: slice | None = None
    keys: slice | None = None

    @property
    def heads(self) -> slice:
        return slice(self.key_heads.start * self.group, self.key_heads.stop * self.group)

    def of(self, kind: Kind, tensor: Tensor) -> Tensor:
        """A view, in the dense form of `kind` (kinds.py)."""
        if kind in (Kind.QUERIES, Kind.KEYS):
            heads, tokens = (self.heads, self.queries) if kind == Kind.QUERIES else (self.key_heads, self.keys)
            return tensor[self.batch, heads] if tokens is None else tensor[tokens, heads].transpose(0, 1)[None]
        if kind == Kind.STATISTIC:
            return tensor[self.batch, self.heads] if self.queries is None else tensor[None, self.heads, self.queries]
        if kind == Kind.TABLE:
            return self._of_table(tensor)
        if kind == Kind.SLOPES:
            return tensor[None, self.heads] if tensor.dim() == 1 else tensor[self.batch, self.heads]
        if kind in (Kind.INTERVALS, Kind.BLOCKS):
            by_head = tensor if self.queries is None else tensor[None, :, self.queries]
            per_batch, per_head = (size > 1 for size in by_head.shape[:2])
            return by_head[self.batch if per_batch else slice(None), self.heads if per_head else slice(None)]
        assert kind == Kind.SINK, kind
        return tensor[self.heads]

    def _of_table(self, table: Tensor) -> Tensor:
        batch, heads, queries, keys = (size > 1 for size in table.shape)
        table = table[self.batch if batch else slice(None), self.heads if heads else slice(None)]
        if self.queries is None or self.keys is None:
            return table
        lengths = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return table[:, :, : lengths[0] if queries else 1, : lengths[1] if keys else 1]


class Subproblem(NamedTuple):
    """A dense problem. tensors: views by name, None for absent ones, each in the dense form of its kind."""

    selection: Selection
    tensors: dict[str, Tensor | None]
    num_queries: int
    num_keys: int

    @property
    def num_batches(self) -> int:
        return present(self.tensors, "q").size(0)

    @property
    def num_heads(self) -> int:
        return present(self.tensors, "q").size(1)


def present(tensors: dict[str, Tensor | None], name: str) -> Tensor:
    """The tensor of that name, which is never absent there, or is known to the caller to be present."""
    tensor = tensors[name]
    assert tensor is not None, name
    return tensor


def subproblems_of(problem: Problem, tensors: dict[str, Tensor | None]) -> Iterator[Subproblem]:
    """Cuts the problem's own tensors and `tensors`, by the names of KINDS. Names of results to write begin with
    RESULT."""
    tensors = {name: getattr(problem, name) for name in _CUT_FIELDS} | tensors
    kinds = {name: KINDS[name.removeprefix(RESULT)] for name in tensors}
    for selection in _selections(problem):
        views = {
            name: tensor if tensor is None else selection.of(kinds[name], tensor) for name, tensor in tensors.items()
        }
        yield Subproblem(selection, views, present(views, "q").size(2), present(views, "k").size(2))


def _selections(problem: Problem) -> Iterator[Selection]:
    q, k = problem.q, problem.k
    if q.size(1) == 0:  # no query attends to the keys, if there are any
        return
    group = q.size(1) // k.size(1)
    size = tile_size(q.device.type, group)
    if problem.cu_seqlens_q is None or problem.cu_seqlens_k is None:
        for batch, key_heads in _shares(q.size(0), k.size(1), group * _tile_scores(size, q.size(2), k.size(2)), size):
            yield Selection(batch, key_heads, group)
        return
    starts_q, starts_k = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_k.tolist()
    for index in range(len(starts_q) - 1):
        queries, keys = slice(*starts_q[index : index + 2]), slice(*starts_k[index : index + 2])
        scores = group * _tile_scores(size, queries.stop - queries.start, keys.stop - keys.start)
        for _, key_heads in _shares(1, k.size(1), scores, size):
            yield Selection(slice(index, index + 1), key_heads, group, queries, keys)


def _tile_scores(size: TileSize, num_queries: int, num_keys: int) -> int:
    return max(min(size.queries, num_queries) * min(size.keys, num_keys), 1)


def _shares(batch: int, key_heads: int, scores: int, size: TileSize) -> Iterator[tuple[slice, slice]]:
    """Shares of batch entries and key heads whose tiles, of `scores` for each key head, fit the budget."""
    heads_at_a_time = min(max(size.scores // scores, 1), key_heads)
    entries_at_a_time = max(size.scores // (scores * heads_at_a_time), 1) if heads_at_a_time == key_heads else 1
    for entry in range(0, batch, entries_at_a_time):
        for head in range(0, key_heads, heads_at_a_time):
            last_entry, last_head = min(entry + entries_at_a_time, batch), min(head + heads_at_a_time, key_heads)
            yield slice(entry, last_entry), slice(head, last_head)


def blocks(begin: int, end: int, size: int) -> Iterator[slice]:
    """[begin, end) in slices of `size` that begin at multiples of it."""
    if begin < end:
        for start in range(begin - begin % size, end, size):
            yield slice(max(start, begin), min(start + size, end))
