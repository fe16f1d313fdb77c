"""Batched products of rows and tiles, summed in the accumulate dtype: float64 for float64, else float32.

On a GPU, products of bfloat16 rows run on its 16-bit tensor cores, and so do those of a tile with bfloat16 rows. For
these the tile is rounded, as the kernels round P and dS. A tile is not rounded for products with float16 rows, because
its range may be larger than that of float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_ext._call.problem import accumulate_dtype


def row_products(
    a: Tensor, b: Tensor, factor: float = 1.0, minus: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """factor * (x, m, d) (x, n, d)^T - minus -> (x, m, n); `minus` is (x, m, 1), in the accumulate dtype.

    out: memory for the result, on the CPU.
    """
    if _has_tensor_cores_for(a):
        products = torch.bmm(a, b.mT, out_dtype=torch.float32)
        if minus is not None:
            return torch.add(-minus, products, alpha=factor, out=products)
        return products if factor == 1 else products.mul_(factor)
    accumulate = accumulate_dtype(a.dtype)
    a, b = a.to(accumulate), b.to(accumulate)
    # The factor goes to the rows, which are fewer than the products. Initialising the result with -minus would write
    # all of it first, which is one more pass than sub_ takes.
    products = torch.bmm(a if factor == 1 else a * factor, b.mT, out=out)
    return products if minus is None else products.sub_(minus)


def add_row_products(total: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Returns total + factor * a b^T, computed in place."""
    if a.dtype == total.dtype:
        return total.baddbmm_(a, b.mT, alpha=factor)
    return total.add_(row_products(a, b), alpha=factor)


def add_sums(total: Tensor, weights: Tensor | None, rows: Tensor | None) -> None:
    """total (x, m, d) += weights (x, m, n) times rows (x, n, d); does nothing if `rows` are absent."""
    if rows is None:
        return
    assert weights is not None  # absent only where rows are
    if tile_dtype(rows) == torch.bfloat16:
        _add_16_bit_product(total, weights.to(rows.dtype), rows)
    else:
        total.baddbmm_(weights, rows.to(weights.dtype))


def add_transposed_sums(total: Tensor, rows: Tensor | None, weights: Tensor | None) -> None:
    """total (x, d, n) += rows (x, m, d)^T times weights (x, m, n); does nothing if `rows` are absent.

    On the CPU, weights^T times rows would take longer, because its larger factor is the transposed one.
    """
    if rows is None:
        return
    assert weights is not None  # absent only where rows are
    if tile_dtype(rows) == torch.bfloat16:
        _add_16_bit_product(total, rows.mT, weights.to(rows.dtype))
    else:
        total.baddbmm_(rows.to(weights.dtype).mT, weights)


def tile_dtype(rows: Tensor) -> torch.dtype:
    """The dtype of a tile in its product with `rows`."""
    return torch.bfloat16 if rows.is_cuda and rows.dtype == torch.bfloat16 else accumulate_dtype(rows.dtype)


def _add_16_bit_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    torch.baddbmm(total, a, b, out_dtype=total.dtype, out=total)


def _has_tensor_cores_for(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16)
