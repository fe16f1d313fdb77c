"""The switch of PyTorch's fused inference path (torch.backends.mha), shared by all replacements that are in force.

PyTorch's transformer modules take nested tensors on that path only, and it never calls scaled_dot_product_attention. It
is off while a TorchFunctionMode is active or torch.backends.mha is switched off, and a replacement does both. So the
modules' ``forward`` checks its arguments first, and nested ones go to the path as it was.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn_ext._torch_private import DisableTorchFunction

_MODULES: tuple[Any, ...] = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
# (original forward, its arguments, its keywords) -> what forward returns
TakeNested = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class FusedInference:
    """PyTorch's fused inference path of its transformer modules, which is off while any replacement is in force.

    The path checks for modes by itself, except under torch.compile and on threads without one. Nested tensors, which
    nothing else takes, may still use it, unless ``allow_nested`` raises.
    """

    allow_nested: Callable[[nn.Module], None]  # called before a nested input of a module takes the path

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.suspensions = 0
        self.enabled_before = True
        self.watched: list[tuple[Any, Any, Any]] = []  # (module, its forward, what took its place)

    def switch_off(self) -> None:
        if torch.compiler.is_dynamo_compiling():  # dynamo can trace neither a lock nor the switch
            return
        with self.lock:
            if self.users == 0:
                self.enabled_before = torch.backends.mha.get_fastpath_enabled()
                self.watched = [(m, m.forward, _watched(m.forward, self._take_nested)) for m in _MODULES]
                for module, _, watched in self.watched:
                    module.forward = watched
            self.users += 1
            self._set()

    def switch_back(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        with self.lock:
            self.users -= 1
            self._set()
            if self.users == 0:
                for module, forward, watched in self.watched:
                    if module.forward is watched:  # else somebody has replaced it since, and may call ours
                        module.forward = forward

    def _take_nested(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.users == 0:  # somebody has kept the forward of a replacement that is over
            return forward(*args, **kwargs)
        self.allow_nested(args[0])
        with self._as_it_was():
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """A context without any replacement in force. All threads share the switch, so the inference of another thread
        may take the path too, meanwhile."""
        self._change_suspensions(1)
        try:
            with DisableTorchFunction():
                yield
        finally:
            self._change_suspensions(-1)

    def _change_suspensions(self, change: int) -> None:
        with self.lock:
            self.suspensions += change
            if self.users > 0:
                self._set()

    def _set(self) -> None:
        torch.backends.mha.set_fastpath_enabled(self.enabled_before and (self.users == 0 or self.suspensions > 0))


fused_inference = FusedInference()


def _watched(original: Any, take_nested: TakeNested) -> Any:
    """A wrapper of ``original``. TorchScript compiles its ``__wrapped__``, with the names of the original's module."""
    are_nested = _are_nested  # in the closure, since this function's globals become the original's

    def forward(*args: Any, **kwargs: Any) -> Any:
        if are_nested(*args, *kwargs.values()):
            return take_nested(original, args, kwargs)
        return original(*args, **kwargs)

    # A copy of the code, which _frames.py does not skip, because users compile these modules.
    code = forward.__code__.replace()
    watched: Any = types.FunctionType(code, original.__globals__, "forward", None, forward.__closure__)
    watched.__wrapped__ = original
    watched.__doc__ = original.__doc__
    return watched


def _are_nested(*arguments: object) -> bool:
    """Whether an argument is nested, but not of layout torch.jagged, which the fused path does not take."""
    if torch.compiler.is_compiling():
        return False
    return any(isinstance(one, Tensor) and one.is_nested and one.layout == torch.strided for one in arguments)
