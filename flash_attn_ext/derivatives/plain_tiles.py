"""Plain tiles on a GPU: scores that only a scale changes, and that only causality and windows hide.

The elementwise steps on such a tile are one kernel before the products with its weights, and one before those with its
score gradients (csrc/kernels/derivatives/plain_tiles.cu). Each reads every product once, and writes every factor of the
next products once, in their dtype. The general forms of both are in forward_tangents.py and backward_tangents.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import operands_of
from flash_attn_ext._call.problem import Problem
from flash_attn_ext.derivatives.products import add_sums, row_products, tile_dtype
from flash_attn_ext.derivatives.subproblems import RESULT, present
from flash_attn_ext.derivatives.tiles import Gradient, Rows, Scores, TileGradients


class PlainTile(NamedTuple):
    """A tile of (pairs, group * queries, keys), float32.

    products: q k^T. tangents: those of products; None if neither q nor k has one.
    """

    products: Tensor
    tangents: Tensor | None


def are_plain(problem: Problem, others: dict[str, Tensor | None]) -> bool:
    """Whether the tiles of a problem are plain. `others`: the tensors that come with it."""
    q, k, v = operands = problem[:3]
    if not q.is_cuda or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if problem.softcap is not None or problem.dropout_p > 0:
        return False
    if problem.bias is not None or problem.alibi_slopes is not None:
        return False
    if problem.mask is not None or problem.intervals is not None or problem.blocks is not None:
        return False
    tensors = [*operands, *(tensor for tensor in others.values() if tensor is not None)]
    return all(operands_of(tensor, k, v) != _C.SYMBOLIC for tensor in tensors)  # kernels read memory


def tile_of(scores: Scores, rows: Rows, keys: slice) -> PlainTile:
    return PlainTile(row_products(rows.q, scores.key_rows("k", keys)), _product_tangents(scores, rows, keys))


def add_tangents(scores: Scores, rows: Rows, keys: slice, total: Tensor, lse_tangent: Tensor) -> PlainTile:
    """Does what ``forward_tangents._add_tangents`` does."""
    tile = tile_of(scores, rows, keys)
    v, v_tangent = scores.key_rows("v", keys), scores.key_rows("v_tangent", keys)
    arguments = (*_as_arguments(scores, rows, keys, tile), lse_tangent, v_tangent is not None)
    weights, weighted = _C.plain_weights(*arguments)
    if weighted is not None:
        add_sums(total, weighted, v)
    add_sums(total, weights, v_tangent)
    return tile


def tile_gradients(
    scores: Scores, rows: Rows, keys: slice, gradient: Gradient, tile: PlainTile | None
) -> TileGradients:
    """Does what ``backward_tangents._tile_gradients`` does."""
    if tile is None:
        tile = tile_of(scores, rows, keys)
    v, v_tangent = scores.key_rows("v", keys), scores.key_rows("v_tangent", keys)
    arguments = (
        *_as_arguments(scores, rows, keys, tile),
        gradient.lse_tangent,
        row_products(gradient.dout, v),
        None if v_tangent is None else row_products(gradient.dout, v_tangent),
        gradient.delta,
        gradient.delta_tangent,
        RESULT + "v" in scores.subproblem.tensors,
    )
    weight_tangents, product_gradients, their_tangents = _C.plain_gradients(*arguments)
    assert their_tangents is not None  # the kernel always returns them
    return TileGradients(weight_tangents, product_gradients, their_tangents, _blind_queries(scores, rows.queries, keys))


def sums_with_dout(scores: Scores, name: str, queries: slice) -> Tensor:
    """Does what ``backward_tangents._sums_with_dout`` does."""
    rows, dout = (present(scores.subproblem.tensors, tensor)[:, :, queries] for tensor in (name, "dout"))
    return scores.of_rows(_C.delta(rows, dout))


def _product_tangents(scores: Scores, rows: Rows, keys: slice) -> Tensor | None:
    k, k_tangent = scores.key_rows("k", keys), scores.key_rows("k_tangent", keys)
    if rows.both is not None:
        assert k_tangent is not None
        return row_products(rows.both, torch.cat([k, k_tangent], dim=-1))
    if rows.q_tangent is not None:
        return row_products(rows.q_tangent, k)
    return None if k_tangent is None else row_products(rows.q, k_tangent)


def _as_arguments(scores: Scores, rows: Rows, keys: slice, tile: PlainTile) -> tuple[Any, ...]:
    """The first arguments of both kernels."""
    left, right = scores.window
    diagonal = rows.queries.start + scores.diagonal - keys.start
    visible = diagonal - left, diagonal + right + 1
    num_queries = rows.queries.stop - rows.queries.start
    return tile.products, tile.tangents, rows.lse, scores.scale, visible, num_queries, tile_dtype(rows.q)


def _blind_queries(scores: Scores, queries: slice, keys: slice) -> Tensor | None:
    """(1, 1, queries, 1), True for queries that see no key of the tile; None if there are none."""
    left, right = scores.window
    first, end = queries.start + scores.diagonal, queries.stop + scores.diagonal
    if first + right >= keys.start and end - 1 - left < keys.stop:
        return None
    diagonal_keys = torch.arange(first, end, device=scores.problem.q.device)
    blind = (diagonal_keys + right < keys.start) | (diagonal_keys - left >= keys.stop)
    return blind[None, None, :, None]
