"""Converts users' tensors to the one form that the extension takes (see ``_C.pyi``), and its results back.

Only what changes form is checked here: ranks and leading dimensions. Shapes, dtypes and devices of the canonical form
are checked once, in C++ (csrc/host/checks/checks.h).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext import _C
from flash_attn_ext._call.problem import Problem

CANONICAL = _C.CANONICAL


class Names(NamedTuple):
    """The names by which errors call the tensors of a problem that change form."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    bias: str = "bias"
    mask: str = "mask"
    alibi_slopes: str = "alibi_slopes"
    sink: str = "sink"
    intervals: str = "intervals"
    blocks: str = "block_lists"


class DenseForm(NamedTuple):
    """How a dense call was shaped: its dimensions before heads (not kept for 4-D calls) and the rank of its output."""

    lead: tuple[int, ...]
    rank: int

    def restore_out(self, out: Tensor) -> Tensor:
        """(B, H, Sq, Dv) -> (*lead, H, Sq, Dv), without the dimensions that the caller did not have."""
        return self._restore(out, self.rank)

    def restore_lse(self, lse: Tensor) -> Tensor:
        return self._restore(lse, self.rank - 1)

    def lead_of(self, q: Tensor) -> tuple[int, ...]:
        """The dimensions before heads, for canonical q."""
        return self.lead if self.rank > 4 else q.shape[:1]

    def fold_table(self, table: Tensor) -> Tensor:
        """A table that broadcasts to (*lead, heads, rows, columns) -> (B|1, heads|1, rows|1, columns|1).

        It is a view, except when the table has some of several leading dimensions and broadcasts over others. Then it
        is a copy with all of them.
        """
        missing = max(self.rank, 4) - table.dim()
        if missing:
            table = table[(None,) * missing]
        if self.rank <= 4:
            return table
        if all(n == 1 for n in table.shape[:-3]):
            return table[(0,) * (self.rank - 4)]
        return _fold(table, self.lead)

    def _restore(self, tensor: Tensor, rank: int) -> Tensor:
        if self.rank > 4:
            return tensor.reshape(*self.lead, *tensor.shape[1:])
        while tensor.dim() > rank:
            tensor = tensor.squeeze(0)
        return tensor


OWN_NAMES = Names()
PLAIN_FORM = DenseForm((), 4)


