"""A tile of scores of a `Subproblem`, and its tangents: every feature's effect on both, written once.

Query heads that share a key head are rows of one product: a tile is (pairs, group * queries, keys), where a pair is a
batch entry and a key head. Features that differ by query head (bias, slopes, dropout) see it as (batch, heads, queries,
keys), which has the same layout in memory.

    u = scale * q . k               S = c * tanh(u / c) - slope * distance + bias       P = exp(S - lse)
    du = scale * (dq . k + q . dk)  dS = tanh'(u / c) * du - dslope * distance + dbias
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from flash_attn_ext._call.problem import Problem, accumulate_dtype, block_size
from flash_attn_ext.derivatives import dropout_bits
from flash_attn_ext.derivatives.kinds import tangent_name
from flash_attn_ext.derivatives.products import add_row_products, row_products
from flash_attn_ext.derivatives.scratch import Scratch
from flash_attn_ext.derivatives.subproblems import Subproblem, TileSize, blocks, tile_size


class Scores(NamedTuple):
    """The data that all tiles of a `Subproblem` share."""

    problem: Problem
    subproblem: Subproblem
    scratch: Scratch
    are_plain: bool  # whether plain_tiles.py has their tiles

    @property
    def accumulate(self) -> torch.dtype:
        return accumulate_dtype(self.problem.q.dtype)

    @property
    def scale(self) -> float:
        return max(self.problem.q.size(-1), 1) ** -0.5 if self.problem.scale is None else self.problem.scale

    @property
    def rescale(self) -> float:
        """The factor of weights that dropout keeps."""
        return 1 / (1 - self.problem.dropout_p)

    @property
    def diagonal(self) -> int:
        return 0 if self.problem.causal == "top_left" else self.subproblem.num_keys - self.subproblem.num_queries

    @property
    def window(self) -> tuple[int, int]:
        """How many keys before and after its diagonal key a query sees."""
        everything = self.subproblem.num_queries + self.subproblem.num_keys
        left, right = self.problem.window_left, self.problem.window_right
        if self.problem.causal is not None:
            right = 0
        return everything if left is None else left, everything if right is None else right

    @property
    def tile_size(self) -> TileSize:
        return tile_size(self.problem.q.device.type, self.subproblem.selection.group)

    def query_blocks(self) -> Iterator[slice]:
        return blocks(0, self.subproblem.num_queries, self.tile_size.queries)

    def key_blocks(self, queries: slice) -> Iterator[slice]:
        """The blocks of the keys that any of the queries sees by causality and window."""
        left, right = self.window
        begin = max(queries.start + self.diagonal - left, 0)
        end = min(queries.stop + self.diagonal + right, self.subproblem.num_keys)
        return blocks(begin, end, self.tile_size.keys)

    @overload
    def query_rows(self, name: Literal["q", "out", "dout"], queries: slice) -> Tensor: ...
    @overload
    def query_rows(self, name: str, queries: slice) -> Tensor | None: ...
    def query_rows(self, name: str, queries: slice) -> Tensor | None:
        """(pairs, group * queries, columns)."""
        tensor = self.subproblem.tensors[name]
        return None if tensor is None else self._of_pairs(tensor[:, :, queries], tensor.size(3))

    @overload
    def key_rows(self, name: Literal["k", "v"], keys: slice) -> Tensor: ...
    @overload
    def key_rows(self, name: str, keys: slice) -> Tensor | None: ...
    def key_rows(self, name: str, keys: slice) -> Tensor | None:
        """(pairs, keys, columns)."""
        tensor = self.subproblem.tensors[name]
        return None if tensor is None else tensor[:, :, keys].flatten(0, 1)

    def products(self, a: Tensor, b: Tensor, factor: float = 1.0, minus: Tensor | None = None) -> Tensor:
        """A tile of :func:`row_products`, in scratch memory."""
        return row_products(a, b, factor, minus, out=self.scratch.take(a.size(0), a.size(1), b.size(1)))

    @overload
    def statistic(self, name: Literal["lse"], queries: slice) -> Tensor: ...
    @overload
    def statistic(self, name: str, queries: slice) -> Tensor | None: ...
    def statistic(self, name: str, queries: slice) -> Tensor | None:
        """(pairs, group * queries, 1)."""
        tensor = self.subproblem.tensors[name]
        return None if tensor is None else self.of_rows(tensor[:, :, queries])

    def of_rows(self, statistic: Tensor) -> Tensor:
        """(batch, heads, queries) -> (pairs, group * queries, 1)."""
        return self._of_pairs(statistic, 1).contiguous()

    def _of_pairs(self, by_head: Tensor, columns: int) -> Tensor:
        """(batch, heads, queries, ...) -> (pairs, group * queries, columns)."""
        group = self.subproblem.selection.group
        pairs = self.subproblem.num_batches * (self.subproblem.num_heads // group)
        return by_head.reshape(pairs, group * by_head.size(2), columns)

    def by_head(self, rows: Tensor) -> Tensor:
        """(pairs, group * queries, columns) -> (batch, heads, queries, columns)."""
        batch, heads = self.subproblem.num_batches, self.subproblem.num_heads
        return rows.view(batch, heads, rows.size(1) // self.subproblem.selection.group, rows.size(2))


class Rows(NamedTuple):
    """The rows of q of one block of queries, and their LSE, which is 0 for a row that sees nothing.

    both: for plain tiles, q_tangent and q side by side if k has a tangent too; else None.
    """

    queries: slice
    q: Tensor
    q_tangent: Tensor | None
    both: Tensor | None
    lse: Tensor
    lse_residual: Tensor | None


def rows_of(scores: Scores, queries: slice) -> Rows:
    lse = scores.statistic("lse", queries)
    q, q_tangent = scores.query_rows("q", queries), scores.query_rows("q_tangent", queries)
    both = None
    if scores.are_plain and q_tangent is not None and scores.subproblem.tensors["k_tangent"] is not None:
        both = torch.cat([q_tangent, q], dim=-1)
    return Rows(
        queries,
        q,
        q_tangent,
        both,
        lse.masked_fill(lse == -torch.inf, 0),
        scores.statistic("lse_residual", queries),
    )


class Tile(NamedTuple):
    """All tensors are (pairs, group * queries, keys), except those that are by head.

    p: weights before dropout. score_tangent: dS minus `less` of :func:`tile_of`. All of these are 0 where hidden.
    u_tangent: du, None if there is none, and without a softcap. cap: tanh(u / c), None without a softcap. hidden, kept:
    bool by head, broadcastable; None if everything is seen, or kept.
    """

    p: Tensor
    score_tangent: Tensor
    u_tangent: Tensor | None
    cap: Tensor | None
    hidden: Tensor | None
    kept: Tensor | None


class Gradient(NamedTuple):
    """The data of a block of queries in the backward pass; delta and its tangent are per row."""

    dout: Tensor
    delta: Tensor
    delta_tangent: Tensor
    lse_tangent: Tensor


class TileGradients(NamedTuple):
    """The factors of a tile's products in the backward pass, with the names of backward_tangents.py.

    weight_tangents: Z P', None if it is not wanted. product_gradients, their_tangents: du, du'; the first is None if
    nothing is multiplied by it. hidden: as in Tile. It may also be broadcastable to that, if it hides no pair that is
    seen, and still tells which queries see no key of the tile, and which keys no query sees.
    """

    weight_tangents: Tensor | None
    product_gradients: Tensor | None
    their_tangents: Tensor
    hidden: Tensor | None


def tile_of(scores: Scores, rows: Rows, keys: slice, less: Tensor | None = None) -> Tile:
    """`less`, (pairs, group * queries, 1), is subtracted from the tangents of scores."""
    problem, k = scores.problem, scores.key_rows("k", keys)
    block = rows.queries, keys
    distance = _distance(scores, *block)
    cap = None
    if problem.softcap is not None:
        cap = scores.products(rows.q, k, scores.scale / problem.softcap).tanh_()
        score = cap * problem.softcap if problem.bias is not None else torch.add(-rows.lse, cap, alpha=problem.softcap)
    elif problem.bias is not None:  # is added first: an LSE of its size would round the product away
        score = scores.products(rows.q, k, scores.scale)
    else:
        score = scores.products(rows.q, k, scores.scale, minus=rows.lse)
    p = _weights(scores, rows, score, distance, keys)
    u_tangent = None
    if cap is None:
        score_tangent = _product_tangents(scores, rows, keys, less)
    else:
        u_tangent = _product_tangents(scores, rows, keys, None)
        score_tangent = None if u_tangent is None else slope_of_cap(cap).mul_(u_tangent)
        if score_tangent is not None and less is not None:
            score_tangent.sub_(less)
    if score_tangent is None:
        score_tangent = torch.zeros_like(p) if less is None else -less.expand(p.shape)
    _add_slopes_and_bias(scores, scores.by_head(score_tangent), block, distance, of_tangents=True)
    hidden = hidden_scores(scores, *block)
    if hidden is not None:  # hidden elements may be NaN
        for tensor in (p, score_tangent, u_tangent, cap):
            if tensor is not None:
                scores.by_head(tensor).masked_fill_(hidden, 0)
    return Tile(p, score_tangent, u_tangent, cap, hidden, _kept(scores, *block))


def _product_tangents(scores: Scores, rows: Rows, keys: slice, less: Tensor | None) -> Tensor | None:
    """Returns du - less; None if neither q nor k has a tangent."""
    k, k_tangent = scores.key_rows("k", keys), scores.key_rows("k_tangent", keys)
    if rows.q_tangent is None:
        return None if k_tangent is None else scores.products(rows.q, k_tangent, scores.scale, minus=less)
    found = scores.products(rows.q_tangent, k, scores.scale, minus=less)
    return found if k_tangent is None else add_row_products(found, rows.q, k_tangent, scores.scale)


def slope_of_cap(cap: Tensor) -> Tensor:
    """Computes tanh'(u / c) from tanh(u / c)."""
    return 1 - cap.square()


