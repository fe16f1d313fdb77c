"""The interval of keys that a mask function of transformers stands for."""

from __future__ import annotations

from typing import Any, NamedTuple

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
)


class Pattern(NamedTuple):
    """A mask function as the interval [query - left, query + right]; None is unbounded."""

    left: int | None = None
    right: int | None = None
    is_packed: bool = False  # queries see keys of their own packed sequence only
    is_remapped: bool = False  # the window counts position_ids, which makes no difference within a sequence


def pattern_of(function: Any) -> Pattern | None:
    """The pattern from which transformers built a mask function; None for any other function."""
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


def builders_of(function: Any) -> set[str]:
    """The names of all builders of transformers that take part in a mask function."""
    built = built_of(function)
    if built is None:
        return set()
    builder, given = built
    inner = given.get(REMAPPED[1])
    parts = [*given.get(AND_MASKS[1], ()), *given.get(OR_MASKS[1], ()), *([] if inner is None else [inner])]
    return {builder}.union(*(builders_of(part) for part in parts))


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
    if local_size is not None and is_window == is_chunk:
        return None
    if local_size is not None and is_chunk:  # the chunks of a row, or of its packed sequences, are packed sequences too
        return Pattern(None, 0, True, True) if can_be_packed and not is_bidirectional else None
    if is_bidirectional:
        return Pattern(local_size, local_size) if local_size is not None else None
    if local_size is None:
        return Pattern(None, 0, True, True) if can_be_packed else None
    # A window without packing has one sequence in each row, so the packed form describes it too.
    return Pattern(local_size - 1, 0, can_be_packed, can_be_packed)
