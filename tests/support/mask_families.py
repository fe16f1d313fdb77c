"""The families of flash_attn_ext.masks, each with what hypothesis draws for it and with its definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flash_attn_ext import masks, reference
from flash_attn_ext.masks import Intervals

SIZES = st.integers(0, 13)


@dataclass(frozen=True)
class Drawn:
    intervals: Intervals
    definition: reference.MaskMod
    batch: int
    queries: int
    keys: int


def dense(definition: reference.MaskMod, batch: int, queries: int, keys: int, device: str) -> torch.Tensor:
    """(batch, 1, queries, keys), by broadcasting positions."""
    b = torch.arange(batch, device=device)[:, None, None, None]
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    return definition(b, torch.zeros_like(b), i, j).expand(batch, 1, queries, keys)


def _tensor(draw: Callable, device: str, values: st.SearchStrategy, *shape: int) -> torch.Tensor:
    numbers = draw(st.lists(values, min_size=(count := torch.Size(shape).numel()), max_size=count))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(numbers, dtype=dtype, device=device).view(shape)


def _shared_by_batch(draw: Callable, table: torch.Tensor) -> torch.Tensor:
    """(batch, ...), or without that dimension where the batch is 1."""
    return table[0] if len(table) == 1 and draw(st.booleans()) else table


def _causal(draw, device, batch, tokens):
    return masks.causal(tokens, device=device), reference.MASKS["causal"](), 1, tokens, tokens


def _window(draw, device, batch, tokens):
    left, right = draw(SIZES | st.none()), draw(SIZES | st.none())
    window = left if left == right and left is not None else (left, right)
    definition = reference.MASKS["window"](*(tokens if side is None else side for side in (left, right)))
    return masks.window(tokens, window, device=device), definition, 1, tokens, tokens


def _documents(draw, device, batch, tokens):
    ids = _tensor(draw, device, st.integers(-1, 2), batch, tokens)
    intervals = masks.documents(_shared_by_batch(draw, ids))
    return intervals, reference.MASKS["documents"](ids), batch, tokens, tokens


def _prefix_lm(draw, device, batch, tokens):
    lengths = _tensor(draw, device, SIZES, batch)
    given = int(lengths[0]) if batch == 1 else lengths
    return masks.prefix_lm(tokens, given, device=device), reference.MASKS["prefix_lm"](lengths), batch, tokens, tokens


def _chunked(draw, device, batch, tokens):
    size, offset = draw(st.integers(1, 6)), _tensor(draw, device, SIZES, batch)
    given = int(offset[0]) if batch == 1 else offset
    intervals = masks.chunked(tokens, size, offset=given, device=device)
    return intervals, reference.MASKS["chunked"](size, offset), batch, tokens, tokens


def _blocks_within_causal(draw, device, batch, tokens):
    ids = _tensor(draw, device, st.integers(-1, 2), batch, tokens)
    intervals = masks.blocks_within_causal(_shared_by_batch(draw, ids))
    return intervals, reference.MASKS["blocks_within_causal"](ids), batch, tokens, tokens


def _block_causal(draw, device, batch, tokens):
    size = draw(st.integers(1, 6))
    return masks.block_causal(tokens, size, device=device), reference.MASKS["block_causal"](size), 1, tokens, tokens


def _global_and_window(draw, device, batch, tokens):
    num_global, left, right = draw(SIZES), draw(SIZES | st.none()), draw(SIZES | st.none())
    intervals = masks.global_and_window(tokens, num_global, (left, right), device=device)
    sides = (tokens if side is None else side for side in (left, right))
    return intervals, reference.MASKS["global_and_window"](num_global, *sides), 1, tokens, tokens


def _shared_prefix(draw, device, batch, tokens):
    branches = _tensor(draw, device, st.integers(-1, 2), batch, tokens)
    intervals = masks.shared_prefix(_shared_by_batch(draw, branches))
    return intervals, reference.MASKS["shared_prefix"](branches), batch, tokens, tokens


def _block_diffusion(draw, device, batch, tokens):
    size = draw(st.integers(1, 6))
    definition = reference.MASKS["block_diffusion"](max(tokens, 1), size)
    return masks.block_diffusion(tokens, size, device=device), definition, 1, 2 * tokens, 2 * tokens


def _padding(side):
    def make(draw, device, batch, tokens):
        lengths = _tensor(draw, device, SIZES, batch)
        given = int(lengths[0]) if batch == 1 else lengths
        definition = reference.MASKS[f"padding_{side}"](tokens, lengths)
        return masks.padding(tokens, given, side, device=device), definition, batch, tokens, tokens

    return make


def _tree(draw, device, batch, tokens):
    """A branch may leave the main chain anywhere: three intervals, with the prefix."""
    rows = []
    for _ in range(batch):
        chain = draw(st.integers(0, tokens))
        side = draw(st.integers(-1, max(chain - 1, -1)))
        rows.append([i - 1 if i != chain else side for i in range(tokens)])
    parents = torch.tensor(rows, dtype=torch.int64, device=device).view(batch, tokens)
    prefix = _tensor(draw, device, SIZES, batch)
    given = int(prefix[0]) if batch == 1 else prefix
    intervals = masks.tree(_shared_by_batch(draw, parents), prefix=given)
    return intervals, reference.MASKS["tree"](parents, prefix), batch, tokens, int(prefix.max()) + tokens


FAMILIES = {
    "causal": _causal,
    "window": _window,
    "documents": _documents,
    "prefix_lm": _prefix_lm,
    "chunked": _chunked,
    "blocks_within_causal": _blocks_within_causal,
    "block_causal": _block_causal,
    "global_and_window": _global_and_window,
    "shared_prefix": _shared_prefix,
    "block_diffusion": _block_diffusion,
    "padding_left": _padding("left"),
    "padding_right": _padding("right"),
    "tree": _tree,
}
INTERVALS_OF_TWO = ("global_and_window", "shared_prefix", "block_diffusion")


def draw_family(name: str, draw: Callable, device: str, least: int = 0) -> Drawn:
    """least: of tokens."""
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(least, 13))
    return Drawn(*FAMILIES[name](draw, device, batch, tokens))