def operands_of(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The kind of the operands, a constant of ``_C``. It decides how they get into form, and the path of the call."""
    return _C.SYMBOLIC if is_compiling() else _C.operands_of(q, k, v)


def dense_form(problem: Problem, operands: int, names: Names = OWN_NAMES) -> tuple[Problem, DenseForm]:
    """A dense problem in canonical form, and how to restore the form of its results. Heads come before the sequence
    already, and k's and v's numbers of heads fit q's."""
    form = PLAIN_FORM
    if operands < CANONICAL:
        problem, form = _fold_batch(_cast_for_autocast(problem), names)
    bias, mask, alibi_slopes, _, intervals, blocks = of_scores = problem[3:9]
    if all(tensor is None for tensor in of_scores):
        return problem, form
    require_tensors(names[3:], of_scores, num_required=0)
    in_form: dict[str, Any] = {}
    if bias is not None:
        in_form["bias"] = _scores_form(names.bias, bias, problem, form)
    if mask is not None:
        in_form["mask"] = _scores_form(names.mask, mask, problem, form)
    if alibi_slopes is not None and alibi_slopes.dim() > 2:
        in_form["alibi_slopes"] = _slopes_form(alibi_slopes, form, problem.q)
    if intervals is not None and (intervals.dim() != 4 or form.rank > 4):
        rows = f"{problem.q.size(2)}) = (..., heads, queries) before its last dimension, which has a begin and an end "
        in_form["intervals"] = _rows_form("intervals", intervals, problem.q, form, f"{rows}for each interval")
    if blocks is not None and (blocks.dim() != 4 or form.rank > 4):
        rows = "query blocks, key blocks) = (..., heads, query blocks, key blocks) as a block mask"
        in_form["blocks"] = _rows_form(names.blocks, blocks, problem.q, form, rows)
    return problem._replace(**in_form), form


def packed_form(problem: Problem) -> Problem:
    """A packed problem in canonical form."""
    require_tensors(Problem._fields, problem[:8])
    require_tensors(("cu_seqlens_q", "cu_seqlens_k"), (problem.cu_seqlens_q, problem.cu_seqlens_k), num_required=2)
    problem = _cast_for_autocast(problem)
    if problem.intervals is not None and problem.intervals.dim() == 2:
        problem = problem._replace(intervals=problem.intervals[None])
    if problem.bias is None and problem.mask is None:
        return problem
    lengths = "(batch, heads, max_seqlen_q, max_seqlen_k)"
    return problem._replace(
        bias=four_dimensional("bias", problem.bias, lengths), mask=four_dimensional("mask", problem.mask, lengths)
    )


def require_tensors(names: tuple[str, ...], tensors: Sequence[object], num_required: int = 3) -> None:
    """Raises unless the first ``num_required`` are tensors, and the others are tensors or None."""
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) and (tensor is not None or index < num_required):
            raise TypeError(f"{names[index]} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor is not None and tensor.is_nested:
            raise TypeError(
                f"{names[index]} is a nested tensor, which is not taken: pass its values() and offsets() to "
                "flash_attn_ext.attention_varlen, or pad it and pass a mask"
            )
        if tensor is not None and tensor.layout != torch.strided:
            raise TypeError(
                f"{names[index]} has layout {tensor.layout}, expected a dense tensor: pass {names[index]}.to_dense()"
            )


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype to which torch.autocast now casts tensors of that device, or None."""
    if tensor.is_meta:  # a device type that autocast does not know
        return None
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which operations compute in the dtypes of their arguments."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts an argument as autocast does: float64 and dtypes that are not floating keep theirs."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _cast_for_autocast(problem: Problem) -> Problem:
    dtype = autocast_dtype(problem.q)
    if dtype is None:
        return problem
    bias = problem.bias
    if isinstance(bias, Tensor) and bias.dtype != torch.float32:
        bias = cast(bias, dtype)
    return problem._replace(q=cast(problem.q, dtype), k=cast(problem.k, dtype), v=cast(problem.v, dtype), bias=bias)


def _fold_batch(problem: Problem, names: Names) -> tuple[Problem, DenseForm]:
    """Broadcasts the dimensions before (H, S, D) and folds them into one."""
    q, k, v = problem[:3]
    rank = max(q.dim(), k.dim(), v.dim())
    if q.dim() == k.dim() == v.dim() == 4 and q.size(0) == k.size(0) == v.size(0):
        return problem, PLAIN_FORM
    tensors = [_at_least_3d(t, rank, name) for name, t in zip(names[:3], (q, k, v), strict=True)]
    try:
        lead = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names[:3], (q, k, v), strict=True))
        raise RuntimeError(f"the batch dimensions of {shapes} do not broadcast: each must be equal, or 1") from None
    q, k, v = (_fold(t, lead) for t in tensors)
    return problem._replace(q=q, k=k, v=v), DenseForm(lead, rank)


def _scores_form(name: str, table: Tensor, problem: Problem, form: DenseForm) -> Tensor:
    """A bias or mask that broadcasts to (*lead, Hq, Sq, Sk) -> (B|1, Hq|1, Sq|1, Sk|1); q and k are canonical."""
    scores = (*form.lead_of(problem.q), *problem.q.shape[1:3], problem.k.size(2))[-form.rank :]
    table = _without_leading_ones(table, form.rank)
    if not _broadcasts(table.shape, scores):
        raise RuntimeError(
            f"{name} has shape {tuple(table.shape)}, which does not broadcast to {scores} = (..., heads, queries, "
            "keys) here: every dimension must be 1 or equal, counted from the right"
            f"{_hint_at_form(name, table, problem, scores)}"
        )
    return form.fold_table(table)


def _hint_at_form(name: str, table: Tensor, problem: Problem, scores: tuple[int, ...]) -> str:
    """For a table that does not broadcast, a form that would: with dimensions that it lacks, or in the other layout."""
    shape = tuple(table.shape)
    if len(scores) == 4:
        batch, heads, num_queries, num_keys = scores
        if shape == (batch, num_keys):
            return f"; pass {name}[:, None, None, :] where it is (batch, keys)"
        if shape in ((batch, num_queries, num_keys), (batch, 1, num_keys)):
            return f"; pass {name}[:, None] where it is (batch, queries, keys)"
        if shape == (batch * heads, num_queries, num_keys):
            return f"; pass {name}.unflatten(0, ({batch}, {heads})) where it is (batch * heads, queries, keys)"
    if len(scores) < 3 or not _broadcasts(shape, (*scores[:-3], scores[-2], scores[-3], problem.k.size(1))):
        return ""
    other = "'bhsd' takes (..., heads, sequence, " if problem.sequence_first else "'bshd' takes (..., sequence, heads, "
    return f"; it would with heads and sequence exchanged: layout={other}head dim) in flash_attn_ext.attention"


@overload
def four_dimensional(name: str, table: Tensor, lengths: str) -> Tensor: ...
@overload
def four_dimensional(name: str, table: Tensor | None, lengths: str) -> Tensor | None: ...
def four_dimensional(name: str, table: Tensor | None, lengths: str) -> Tensor | None:
    """A bias or mask with all dimensions of the scores; C++ checks their sizes. `lengths`: these dimensions."""
    if table is None or table.dim() == 4:
        return table
    table = _without_leading_ones(table, 4)
    if table.dim() > 4:
        raise RuntimeError(f"{name} has shape {tuple(table.shape)}, expected one that broadcasts to {lengths}")
    return table[(None,) * (4 - table.dim())]


def _without_leading_ones(table: Tensor, rank: int) -> Tensor:
    """Drops dimensions of size 1 before those of the scores, because they broadcast against nothing."""
    while table.dim() > rank and table.size(0) == 1:
        table = table[0]
    return table


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    missing = len(full) - len(shape)
    if missing < 0:
        return False
    for index, size in enumerate(shape, missing):  # noqa: SIM110, any() takes longer
        if size != 1 and size != full[index]:
            return False
    return True


def _slopes_form(alibi_slopes: Tensor, form: DenseForm, q: Tensor) -> Tensor:
    """(*lead, Hq) -> (B, Hq); (Hq,) and (B, Hq) are canonical already."""
    lead = form.lead_of(q)
    if tuple(alibi_slopes.shape[:-1]) != tuple(lead):
        raise RuntimeError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}, expected (heads,) or (*batch, heads) with batch "
            f"dimensions {tuple(lead)}"
        )
    return alibi_slopes.reshape(math.prod(lead), alibi_slopes.size(-1))


def _rows_form(name: str, rows: Tensor, q: Tensor, form: DenseForm, expected: str) -> Tensor:
    """(..., Hq|1, R, C) -> (B|1, Hq|1, R, C); q is canonical. C++ checks the last two dimensions.

    expected: the end of the error, from the dimension of rows on."""
    full = (*form.lead_of(q), q.size(1))[2 - form.rank :] if form.rank > 2 else ()
    if rows.dim() < 2 or not _broadcasts(rows.shape[:-2], full):
        sizes = "".join(f"{size}, " for size in full)
        raise RuntimeError(f"{name} has shape {tuple(rows.shape)}, expected one that broadcasts to ({sizes}{expected}")
    return form.fold_table(rows)


def _at_least_3d(tensor: Tensor, rank: int, name: str) -> Tensor:
    if tensor.dim() < 2:
        raise RuntimeError(f"{name} must have at least 2 dimensions, got shape {tuple(tensor.shape)}")
    missing = max(rank, 3) - tensor.dim()
    return tensor[(None,) * missing] if missing else tensor  # PyTorch's older vmap does not support indexing by ()


def _fold(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(*lead or 1, H, S, D) -> (B, H, S, D). It is a view where strides allow it."""
    if len(lead) == 1:
        return tensor.expand(lead[0], -1, -1, -1)
    if not lead:
        return tensor.unsqueeze(0)
    inner = tensor.shape[-3:]
    return tensor.expand(*lead, *inner).reshape(math.prod(lead), *inner)