def _weights(scores: Scores, rows: Rows, score: Tensor, distance: Tensor | None, keys: slice) -> Tensor:
    """Computes exp(S - lse) in place. Scores with a bias have the LSE still to be subtracted. Nothing is hidden yet."""
    _add_slopes_and_bias(scores, scores.by_head(score), (rows.queries, keys), distance, of_tangents=False)
    if scores.problem.bias is not None:
        assert rows.lse_residual is not None  # comes with every bias
        score.sub_(rows.lse).sub_(rows.lse_residual)
    return score.exp_()


def _add_slopes_and_bias(
    scores: Scores, to: Tensor, block: tuple[slice, slice], distance: Tensor | None, *, of_tangents: bool
) -> None:
    """Adds to scores by head the terms that are linear in slopes and bias. Tangents have the same terms."""
    names = ("alibi_slopes", "bias")
    slopes, bias = (scores.subproblem.tensors[tangent_name(name) if of_tangents else name] for name in names)
    if slopes is not None:
        assert distance is not None  # comes with all slopes
        to.addcmul_(slopes[..., None, None], distance.expand(to.shape), value=-1)
    if bias is not None:
        to.add_(of_block(bias, *block))


def of_block(table: Tensor, queries: slice, keys: slice) -> Tensor:
    """The block of a table whose dimensions are 1 or full."""
    return table[:, :, queries if table.size(2) > 1 else slice(None), keys if table.size(3) > 1 else slice(None)]


