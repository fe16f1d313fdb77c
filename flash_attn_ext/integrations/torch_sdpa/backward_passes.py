"""Lets the modes of a thread see recomputations within a backward pass, such as those of activation checkpointing.

A mode intercepts Tensor.backward, torch.autograd.backward and torch.autograd.grad as it does any function, and like any
function they run without it. So the mode is entered again where they start PyTorch's engine, which has the modes of the
thread that started it on all of its threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flash_attn_ext._torch_private import engine, replace_engine

_STARTS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

_lock = threading.Lock()
_modes_in_force = 0
_before: Callable[..., Any]  # the engine that was there when the first mode came
_ours: Callable[..., Any]  # what took its place
_of_thread = threading.local()


def starts_one(func: Callable[..., Any]) -> bool:
    return func in _STARTS


def run(mode: TorchFunctionMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls func(*args, **kwargs), which starts a backward pass, for a mode that is not active in it."""
    waiting = _of_thread.__dict__.setdefault("modes", [])
    waiting.append(mode)
    try:
        return func(*args, **kwargs)
    finally:
        if mode in waiting:
            waiting.remove(mode)


def _under_modes(run_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Where somebody has kept an earlier one of ours, that one finds no mode waiting."""

    def run_engine_under_modes(*args: Any, **kwargs: Any) -> Any:
        waiting = _of_thread.__dict__.get("modes", [])
        with contextlib.ExitStack() as stack:
            while waiting:
                stack.enter_context(waiting.pop())  # the outermost comes first, because the innermost was asked first
            return run_engine(*args, **kwargs)

    return run_engine_under_modes


def watch() -> None:
    """Counts one more mode, until `unwatch`."""
    _change_modes(1)


def unwatch() -> None:
    _change_modes(-1)


def _change_modes(change: int) -> None:
    global _modes_in_force, _before, _ours
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace a lock
        return
    with _lock:
        if _modes_in_force == 0:
            _before = engine()
            _ours = _under_modes(_before)
            replace_engine(_ours)
        _modes_in_force += change
        if _modes_in_force == 0 and engine() is _ours:  # else somebody has replaced it since, and may call ours
            replace_engine(_before)
