"""Which interval of keys a mask function of transformers stands for."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function


class Pattern(NamedTuple):
    """A mask function as the interval [query - left, query + right]; None is unbounded."""

    left: int | None = None
    right: int | None = None
    is_packed: bool = False  # only within a sequence of a packed batch
    is_remapped: bool = False  # counted from the first token of the sequence


def pattern_of(function: Any) -> Pattern | None:
    """What transformers built a mask function of; None for any other."""
    if function is causal_mask_function:
        return Pattern(right=0)
    if function is bidirectional_mask_function:
        return Pattern()
    builder, _, inner = getattr(function, "__qualname__", "").partition(".<locals>.")
    if not inner or getattr(function, "__globals__", None) is not vars(masking_utils):
        return None
    names = function.__code__.co_freevars
    given = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    if builder == "sliding_window_overlay":
        return Pattern(left=given["sliding_window"] - 1)
    if builder == "sliding_window_bidirectional_overlay":
        return Pattern(given["sliding_window"], given["sliding_window"])
    if builder == "packed_sequence_mask_function":
        return Pattern(is_packed=True)
    if builder == "remap_positions_for_packed_sequence":
        inner = pattern_of(given["mask_function"])
        return inner and inner._replace(is_remapped=True)
    if builder == "and_masks":
        return _intersection([pattern_of(part) for part in given["mask_functions"]])
    return None


def _intersection(patterns: list[Pattern | None]) -> Pattern | None:
    if None in patterns:
        return None
    lefts, rights, packed, remapped = zip(*patterns, strict=True)
    left = min((side for side in lefts if side is not None), default=None)
    right = min((side for side in rights if side is not None), default=None)
    return Pattern(left, right, any(packed), any(remapped))


def traced_pattern(
    function: Any, local_size: int | None, is_bidirectional: bool, can_be_packed: bool, config: Any
) -> Pattern | None:
    """The same under torch.compile, which cannot look into closures: by what transformers' functions pass along."""
    if function is causal_mask_function:
        return Pattern(right=0)
    if function is bidirectional_mask_function:
        return Pattern()
    if function.__name__ != "and_mask":
        return None  # blocks
    if local_size is not None and (
        local_size != getattr(config, "sliding_window", None)
        or local_size == getattr(config, "attention_chunk_size", None)
    ):
        return None
    if is_bidirectional:
        return Pattern(local_size, local_size) if local_size is not None else None
    if local_size is None:
        return Pattern(None, 0, True, True) if can_be_packed else None
    # A window that is not packed is one sequence a row, which the same form says.
    return Pattern(local_size - 1, 0, can_be_packed, can_be_packed)
