"""PyTorch's transformer modules with nested tensors, while calls are replaced.

They take nested tensors on their fused inference path only. That path never calls scaled_dot_product_attention, and it
is off while a TorchFunctionMode is active or torch.backends.mha is switched off; a replacement does both. So the
modules' ``forward`` looks at its arguments first, and hands nested ones to what the replacement wants done with them.
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
    """From now on the modules' nested inputs go through ``take_nested``."""
    for module in _MODULES:
        module.forward = _watched(module.forward, take_nested)


def unwatch() -> None:
    for module in _MODULES:
        module.forward = module.forward.__wrapped__


def _watched(original: Any, take_nested: TakeNested) -> Any:
    """TorchScript compiles ``__wrapped__`` in its stead, with the names of the original's module."""
    are_nested = _are_nested  # in the closure, since this function's globals become the original's

    def forward(*args: Any, **kwargs: Any) -> Any:
        if are_nested(*args, *kwargs.values()):
            return take_nested(original, args, kwargs)
        return original(*args, **kwargs)

    # Code of its own, which _frames.py does not know: users compile these modules.
    code = forward.__code__.replace()
    watched: Any = types.FunctionType(code, original.__globals__, "forward", None, forward.__closure__)
    watched.__wrapped__ = original
    watched.__doc__ = original.__doc__
    return watched


def _are_nested(*arguments: object) -> bool:
    """Not those of layout torch.jagged, which the fused path does not take."""
    if torch.compiler.is_compiling():
        return False
    return any(isinstance(one, Tensor) and one.is_nested and one.layout == torch.strided for one in arguments)
