"""Checks of options that are not tensors. Their ranges are checked in C++ (csrc/host/checks.cpp)."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor


def window_pair(window: int | tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"window must be None, an int, or (left, right), got {window!r}")
    for size in pair:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | torch.SymInt)):
            raise TypeError(f"window must be made of int or None, got {size!r} of type {type(size).__name__}")
        if size is not None and size < 0:
            raise ValueError(f"window sizes must be >= 0, got {window!r}: None, not -1, means unbounded")
    return pair


def check_causal(causal) -> None:
    if isinstance(causal, bool):
        raise ValueError(
            f"causal must be None, 'top_left' or 'bottom_right', got {causal}. "
            "'top_left' lets query i see keys 0..i (is_causal of torch's scaled_dot_product_attention); 'bottom_right' "
            "lines up the last query with the last key (flash_attn >= 2.1, decoding with a cache). They are the same "
            "when there are as many queries as keys; None is not causal"
        )
    if not isinstance(causal, str) or causal not in ("top_left", "bottom_right"):
        raise ValueError(f"causal must be None, 'top_left' or 'bottom_right', got {causal!r}")


def check_number(name: str, value) -> float:
    """A Python number as float; its range is checked in C++."""
    if isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # NumPy scalars
        return float(value)
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.requires_grad:
            raise TypeError(
                f"{name} must be a number, got a tensor of shape {tuple(value.shape)} with "
                f"requires_grad={value.requires_grad}: it would get no gradient. Multiply the tensors by it instead"
            )
        return float(value)
    raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def check_length(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | torch.SymInt)):
        hint = ": leave it out and it is read where it is needed" * isinstance(value, Tensor)
        raise TypeError(f"{name} must be an int or None, got {type(value).__name__}{hint}")


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
