"""The derivative of the backward pass along tangents of its inputs, for a fixed dout and dlse, in one pass over tiles.

It is the double backward and forward-over-reverse (see the package's docstring). With P, u and dS of tiles.py written
S', Z the factors of dropout, Delta = rowsum(dout * out) - dlse, and primes for tangents (out' and lse' are those of
forward_tangents.py):

    P' = P (S' - lse')                     G = Z dout V^T              G' = Z dout V'^T
    dS = P (G - Delta)                     dS' = P' (G - Delta) + P (G' - Delta')       Delta' = rowsum(dout * out')
    du = tanh' dS                          du' = tanh' dS' + tanh'' u' dS
    dq' = scale (du' K + du K')            dk' = scale (du'^T Q + du^T Q')              dv' = (Z P')^T dout
    dbias' = sum dS'    dslope' = -sum distance dS'    dsink' = -sum exp(sink - lse) ((sink' - lse') Delta + Delta')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext._call.canonical import without_autocast
from flash_attn_ext._call.problem import Problem, accumulate_dtype
from flash_attn_ext.derivatives import plain_tiles
from flash_attn_ext.derivatives.forward_tangents import WeightedTile, of_sink, sink_weights, tangents_of_queries
from flash_attn_ext.derivatives.products import add_sums, add_transposed_sums
from flash_attn_ext.derivatives.scratch import Scratch
from flash_attn_ext.derivatives.subproblems import RESULT, present, subproblems_of
from flash_attn_ext.derivatives.tiles import (
    Gradient,
    Rows,
    Scores,
    Tile,
    TileGradients,
    distance_of,
    dropped,
    of_block,
    rows_of,
    slope_of_cap,
    tile_of,
    without_blind_queries,
    without_unseen_keys,
)

# The most tiles of a block of queries that are kept between the two passes over its keys. If there are more, they are
# recomputed.
MOST_KEPT_TILES = 4


def backward_tangents(
    problem: Problem,
    saved: dict[str, Tensor | None],
    tangents: dict[str, Tensor | None],
    wanted: tuple[str, ...],
) -> tuple[Tensor, ...]:
    """Tangents of the gradients of the inputs that are `wanted`, in their shapes and dtypes.

    saved: out, lse, lse_residual, dout, dlse, out_tangent, lse_tangent. tangents: as for ``forward_tangents``. If the
    last two of `saved` are absent, they are computed, and come before the other results.
    """
    accumulate = accumulate_dtype(problem.q.dtype)
    results: dict[str, Any] = {
        RESULT + name: torch.zeros_like(getattr(problem, name), dtype=accumulate) for name in wanted
    }
    left: dict[str, Any] = {}
    if saved["out_tangent"] is None:
        left = {RESULT + name: torch.zeros_like(present(saved, name)) for name in ("out", "lse")}
    scratch = Scratch(accumulate, problem.q.device)
    are_plain = plain_tiles.are_plain(problem, saved | tangents)
    with without_autocast(problem.q.device):
        for subproblem in subproblems_of(problem, saved | tangents | results | left):
            scores = Scores(problem, subproblem, scratch, are_plain)
            for queries in scores.query_blocks():
                with scratch.reused():
                    _of_queries(scores, queries)
    return *left.values(), *(results[RESULT + name].to(getattr(problem, name).dtype) for name in wanted)


def _of_queries(scores: Scores, queries: slice) -> None:
    rows = rows_of(scores, queries)
    tiles: Sequence[tuple[slice, Any]] = ()
    if RESULT + "out" in scores.subproblem.tensors:
        keep = len(list(scores.key_blocks(queries))) <= MOST_KEPT_TILES
        tiles = tangents_of_queries(scores, queries, keep=keep)
    gradient = _gradient_of(scores, queries)
    if RESULT + "sink" in scores.subproblem.tensors:
        _add_to_sink(scores, queries, gradient)
    dq = None  # without the scale
    if RESULT + "q" in scores.subproblem.tensors:
        dq = torch.zeros_like(rows.q, dtype=scores.accumulate, memory_format=torch.contiguous_format)
    tile_gradients = plain_tiles.tile_gradients if scores.are_plain else _tile_gradients
    for keys, tile in tiles or ((keys, None) for keys in scores.key_blocks(queries)):
        with scores.scratch.reused():
            _add_products(scores, rows, keys, tile_gradients(scores, rows, keys, gradient, tile), gradient.dout, dq)
    if dq is not None:
        present(scores.subproblem.tensors, RESULT + "q")[:, :, queries].add_(scores.by_head(dq), alpha=scores.scale)


def _gradient_of(scores: Scores, queries: slice) -> Gradient:
    computed = RESULT + "out" in scores.subproblem.tensors
    out_tangent, lse_tangent = (RESULT + "out", RESULT + "lse") if computed else ("out_tangent", "lse_tangent")
    sums_with_dout = plain_tiles.sums_with_dout if scores.are_plain else _sums_with_dout
    delta, delta_tangent = (sums_with_dout(scores, name, queries) for name in ("out", out_tangent))
    if (dlse := scores.statistic("dlse", queries)) is not None:
        delta -= dlse
    rows_of_lse = scores.of_rows(present(scores.subproblem.tensors, lse_tangent)[:, :, queries])
    return Gradient(scores.query_rows("dout", queries), delta, delta_tangent, rows_of_lse)


def _sums_with_dout(scores: Scores, name: str, queries: slice) -> Tensor:
    """Returns rowsum(dout * rows of that name)."""
    dout, rows = scores.query_rows("dout", queries), scores.query_rows(name, queries)
    assert rows is not None, name
    return (dout.to(scores.accumulate) * rows.to(scores.accumulate)).sum(-1, keepdim=True)


def _tile_gradients(
    scores: Scores, rows: Rows, keys: slice, gradient: Gradient, kept: WeightedTile | None
) -> TileGradients:
    """The factors of a tile's products. It also adds to the tangents of bias and slopes, which need no product. `kept`:
    the tile, if it was kept."""
    if kept is None:
        tile = tile_of(scores, rows, keys, less=gradient.lse_tangent)
        p_tangent = tile.score_tangent.mul_(tile.p)
    else:
        tile, weighted = kept
        p_tangent = weighted.addcmul_(tile.p, gradient.lse_tangent.expand(tile.p.shape), value=-1)
    score_gradient, its_tangent = _score_gradients(scores, keys, gradient, tile, p_tangent)
    results = scores.subproblem.tensors
    if RESULT + "bias" in results:
        _add_to_table(present(results, RESULT + "bias"), rows.queries, keys, scores.by_head(its_tangent))
    if RESULT + "alibi_slopes" in results:
        by_distance = (scores.by_head(its_tangent) * distance_of(scores, rows.queries, keys)).sum((2, 3))
        slopes = present(results, RESULT + "alibi_slopes")
        slopes.sub_(by_distance if slopes.size(0) > 1 else by_distance.sum(0, keepdim=True))
    if tile.cap is not None:
        assert scores.problem.softcap is not None
        slope = slope_of_cap(tile.cap)
        its_tangent.mul_(slope)
        if tile.u_tangent is not None:
            # tanh'' = -2 tanh tanh'
            bend = (tile.cap * slope).mul_(tile.u_tangent).mul_(-2 / scores.problem.softcap)
            its_tangent.addcmul_(bend, score_gradient)
        score_gradient.mul_(slope)
    weight_tangents = dropped(scores, p_tangent, tile.kept) if RESULT + "v" in results else None
    return TileGradients(weight_tangents, score_gradient, its_tangent, tile.hidden)


def _score_gradients(
    scores: Scores, keys: slice, gradient: Gradient, tile: Tile, p_tangent: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns dS and dS'."""
    weight_gradient = _weight_gradient(scores, gradient, "v", keys, tile)
    if scores.subproblem.tensors["v_tangent"] is not None:
        its_tangent = _weight_gradient(scores, gradient, "v_tangent", keys, tile).mul_(tile.p)
    else:
        its_tangent = torch.mul(tile.p, -gradient.delta_tangent, out=scores.scratch.take(*tile.p.shape))
    its_tangent.addcmul_(p_tangent, weight_gradient)
    score_gradient = weight_gradient.mul_(tile.p)
    if tile.hidden is not None:
        for tensor in (score_gradient, its_tangent):
            scores.by_head(tensor).masked_fill_(tile.hidden, 0)
    return score_gradient, its_tangent


