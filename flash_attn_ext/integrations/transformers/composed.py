"""Makes intervals of keys for mask functions that are more than causality, a window or packed sequences.

transformers composes mask functions from a few builders with "and" and "or". Those are translated part by part into
flash_attn_ext.masks. Any other function, such as the user's own, is evaluated for every pair, a block of rows at a
time.
"""

from __future__ import annotations

import functools
import operator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_ext import masks
from flash_attn_ext.integrations.transformers.patterns import begin_together, sequences_of
from flash_attn_ext.integrations.transformers.private_names import (
    AND_MASKS,
    BIDIRECTIONAL_WINDOW,
    BLOCKS,
    CHUNKS,
    OR_MASKS,
    PACKED,
    PADDING,
    REMAPPED,
    WINDOW,
    bidirectional_mask_function,
    built_of,
    causal_mask_function,
)
from flash_attn_ext.integrations.transformers.requests import Request, dense, kept_keys
from flash_attn_ext.masks import Intervals
from flash_attn_ext.masks.converters import by_blocks


def intervals_of(request: Request) -> Intervals | None:
    """(batch or 1, 1, q_length, 2n), or None where a row needs more than four intervals. Waits for a GPU."""
    # Parts may need more intervals than the whole has, so the whole is evaluated if translating fails. An error of the
    # user's own function is not lost: making the boolean mask raises it again.
    for make in (_built, _evaluated):
        with suppress(ValueError):
            intervals = make(request)
            if intervals is not None:
                return intervals
    return None


def _built(request: Request) -> Intervals | None:
    """Translates what transformers has built; None if a part is anything else."""
    begin, end = int(request.q_offset), int(request.q_offset) + request.q_length
    tokens = max(end, request.kv_offset + request.kv_length)
    seen = _of_function(request.mask_function, _Row(tokens, torch.device(request.device)))
    if seen is None:
        return None
    bounds = seen.tensor[:, :, begin:end] - request.kv_offset
    seen = Intervals(bounds.clamp(0, request.kv_length))
    keep = kept_keys(request, request.kv_length)
    return seen if keep is None else seen & _of_keys(keep, request.q_length)


def _evaluated(request: Request) -> Intervals:
    def evaluate(begin: int, end: int) -> Tensor:
        return dense(request._replace(q_length=end - begin, q_offset=request.q_offset + begin))

    shape = (request.batch_size, 1, request.q_length, request.kv_length)
    return by_blocks(evaluate, shape, torch.device(request.device))


class _Row(NamedTuple):
    """The tokens of a row, for which intervals are made: as queries and as keys, the first of each at 0."""

    tokens: int
    device: torch.device
    sequences: Tensor | None = None  # (batch, tokens), where queries see keys of their own packed sequence only
    positions: Tensor | None = None  # (batch, tokens), where a token's position is that in its packed sequence


def _of_function(function: Any, row: _Row) -> Intervals | None:
    if function is causal_mask_function:  # in packed sequences too: in each, positions rise with the tokens
        return masks.causal(row.tokens, device=row.device)
    if function is bidirectional_mask_function:
        return masks.window(row.tokens, (None, None), device=row.device)
    built = built_of(function)
    if built is None:
        return None
    builder, values = built
    if builder == WINDOW:
        return masks.window(row.tokens, (values[0] - 1, None), device=row.device)
    if builder == BIDIRECTIONAL_WINDOW:
        return masks.window(row.tokens, values[0], device=row.device)
    if builder == CHUNKS:
        size, left_padding = values
        return _of_chunks(size, left_padding, row)
    if builder in (AND_MASKS, OR_MASKS):
        return _of_parts(builder, values[0], row)
    if builder == REMAPPED:
        inner, positions = values
        return _of_positions(inner, positions, row)
    if builder == BLOCKS:
        ids = values[0]
        if row.positions is not None:
            ids = _looked_up(ids, row.positions)
        return None if ids is None else _of_groups(ids, row, is_in_none=ids < 0)
    if row.positions is not None:
        return None  # nothing else looks up tokens by their positions
    if builder == PACKED:
        return _of_groups(values[0], row)
    if builder == PADDING:
        return _of_keys(values[0][:, : row.tokens], row.tokens)
    return None


def _of_positions(function: Any, positions: Tensor, row: _Row) -> Intervals | None:
    """A mask function of positions instead of tokens. Those of other sequences may be the same, so this needs the
    intersection with packed sequences, within which positions count the tokens."""
    if row.sequences is None or positions.shape[-1] != row.tokens or not begin_together(row.sequences, positions):
        return None
    return _of_function(function, row._replace(positions=positions))


def _of_parts(builder: str, parts: Any, row: _Row) -> Intervals | None:
    is_union = builder == OR_MASKS
    sequences = None if is_union else sequences_of(parts)
    if sequences is not None:
        row = row._replace(sequences=sequences)
    found = [_of_function(part, row) for part in parts]
    if not found or None in found:
        return None
    return functools.reduce(operator.or_ if is_union else operator.and_, found)


def _of_chunks(size: int, left_padding: Tensor, row: _Row) -> Intervals:
    """A token sees its whole chunk; chunks are counted from behind the left padding."""
    at = torch.arange(row.tokens, device=row.device)[None] if row.positions is None else row.positions
    chunks = (at - left_padding.to(row.device)[:, None]).div(size, rounding_mode="floor")
    return masks.documents(chunks - chunks.amin(-1, keepdim=True))


def _of_groups(ids: Tensor, row: _Row, is_in_none: Tensor | None = None) -> Intervals | None:
    """Tokens with the same id see one another, except those that are in no group. None where those of an id do not lie
    side by side."""
    if ids.dim() != 2 or ids.shape[1] < row.tokens or ids.is_floating_point() or ids.dtype == torch.bool:
        return None
    ids = ids[:, : row.tokens].long()
    ids = ids - ids.amin(-1, keepdim=True)
    if is_in_none is not None:
        ids = ids.masked_fill(is_in_none[:, : row.tokens], -1)
    # Each token of no group counts as a group of its own.
    groups = torch.where(ids < 0, -1 - torch.arange(row.tokens, device=ids.device), ids)
    num_runs, num_ids = ((each.diff() != 0).sum(-1) for each in (groups, groups.sort(-1).values))
    return masks.documents(ids) if bool((num_runs == num_ids).all()) else None


def _looked_up(ids: Tensor, positions: Tensor) -> Tensor | None:
    """The ids that tokens of packed sequences find at their positions, different from sequence to sequence. None where
    a position has none."""
    least, most = positions.aminmax()
    if int(least) < 0 or int(most) >= ids.shape[1]:
        return None
    found = ids.expand(positions.shape[0], -1).gather(1, positions)
    sequence = torch.nn.functional.pad(positions.diff() != 1, (1, 0)).cumsum(1)
    return torch.where(found < 0, -1, found + sequence * (found.amax() + 1))


def _of_keys(keep: Tensor, num_queries: int) -> Intervals:
    """Every query sees the keys of ``keep``, (batch, keys) bool."""
    seen = masks.from_mask(keep[:, None, None, :])
    return Intervals(seen.tensor.expand(-1, -1, num_queries, -1))
