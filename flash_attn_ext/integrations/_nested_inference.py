"""PyTorch's transformer modules with nested tensors, while calls are replaced.

They take nested tensors on their fused inference path only. That path never calls scaled_dot_product_attention. It is
off while a TorchFunctionMode is active or torch.backends.mha is switched off, and a replacement does both. So the
modules' ``forward`` checks its arguments first, and passes nested ones to a function of the replacement.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_MODULES: tuple[Any, ...] = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
# (original forward, its arguments, its keywords) -> what forward returns
TakeNested = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def watch(take_nested: TakeNested) -> None:
    """Passes the modules' nested inputs to ``take_nested`` from now on."""
    for module in _MODULES:
        module.forward = _watched(module.forward, take_nested)


def unwatch() -> None:
    for module in _MODULES:
        module.forward = module.forward.__wrapped__


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