def _weight_gradient(scores: Scores, gradient: Gradient, name: str, keys: slice, tile: Tile) -> Tensor:
    """Returns G - Delta for "v", and G' - Delta' for "v_tangent"."""
    delta = gradient.delta if name == "v" else gradient.delta_tangent
    rows = scores.key_rows(name, keys)
    assert rows is not None, name
    if tile.kept is None:
        return scores.products(gradient.dout, rows, minus=delta)
    return dropped(scores, scores.products(gradient.dout, rows, scores.rescale), tile.kept).sub_(delta)


def _add_products(
    scores: Scores, rows: Rows, keys: slice, tile: TileGradients, dout: Tensor, dq: Tensor | None
) -> None:
    """Adds to those of dv', dk' and dq' that are wanted."""
    results = scores.subproblem.tensors
    if RESULT + "v" in results:
        seeing = without_blind_queries(scores, dout, tile.hidden)
        _add_to_keys(scores, "v", keys, [(tile.weight_tangents, seeing)], scores.rescale)
    if dq is not None:
        k, k_tangent = (
            without_unseen_keys(scores, scores.key_rows(name, keys), tile.hidden) for name in ("k", "k_tangent")
        )
        add_sums(dq, tile.their_tangents, k)
        add_sums(dq, tile.product_gradients, k_tangent)
    if RESULT + "k" in results:
        q, q_tangent = (without_blind_queries(scores, r, tile.hidden) for r in (rows.q, rows.q_tangent))
        terms = [(tile.their_tangents, q), (tile.product_gradients, q_tangent)]
        _add_to_keys(scores, "k", keys, terms, scores.scale)


def _add_to_keys(
    scores: Scores, name: str, keys: slice, terms: list[tuple[Tensor | None, Tensor | None]], factor: float
) -> None:
    """result += factor * sum of weights^T rows."""
    result = present(scores.subproblem.tensors, RESULT + name)[:, :, keys].mT
    total = torch.zeros(result.flatten(0, 1).shape, dtype=scores.accumulate, device=result.device)
    for weights, rows in terms:
        add_transposed_sums(total, rows, weights)
    result.add_(total.view(result.shape), alpha=factor)


def _add_to_table(table: Tensor, queries: slice, keys: slice, by_head: Tensor) -> None:
    """Adds to the table the sums over the dimensions in which it is 1."""
    part = of_block(table, queries, keys)
    broadcast = [dim for dim in range(4) if part.size(dim) == 1 != by_head.size(dim)]
    part.add_(by_head.sum(broadcast, keepdim=True) if broadcast else by_head)


def _add_to_sink(scores: Scores, queries: slice, gradient: Gradient) -> None:
    along = -gradient.lse_tangent
    if (sink_tangent := scores.subproblem.tensors["sink_tangent"]) is not None:
        along = along + of_sink(scores, sink_tangent, queries)
    by_row = sink_weights(scores, queries) * (along * gradient.delta + gradient.delta_tangent)
    present(scores.subproblem.tensors, RESULT + "sink").sub_(scores.by_head(by_row).sum((0, 2, 3)))