def _offsets(scores: Scores, queries: slice, keys: slice) -> Tensor:
    """Returns key - (query + diagonal), (queries, keys)."""
    device = scores.problem.q.device
    diagonal_keys = torch.arange(queries.start, queries.stop, device=device) + scores.diagonal
    return torch.arange(keys.start, keys.stop, device=device) - diagonal_keys[:, None]


def _distance(scores: Scores, queries: slice, keys: slice) -> Tensor | None:
    """The distances by which slopes are multiplied; None without slopes."""
    return None if scores.problem.alibi_slopes is None else distance_of(scores, queries, keys)


def distance_of(scores: Scores, queries: slice, keys: slice) -> Tensor:
    return _offsets(scores, queries, keys).abs().to(scores.accumulate)


def hidden_scores(scores: Scores, queries: slice, keys: slice) -> Tensor | None:
    """By head, True = not seen; None when all is seen."""
    hidden = None
    left, right = scores.window
    first = keys.start - (queries.stop - 1 + scores.diagonal)
    last = keys.stop - 1 - (queries.start + scores.diagonal)
    if first < -left or last > right:
        offsets = _offsets(scores, queries, keys)
        hidden = ((offsets < -left) | (offsets > right))[None, None]
    mask, bias = scores.subproblem.tensors["mask"], scores.subproblem.tensors["bias"]
    if mask is not None:
        masked = ~of_block(mask, queries, keys)
        hidden = masked if hidden is None else hidden | masked
    intervals = scores.subproblem.tensors["intervals"]
    if intervals is not None:
        masked = ~_in_intervals(intervals[:, :, queries], keys)
        hidden = masked if hidden is None else hidden | masked
    blocks = scores.subproblem.tensors["blocks"]
    if blocks is not None:
        masked = ~_in_blocks(scores, blocks, queries, keys)
        hidden = masked if hidden is None else hidden | masked
    if bias is not None:
        masked = of_block(bias, queries, keys) == -torch.inf
        hidden = masked if hidden is None else hidden | masked
    return hidden


