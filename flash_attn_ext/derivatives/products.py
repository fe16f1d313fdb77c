"""Batched products of rows and tiles, summed in the accumulate dtype: float64 of float64, else float32.

On a GPU products of bfloat16 rows run on its 16-bit tensor cores, and so do those of a tile with bfloat16 rows, for
which the tile is rounded, as the kernels round P and dS. A tile that meets float16 rows is not rounded, since its range
may be larger than that of float16.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """(x, m, d) and (x, n, d), of one dtype -> (x, m, n)."""
    if _has_tensor_cores_for(a.dtype, a.device):
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    accumulate = accumulate_dtype(a.dtype)
    return torch.bmm(a.to(accumulate), b.mT.to(accumulate))


def add_row_products(total: Tensor | None, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """`total` + :func:`row_products`, in place; an absent operand is 0, and so is an absent total."""
    if a is None or b is None:
        return total
    if total is None:
        return row_products(a, b)
    if a.dtype == total.dtype:
        return total.baddbmm_(a, b.mT)
    return total.add_(row_products(a, b))


def add_sums(total: Tensor, weights: Tensor, rows: Tensor | None) -> None:
    """total (x, m, d) += weights (x, m, n) times rows (x, n, d); nothing where `rows` are absent."""
    if rows is None:
        return
    if rows.dtype == torch.bfloat16 and rows.is_cuda:
        total.add_(torch.bmm(weights.to(rows.dtype), rows, out_dtype=torch.float32))
    else:
        total.baddbmm_(weights, rows.to(weights.dtype))


def _has_tensor_cores_for(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
