"""The batching rule of ``torch.vmap``: the mapped dimension becomes a part of the batch, or of the heads.

It becomes part of the batch, with packed sequences one after the other, unless a tensor without a batch dimension has
it: the sink, or a bias that is the same for the whole batch. Then it becomes part of the heads. Bits of dropout depend
on the batch entry and the head, and a backward pass has to draw those of its forward pass. So slices that share one
seed run one after the other, and slices with seeds of their own are folded with the first seed, always in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_ext.derivatives.kinds import KINDS, Kind

Named = dict[str, Any]
Mapped = tuple[tuple[Any, ...], tuple[int | None, ...]]  # results, and their mapped dimensions


class Fold(NamedTuple):
    """Where the mapped dimension goes. batch, heads: how many one slice has, in the scores."""

    size: int
    into_heads: bool
    is_packed: bool
    batch: int
    heads: int

    def fold(self, kind: Kind, tensor: Tensor, dim: int | None, is_separate: bool) -> Tensor:
        """`dim`: the mapped one, None for a tensor that all slices share. `is_separate`: even such a tensor may not
        stay shared, because each slice has a result of its shape."""
        if kind == Kind.SEED:
            return tensor if dim is None else tensor.select(dim, 0)
        shared = dim is None and not is_separate
        if shared and self._broadcasts(kind, tensor):
            return tensor
        tensor = tensor.expand(self.size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        if kind == Kind.OFFSETS:
            return self._folded_offsets(tensor)
        if self._broadcasts_over_both(kind):
            tensor = self._with_full_dimension(tensor)
        if kind == Kind.INTERVALS and self.is_packed and self.into_heads:
            tensor = tensor.expand(-1, self.heads, -1, -1)
        if kind == Kind.SLOPES and tensor.dim() == 2 and not self.into_heads:
            tensor = tensor[:, None].expand(-1, self.batch, -1)
        if self._comes_first(kind, tensor.dim() - 1):
            return tensor.flatten(0, 1)
        return tensor.transpose(0, 1).flatten(1, 2)

    def unfold(self, kind: Kind, result: Tensor, shape: torch.Size) -> Tensor:
        """(N, *shape) of a result, summed over the dimensions over which a slice of that shape broadcasts."""
        position = 0 if self._comes_first(kind, result.dim()) else 1
        inner = result.size(position) // self.size if self.size else 0
        result = result.unflatten(position, (self.size, inner))
        if position == 1:
            result = result.transpose(0, 1)
        if kind == Kind.SLOPES and result.dim() - 1 > len(shape):
            return result.sum(1)
        if kind == Kind.TABLE and result.shape[1:] != shape:
            return result.sum(2 if self.into_heads else 1, keepdim=True)
        return result

    def _comes_first(self, kind: Kind, rank: int) -> bool:
        """Whether the folded dimension is the first one of a slice with `rank` dimensions, or else the second."""
        if kind == Kind.SINK:
            return True
        if kind == Kind.SLOPES:
            return not self.into_heads or rank == 1
        if kind in (Kind.STATISTIC, Kind.INTERVALS) and self.is_packed:
            return self.into_heads
        return not self.into_heads

    def _broadcasts(self, kind: Kind, tensor: Tensor) -> bool:
        """Whether slices can share the tensor as it is."""
        if self._broadcasts_over_both(kind):
            return tensor.size(1 if self.into_heads else 0) == 1
        if kind == Kind.INTERVALS:
            return self.into_heads and tensor.size(0) == 1
        if self.into_heads:
            return kind == Kind.OFFSETS
        return kind == Kind.SINK or (kind == Kind.SLOPES and tensor.dim() == 1)

    def _broadcasts_over_both(self, kind: Kind) -> bool:
        """Whether batch entries and heads of a tensor may each be 1."""
        return kind in (Kind.TABLE, Kind.BLOCKS) or (kind == Kind.INTERVALS and not self.is_packed)

    def _with_full_dimension(self, table: Tensor) -> Tensor:
        """(N, B|1, Hq|1, ...) with all of the dimension that the mapped one joins."""
        dimension, size = (2, self.heads) if self.into_heads else (1, self.batch)
        if table.size(dimension) == size:
            return table
        shape = list(table.shape)
        shape[dimension] = size
        return table.expand(shape)

    def _folded_offsets(self, offsets: Tensor) -> Tensor:
        """(N, B + 1) -> (N * B + 1,): each slice's sequences begin where those of the one before it end."""
        ends = offsets[:, -1].cumsum(0, dtype=offsets.dtype)
        begins = torch.cat([ends.new_zeros(1), ends])
        return torch.cat([(offsets[:, :-1] + begins[:-1, None]).flatten(), begins[-1:]])