def _in_intervals(intervals: Tensor, keys: slice) -> Tensor:
    """Which keys the intervals (..., queries, 2 n) have: (..., queries, keys)."""
    positions = torch.arange(keys.start, keys.stop, device=intervals.device)
    seen = torch.zeros((), dtype=torch.bool, device=intervals.device)
    for column in range(0, intervals.size(-1), 2):
        begin, end = intervals[..., column, None], intervals[..., column + 1, None]
        seen = seen | ((begin <= positions) & (positions < end))
    return seen


def _in_blocks(scores: Scores, blocks: Tensor, queries: slice, keys: slice) -> Tensor:
    """Which keys the blocks (..., query blocks, key blocks) have: (..., queries, keys)."""
    lengths = scores.subproblem.num_queries, scores.subproblem.num_keys
    for dim, of_dim, length in ((-2, queries, lengths[0]), (-1, keys, lengths[1])):
        size = block_size(blocks.size(dim), length)
        positions = torch.arange(of_dim.start, of_dim.stop, device=blocks.device)
        blocks = blocks.index_select(dim, positions // size)
    return blocks


def _kept(scores: Scores, queries: slice, keys: slice) -> Tensor | None:
    problem, selection = scores.problem, scores.subproblem.selection
    if problem.dropout_p == 0:
        return None
    assert problem.rng_seed is not None  # comes with dropout
    return dropout_bits.kept(
        problem.rng_seed, problem.dropout_p, dropout_bits.Region(selection.batch, selection.heads, queries, keys)
    )


def dropped(scores: Scores, tensor: Tensor, kept: Tensor | None) -> Tensor:
    """The tensor with 0 for dropped weights, and kept ones not rescaled; the tensor itself if nothing is dropped."""
    return tensor if kept is None else scores.by_head(tensor).masked_fill(~kept, 0).view(tensor.shape)


def without_unseen_keys(scores: Scores, rows: Tensor | None, hidden: Tensor | None) -> Tensor | None:
    """Rows (pairs, keys, columns) with 0 for keys that no query of the tile sees, because they may hold NaN."""
    if rows is None or hidden is None:
        return rows
    unseen = _all_of_group(scores, hidden.all(2)).unsqueeze(-1)
    of_pairs = rows.unflatten(0, (scores.subproblem.num_batches, -1))
    return of_pairs.masked_fill(unseen, 0).flatten(0, 1)


def without_blind_queries(scores: Scores, rows: Tensor | None, hidden: Tensor | None) -> Tensor | None:
    """Rows (pairs, group * queries, columns) with 0 for queries that see no key of the tile, which may hold NaN."""
    if rows is None or hidden is None:
        return rows
    return scores.by_head(rows.contiguous()).masked_fill(hidden.all(3, keepdim=True), 0).view(rows.shape)


def _all_of_group(scores: Scores, hidden: Tensor) -> Tensor:
    """(batch|1, heads|1, keys|1) -> (batch|1, key heads|1, keys|1): True if it is for all query heads of a key head."""
    if hidden.size(1) == 1:
        return hidden
    return hidden.unflatten(1, (-1, scores.subproblem.selection.group)).all(2)
