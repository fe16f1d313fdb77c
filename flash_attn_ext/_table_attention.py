"""Attention with a bias that is looked up in a table (``bias_table``), with the gradient of the table.

An index by distance makes a relative-position bias, with one value per key - query of each head:
``Problem.bias_is_relative``. Kernels read these values, and their gradient is summed by entries. An index that is a
tensor makes a bias of all pairs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import autocast_dtype, cast, require_tensors
from flash_attn_ext._call.problem import Problem
from flash_attn_ext.autograd import attend
from flash_attn_ext.bias_tables import T5Buckets, entries_of_distances
from flash_attn_ext.derivatives.table_entries import look_up

_INTEGERS = (torch.int16, torch.int32)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def direct_entries(operands: tuple[Any, Any], causal: Any, layout: Any, table: Any, index: Any) -> Tensor | None:
    """The entries of distances or of pairs for ``_C.direct_attention``; None where a call is none for it."""
    q, k = operands
    if type(table) not in _PLAIN_TYPES or table.dim() != 2 or _C.operands_of(q, k, k) < _C.CANONICAL:
        return None
    if isinstance(index, Tensor):  # on the CPU its values are checked
        return index if index.is_cuda and index.dtype == torch.int32 else None
    queries_dim, heads_dim = (1, 2) if layout == "bshd" else (2, 1)
    if not isinstance(index, str | T5Buckets) or table.shape[0] != q.shape[heads_dim]:
        return None
    if _is_capturing(q.device):
        return None
    num_queries, num_keys = q.shape[queries_dim], k.shape[queries_dim]
    diagonal = 0 if causal == "top_left" else num_keys - num_queries
    return _kept_entries(index, table.shape[1], (num_queries, num_keys, diagonal), q.device)


def attend_with_table(
    problem: Problem, table: Tensor | None, index: Any, operands: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``attend`` of a canonical problem without a bias, to whose scores entries of the table are added."""
    rows = _checked_table(problem, table, index)
    if not isinstance(index, Tensor):
        return attend(_with_relative_bias(problem, rows, index, operands), operands)
    return attend(problem._replace(bias=_bias_of(rows, _checked_entries(problem, rows, index, operands))), operands)


def problem_to_explain(problem: Problem, table: Tensor | None, index: Any, operands: int) -> Problem:
    """The problem as the kernels get it."""
    rows = _checked_table(problem, table, index)
    if not isinstance(index, Tensor):
        return _with_relative_bias(problem, rows, index, operands)
    return problem._replace(bias=_bias_of(rows, _checked_entries(problem, rows, index, operands)))


def _with_relative_bias(problem: Problem, table: Tensor, index: Any, operands: int) -> Problem:
    num_queries, num_keys = problem.q.shape[2], problem.k.shape[2]
    diagonal = 0 if problem.causal == "top_left" else num_keys - num_queries
    entries = _entries_of_distances(
        index, table.shape[1], (num_queries, num_keys, diagonal), problem.q.device, operands
    )
    return problem._replace(bias=look_up(table, entries)[None, :, None], bias_is_relative=True)


def _entries_of_distances(
    index: Any, num_entries: int, shape: tuple[int, int, int], device: torch.device, operands: int
) -> Tensor:
    may_keep = operands >= _C.PLAIN and not is_compiling() and isinstance(index, str | T5Buckets)
    if not may_keep or _is_capturing(device):
        return _entries(index, num_entries, shape, device)
    return _kept_entries(index, num_entries, shape, device)


def _entries(index: Any, num_entries: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """The entry of each key - query, of 1 - num_queries first."""
    num_queries, num_keys, diagonal = shape
    count = max(num_queries + num_keys - 1, 0)
    distance = torch.arange(count, device=device) - (num_queries - 1) - diagonal
    return entries_of_distances(index, distance, num_entries).int()


def _kept_entries(index: Any, num_entries: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """The same, kept for each stream, because its operations take longer than a call."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return _entries_of_stream(index, num_entries, shape, device, stream)


@functools.lru_cache(maxsize=64)
def _entries_of_stream(
    index: Any, num_entries: int, shape: tuple[int, int, int], device: torch.device, _stream: Any
) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _entries(index, num_entries, shape, device)


def _is_capturing(device: torch.device) -> bool:
    """Whether the current stream of that device captures a graph, whose memory nothing else may keep."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _bias_of(table: Tensor, entries: Tensor) -> Tensor:
    """(1, heads, queries, keys)."""
    bias: Tensor = look_up(table, entries.flatten().contiguous()).unflatten(1, entries.shape)[None]
    return bias


def _checked_table(problem: Problem, table: Tensor | None, index: Any) -> Tensor:
    if problem.bias is not None:
        raise ValueError("bias and bias_table are both given, expected one of them: pass their sum as bias")
    if table is None or index is None:
        given, missing = ("bias_table", "bias_index") if index is None else ("bias_index", "bias_table")
        raise ValueError(f"{given} is given without {missing}, expected both or neither: pass {missing}=, too")
    require_tensors(("bias_table",), (table,), num_required=1)
    if (dtype := autocast_dtype(problem.q)) is not None and table.dtype != torch.float32:
        table = cast(table, dtype)
    q, heads = problem.q, problem.q.shape[1]
    if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < 1:
        raise RuntimeError(
            f"bias_table has shape {tuple(table.shape)}, expected ({heads}, entries): a row for each query head"
            + (f"; pass bias_table.T where it is (entries, {heads})" if tuple(table.shape[1:]) == (heads,) else "")
        )
    if table.dtype not in (q.dtype, torch.float32):
        raise RuntimeError(
            f"bias_table has dtype {table.dtype}, expected q's dtype ({q.dtype}) or torch.float32; cast it with "
            f"bias_table.to({q.dtype})"
        )
    if table.device != q.device:
        raise RuntimeError(f"bias_table is on {table.device}, but q is on {q.device}; move it with .to(q.device)")
    return table


def _checked_entries(problem: Problem, table: Tensor, index: Tensor, operands: int) -> Tensor:
    """The index as int32, within the table. On a GPU values are not looked at, but clamped."""
    require_tensors(("bias_index",), (index,), num_required=1)
    pairs = (problem.q.shape[2], problem.k.shape[2])
    if index.dtype not in _INTEGERS or tuple(index.shape) != pairs:
        raise RuntimeError(
            f"bias_index has shape {tuple(index.shape)} and dtype {index.dtype}, expected {pairs} = (queries, keys) of "
            "torch.int32 or torch.int16: an entry for each pair, the same for all batch entries and heads"
        )
    if index.device != table.device:
        raise RuntimeError(f"bias_index is on {index.device}, but q is on {table.device}; move it with .to(q.device)")
    num_entries = table.shape[1]
    if index.device.type == "cpu" and operands >= _C.PLAIN and index.numel():
        least, largest = (int(value) for value in index.aminmax())
        if least < 0 or largest >= num_entries:
            raise ValueError(
                f"bias_index has values from {least} to {largest}, expected entries of bias_table from 0 to "
                f"{num_entries - 1}"
            )
        return index.int()
    return index.int().clamp(0, num_entries - 1)
