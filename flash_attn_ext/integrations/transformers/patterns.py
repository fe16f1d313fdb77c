"""The interval of keys that a mask function of transformers stands for."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flash_attn_ext.integrations.transformers.private_names import (
    AND_MASK,
    AND_MASKS,
    BIDIRECTIONAL_WINDOW,
    OR_MASKS,
    PACKED,
    REMAPPED,
    WINDOW,
    bidirectional_mask_function,
    built_of,
    causal_mask_function,
    is_tracing,
)


class Pattern(NamedTuple):
    """A mask function as the interval [query - left, query + right]; None is unbounded."""

    left: int | None = None
    right: int | None = None
    is_packed: bool = False  # queries see keys of their own packed sequence only


def pattern_of(function: Any) -> Pattern | None:
    """The pattern from which transformers built a mask function; None for any other function."""
    if function is causal_mask_function:
        return Pattern(right=0)
    if function is bidirectional_mask_function:
        return Pattern()
    built = built_of(function)
    if built is None:
        return None
    builder, values = built
    if builder == WINDOW:
        return Pattern(left=values[0] - 1)
    if builder == BIDIRECTIONAL_WINDOW:
        return Pattern(values[0], values[0])
    if builder == PACKED:
        return Pattern(is_packed=True)
    if builder == AND_MASKS:
        ids = sequences_of(values[0])
        return _intersection([_within(part, ids) for part in values[0]])
    return None


def _within(function: Any, ids: Tensor | None) -> Pattern | None:
    """The pattern of a part that is intersected with packed sequences. Positions do not change it if they count the
    tokens of each sequence."""
    built = built_of(function)
    if built is None or built.builder != REMAPPED:
        return pattern_of(function)
    inner, positions = built.values
    return pattern_of(inner) if ids is not None and begin_together(ids, positions) else None


def sequences_of(parts: Any) -> Tensor | None:
    """(batch, tokens), the ids of the packed sequences that one of these mask functions keeps apart, or None."""
    found = [built_of(part) for part in parts]
    return next((built.values[0] for built in found if built is not None and built.builder == PACKED), None)


def begin_together(ids: Tensor, positions: Tensor) -> bool:
    """Whether positions rise by one from token to token within each packed sequence. Waits for a GPU. Where values
    cannot be read, the positions are taken for those from which transformers made the ids."""
    if is_tracing(positions):
        return True
    if ids.dim() != 2 or positions.dim() != 2 or ids.shape[1] != positions.shape[1]:
        return False
    is_new = ids.diff().to(positions.device) != 0
    return bool(((positions.diff() == 1) | is_new).all())


def _intersection(patterns: list[Pattern | None]) -> Pattern | None:
    if None in patterns:
        return None
    lefts, rights, packed = zip(*patterns, strict=True)
    left = min((side for side in lefts if side is not None), default=None)
    right = min((side for side in rights if side is not None), default=None)
    return Pattern(left, right, any(packed))


def builders_of(function: Any) -> set[str]:
    """The names of all builders of transformers that take part in a mask function."""
    built = built_of(function)
    if built is None:
        return set()
    return {built.builder}.union(*(builders_of(part) for part in parts_of(function)))


def parts_of(function: Any) -> tuple[Any, ...]:
    """The mask functions from which transformers composed a mask function."""
    built = built_of(function)
    if built is None or built.builder not in (AND_MASKS, OR_MASKS, REMAPPED):
        return ()
    return built.values[:1] if built.builder == REMAPPED else tuple(built.values[0])


def traced_pattern(
    function: Any, local_size: int | None, is_bidirectional: bool, can_be_packed: bool, config: Any
) -> Pattern | None:
    """The same under torch.compile, which cannot inspect closures, by the arguments of transformers' functions."""
    if function is causal_mask_function:
        return Pattern(right=0)
    if function is bidirectional_mask_function:
        return Pattern()
    if function.__name__ != AND_MASK:
        return None  # blocks are no interval
    is_window = local_size == getattr(config, "sliding_window", None)
    is_chunk = local_size == getattr(config, "attention_chunk_size", None)
    if local_size is not None and is_window == is_chunk:  # the size does not tell a window from chunks
        return None
    if local_size is not None and is_chunk:  # without padding, a chunk is a packed sequence of its own
        return Pattern(None, 0, True) if can_be_packed and not is_bidirectional else None
    if is_bidirectional:
        return Pattern(local_size, local_size) if local_size is not None else None
    if local_size is None:
        return Pattern(None, 0, True) if can_be_packed else None
    # A window without packing has one sequence in each row, so the packed form describes it too.
    return Pattern(local_size - 1, 0, can_be_packed)
