"""Entries of a table, by columns that have one entry each, and their transpose: sums of columns by their entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext import _C
from flash_attn_ext._call.problem import accumulate_dtype
from flash_attn_ext.derivatives.recording import DEVICES, TAGS

_LOOK_UP = "flash_attn_ext::table_look_up"
_SUMS = "flash_attn_ext::table_sums"


def _look_up(table: Tensor, entries: Tensor) -> Tensor:
    return table.index_select(1, entries)


def _look_up_fake(table: Tensor, entries: Tensor) -> Tensor:
    return table.new_empty((table.shape[0], entries.shape[0]))


def _sums_fake(values: Tensor, entries: Tensor, num_entries: int) -> Tensor:
    return values.new_empty((values.shape[0], num_entries), dtype=accumulate_dtype(values.dtype))


torch.library.define(_LOOK_UP, "(Tensor table, Tensor entries) -> Tensor", tags=TAGS)
torch.library.impl(_LOOK_UP, DEVICES, _look_up)
torch.library.register_fake(_LOOK_UP, _look_up_fake)
torch.library.define(_SUMS, "(Tensor values, Tensor entries, SymInt num_entries) -> Tensor", tags=TAGS)
torch.library.impl(_SUMS, DEVICES, _C.table_sums)
torch.library.register_fake(_SUMS, _sums_fake)


def look_up(table: Tensor, entries: Tensor) -> Tensor:
    """(rows, columns) of a table (rows, entries): of each column the entry that it has, int32 (columns,).

    A compiler gets an operator, because it takes no Function with a forward mode.
    """
    if is_compiling():
        looked_up: Tensor = torch.ops.flash_attn_ext.table_look_up(table, entries)
        return looked_up
    return LookUp.apply(table, entries)


class LookUp(torch.autograd.Function):
    """:func:`look_up`, and its transpose SumUp."""

    @staticmethod
    def forward(table: Tensor, entries: Tensor) -> Tensor:
        return _look_up(table, entries)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        table, entries = inputs
        ctx.save_for_backward(entries)
        ctx.save_for_forward(entries)
        ctx.num_entries, ctx.dtype = table.shape[1], table.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (entries,) = ctx.saved_tensors
        return SumUp.apply(gradient, entries, ctx.num_entries).to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _of_entries: None) -> Tensor:
        return LookUp.apply(tangent, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], table: Tensor, entries: Tensor) -> tuple[Tensor, int]:
        return _fold_rows(info, in_dims, table, lambda rows: LookUp.apply(rows, entries))


class SumUp(torch.autograd.Function):
    """(rows, entries) of values (rows, columns): for each entry the sum of its columns, in a fixed order and in the
    accumulate dtype. Its transpose is LookUp."""

    @staticmethod
    def forward(values: Tensor, entries: Tensor, num_entries: int) -> Tensor:
        return torch.ops.flash_attn_ext.table_sums(values, entries, num_entries)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, entries, ctx.num_entries = inputs
        ctx.save_for_backward(entries)
        ctx.save_for_forward(entries)
        ctx.dtype = values.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return LookUp.apply(gradient, *ctx.saved_tensors).to(ctx.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_others: None) -> Tensor:
        return SumUp.apply(tangent, *ctx.saved_tensors, ctx.num_entries)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], values: Tensor, entries: Tensor, num_entries: int
    ) -> tuple[Tensor, int]:
        return _fold_rows(info, in_dims, values, lambda rows: SumUp.apply(rows, entries, num_entries))


def _fold_rows(info: Any, in_dims: tuple[Any, ...], matrix: Tensor, function: Any) -> tuple[Tensor, int]:
    """A batching rule: the mapped dimension joins the rows. All slices share the entries."""
    if in_dims[1] is not None:
        raise RuntimeError("bias_index is mapped by torch.vmap, which is not taken: pass one that all slices share")
    rows = matrix.movedim(in_dims[0], 0)
    return function(rows.flatten(0, 1)).unflatten(0, (info.batch_size, rows.shape[1])), 0


def _save_entries(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, entries = inputs
    ctx.save_for_backward(entries)
    ctx.num_entries, ctx.dtype = table.shape[1], table.dtype


def _sum_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    sums = torch.ops.flash_attn_ext.table_sums(gradient, *ctx.saved_tensors, ctx.num_entries)
    return sums.to(ctx.dtype), None


torch.library.register_autograd(_LOOK_UP, _sum_gradient, setup_context=_save_entries)