def map_slices(
    call: Callable[..., Any],
    outputs: Callable[[Named], tuple[str, ...]],
    info: Any,
    dims: dict[str, int | None],
    arguments: Named,
) -> Mapped:
    """Returns what ``vmap`` expects of ``call(**arguments)``: (results, their mapped dimensions).

    outputs: from the arguments to the names of the results of `call`, "" for one that is no result in this call.
    dims: of each argument, None where it is not mapped.
    """
    if arguments["bias"] is None and "lse_residual" in arguments:
        # An operator cannot leave out a result. It returns an empty tensor instead.
        arguments, dims = arguments | dict(lse_residual=None), dims | dict(lse_residual=None)
    names = outputs(arguments)
    fold = _choose(info.batch_size, dims, arguments, names)
    if fold is None:
        slices = [call(**_slice_of(arguments, dims, index)) for index in range(info.batch_size)]
        by_name = zip(names, zip(*slices, strict=True), strict=True)
        stacked = [torch.stack(of_slices) if name else of_slices[0] for name, of_slices in by_name]
        return tuple(stacked), tuple(0 if name else None for name in names)
    folded = {
        name: fold.fold(KINDS[name], value, dims[name], name in names) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    results = []
    for name, result in zip(names, call(**folded), strict=True):
        results.append(fold.unfold(KINDS[name], result, _slice_shape(arguments, dims, name)) if name else result)
    return tuple(results), tuple(0 if name else None for name in names)


def _choose(size: int, dims: dict[str, int | None], arguments: Named, names: tuple[str, ...]) -> Fold | None:
    """How slices are folded; None if they run one after the other."""

    def is_separate(name: str) -> bool:
        return dims[name] is not None or name in names

    q = _slice_shape(arguments, dims, "q")
    is_packed = arguments["cu_seqlens_q"] is not None
    batch = _slice_shape(arguments, dims, "cu_seqlens_q")[0] - 1 if is_packed else q[0]
    heads = q[1]
    if arguments["rng_seed"] is not None and size:
        has_own_bits = dims["rng_seed"] is not None and arguments["sink"] is None
        return Fold(size, False, is_packed, batch, heads) if has_own_bits else None
    into_heads = False
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or not is_separate(name):
            continue
        if KINDS[name] == Kind.SINK:
            into_heads = True
        if KINDS[name] == Kind.TABLE:
            shape = _slice_shape(arguments, dims, name)
            is_relative = name == "bias" and arguments["bias_is_relative"]
            into_heads = into_heads or (shape[0] == 1 < batch and shape[1] == heads) or is_relative
    if into_heads and is_packed and (dims["cu_seqlens_q"] is not None or dims["cu_seqlens_k"] is not None):
        return None
    return Fold(size, into_heads, is_packed, batch, heads)


def _slice_shape(arguments: Named, dims: dict[str, int | None], name: str) -> torch.Size:
    """The shape of one slice; () for results that are no arguments, whose shape follows from the fold only."""
    value = arguments.get(name)
    if not isinstance(value, Tensor):
        return torch.Size()
    shape, dim = list(value.shape), dims[name]
    if dim is not None:
        del shape[dim]
    return torch.Size(shape)


def _slice_of(arguments: Named, dims: dict[str, int | None], index: int) -> Named:
    return {name: value if dims[name] is None else value.select(dims[name], index) for name, value in arguments.items()}
