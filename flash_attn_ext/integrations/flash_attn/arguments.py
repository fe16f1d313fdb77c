"""Translates flash-attention 2's arguments into this library's."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from flash_attn_ext._call.canonical import require_tensors
from flash_attn_ext._call.options import check_flag, check_length, check_number, check_number_or_none, entries_of
from flash_attn_ext.types import Causal

WindowSize = tuple[int | None, int | None] | list[int] | Tensor


class Options(TypedDict):
    """flash_attn's options as keywords of ``attention`` and ``attention_varlen``."""

    causal: Causal | None
    window: tuple[int | None, int | None]
    softcap: float | None
    alibi_slopes: Tensor | None
    dropout_p: float
    scale: float | None


def options_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> Options:
    check_flag("deterministic", deterministic)
    return Options(
        causal="bottom_right" if check_flag("causal", causal) else None,
        window=window_of(window_size),
        softcap=check_number_or_none("softcap", softcap) or None,
        alibi_slopes=alibi_slopes,
        dropout_p=check_number("dropout_p", dropout_p),
        scale=check_number_or_none("softmax_scale", softmax_scale),
    )


def window_of(window_size: Any) -> tuple[int | None, int | None]:
    """Translates flash_attn's window into that of ``attention``. An unbounded side is -1 there, and None here."""
    entries = entries_of(window_size)
    if entries is None or len(entries) != 2:
        raise ValueError(f"window_size must be (left, right), -1 for an unbounded side, got {window_size!r}")
    sides = [check_length("window_size", side) for side in entries]
    if any(side is not None and side < -1 for side in sides):
        raise ValueError(f"window_size must be made of numbers >= 0, and -1 for an unbounded side, got {window_size!r}")
    left, right = (None if side == -1 else side for side in sides)
    return left, right


def require_shape(shape: str, **tensors: Tensor) -> None:
    """Checks the numbers of dimensions. ``attention`` would take others, for which flash_attn has no layout."""
    require_tensors(tuple(tensors), tuple(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dim() != shape.count(",") + 1:
            raise RuntimeError(f"{name} must be {shape}, got shape {tuple(tensor.shape)}")
