"""Which interval of keys a mask function of transformers stands for."""

from __future__ import annotations

from typing import Any, NamedTuple

from flash_attn_ext.integrations.transformers.private_names import (
    AND_MASK,
    AND_MASKS,
    BIDIRECTIONAL_WINDOW,
    PACKED,
    REMAPPED,
    WINDOW,
    bidirectional_mask_function,
    built_of,
    causal_mask_function,
)


class Pattern(NamedTuple):
    """A mask function as the interval [query - left, query + right]; None is unbounded."""

    left: int | None = None
    right: int | None = None
    is_packed: bool = False  # only within a sequence of a packed batch
    is_remapped: bool = False  # a window that is counted by position_ids, which is the same within a sequence


def pattern_of(function: Any) -> Pattern | None:
    """What transformers built a mask function of; None for any other."""
    if function is causal_mask_function:
        return Pattern(right=0)
    if function is bidirectional_mask_function:
        return Pattern()
    built = built_of(function)
    if built is None:
        return None
    builder, given = built
    if builder == WINDOW[0]:
        return Pattern(left=given[WINDOW[1]] - 1)
    if builder == BIDIRECTIONAL_WINDOW[0]:
        size = given[BIDIRECTIONAL_WINDOW[1]]
        return Pattern(size, size)
    if builder == PACKED[0]:
        return Pattern(is_packed=True)
    if builder == REMAPPED[0]:
        inner = pattern_of(given[REMAPPED[1]])
        return inner and inner._replace(is_remapped=True)
    if builder == AND_MASKS[0]:
        return _intersection([pattern_of(part) for part in given[AND_MASKS[1]]])
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
    if function.__name__ != AND_MASK:
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
