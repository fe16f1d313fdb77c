"""Forward mode: tangents of out and lse in one pass over tiles, in memory that is linear in the lengths.

A GPU has a kernel for most plain problems (csrc/kernels/sm80/tangents/tangents.cuh).

With P and dS of tiles.py, and Z the factors of dropout (0, or 1 / (1 - p)):

    dlse = sum of P dS over keys  +  exp(sink - lse) dsink
    dout = (Z P dS) V + (Z P) dV - dlse out
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import without_autocast
from flash_attn_ext._call.problem import Problem, accumulate_dtype
from flash_attn_ext.derivatives import plain_tiles
from flash_attn_ext.derivatives.kinds import tangent_name
from flash_attn_ext.derivatives.products import add_sums
from flash_attn_ext.derivatives.scratch import Scratch
from flash_attn_ext.derivatives.subproblems import RESULT, present, subproblems_of
from flash_attn_ext.derivatives.tiles import Rows, Scores, Tile, dropped, rows_of, tile_of, without_unseen_keys


class WeightedTile(NamedTuple):
    """A tile with `weighted`, which is P dS, in the memory of the tile's dS."""

    tile: Tile
    weighted: Tensor


def forward_tangents(
    problem: Problem, saved: dict[str, Tensor | None], tangents: dict[str, Tensor | None]
) -> tuple[Tensor, ...]:
    """(out_tangent, lse_tangent), in the shapes and dtypes of out and lse.

    saved: out, lse, lse_residual. tangents: by the names of kinds.TANGENTS, None where there is none.
    """
    are_plain = plain_tiles.are_plain(problem, saved | tangents)
    if are_plain:
        given = (tangents[tangent_name(name)] for name in ("q", "k", "v", "sink"))
        arguments: tuple[Any, ...] = (saved["out"], saved["lse"], *given, problem)
        if (found := _C.attention_tangents(*arguments)) is not None:
            return tuple(found)
    results: dict[str, Any] = {RESULT + name: torch.zeros_like(present(saved, name)) for name in ("out", "lse")}
    scratch = Scratch(accumulate_dtype(problem.q.dtype), problem.q.device)
    with without_autocast(problem.q.device):
        for subproblem in subproblems_of(problem, saved | tangents | results):
            scores = Scores(problem, subproblem, scratch, are_plain)
            for queries in scores.query_blocks():
                tangents_of_queries(scores, queries, keep=False)
    return tuple(results.values())


def tangents_of_queries(
    scores: Scores, queries: slice, *, keep: bool
) -> list[tuple[slice, WeightedTile | plain_tiles.PlainTile]]:
    """Writes the results of a block of queries. With `keep`, returns its blocks of keys, each with those parts of the
    tile that its gradients need; else an empty list."""
    rows = rows_of(scores, queries)
    out = scores.query_rows("out", queries).to(scores.accumulate)
    total, lse_tangent = torch.zeros_like(out), torch.zeros_like(rows.lse)
    add_tangents = plain_tiles.add_tangents if scores.are_plain else _add_tangents
    tiles = []
    for keys in scores.key_blocks(queries):
        with contextlib.nullcontext() if keep else scores.scratch.reused():
            tile = add_tangents(scores, rows, keys, total, lse_tangent)
        if keep:
            tiles.append((keys, tile))
        del tile  # frees its memory before the next one allocates
    if (sink_tangent := scores.subproblem.tensors["sink_tangent"]) is not None:
        lse_tangent += sink_weights(scores, queries) * of_sink(scores, sink_tangent, queries)
    total.mul_(scores.rescale).sub_(lse_tangent * out)
    tensors = scores.subproblem.tensors
    present(tensors, RESULT + "out")[:, :, queries] = scores.by_head(total)
    present(tensors, RESULT + "lse")[:, :, queries] = scores.by_head(lse_tangent).squeeze(-1)
    return tiles


def _add_tangents(scores: Scores, rows: Rows, keys: slice, total: Tensor, lse_tangent: Tensor) -> WeightedTile:
    """Adds a tile's share of (P dS) V + P dV, without dropout's factor, and of dlse."""
    tile = tile_of(scores, rows, keys)
    weighted = tile.score_tangent.mul_(tile.p)
    lse_tangent += weighted.sum(-1, keepdim=True)
    v, v_tangent = (
        without_unseen_keys(scores, scores.key_rows(name, keys), tile.hidden) for name in ("v", "v_tangent")
    )
    add_sums(total, dropped(scores, weighted, tile.kept), v)
    if v_tangent is not None:
        add_sums(total, dropped(scores, tile.p, tile.kept), v_tangent)
    return WeightedTile(tile, weighted)


def of_sink(scores: Scores, sink: Tensor, queries: slice) -> Tensor:
    """(heads,) -> (pairs, group * queries, 1)."""
    subproblem = scores.subproblem
    return scores.of_rows(sink[None, :, None].expand(subproblem.num_batches, -1, queries.stop - queries.start))


def sink_weights(scores: Scores, queries: slice) -> Tensor:
    """Returns exp(sink - lse), the sink's share of a row's weight; it is 0 for a sink of -inf."""
    sink = of_sink(scores, present(scores.subproblem.tensors, "sink"), queries)
    exponent = sink - scores.statistic("lse", queries)
    if (residual := scores.statistic("lse_residual", queries)) is not None:
        exponent = exponent - residual
    return exponent.exp().masked_fill(sink == -torch.inf, 0)
