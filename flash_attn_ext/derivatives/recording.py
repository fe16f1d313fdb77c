"""Shared by the operators: how autograd records them, and how ``torch.vmap`` maps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_ext._torch_private import (
    AFTER_AUTOGRAD,
    AutoDispatchBelowAutograd,
    DispatchKeySet,
    SingleLevelFunction,
    enable_single_level_autograd_function,
    is_fwd_grad_enabled,
    set_fwd_grad_enabled,
)
from flash_attn_ext.derivatives.batching import Mapped, map_slices

DEVICES = ("cpu", "cuda")
# The layout of results follows that of the inputs, so a compiler must not change the latter.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


class Caller(NamedTuple):
    """The state of the call above autograd that the call below needs. `records`: in reverse and in forward mode."""

    keyset: DispatchKeySet
    records: tuple[bool, bool]


class OperatorFunction(SingleLevelFunction):
    """An operator as autograd records it, with its caller before its own arguments.

    ``torch.library.register_autograd`` would record it too. But it supports neither forward mode, whose tangents it
    drops silently, nor the transforms of ``torch.func`` within compiled functions. These call an operator once for each
    of their levels, and each such call is a Function of that level only.
    """

    @classmethod
    def call(cls, keyset: DispatchKeySet, *arguments: Any) -> Any:
        caller = Caller(keyset, (torch.is_grad_enabled(), is_fwd_grad_enabled()))
        with enable_single_level_autograd_function():
            return cls.apply(caller, *arguments)  # type: ignore[attr-defined]  # its metaclass defines it

    @classmethod
    def below_autograd(cls, operator: Any, caller: Caller, arguments: tuple[Any, ...]) -> Any:
        """A Function's forward records nothing, but the levels below this one may have to."""
        reverse, forward = caller.records
        with torch.set_grad_enabled(reverse), set_fwd_grad_enabled(forward), AutoDispatchBelowAutograd():
            return operator.redispatch(caller.keyset & AFTER_AUTOGRAD, *arguments)


def map_operator(
    operator: Callable[..., Any],
    names: tuple[str, ...],
    outputs: Callable[[dict[str, Any]], tuple[str, ...]],
    mapped: tuple[Any, tuple[Any, ...], tuple[Any, ...]],
) -> Mapped:
    info, in_dims, values = mapped
    arguments, dims = dict(zip(names, values, strict=True)), dict(zip(names, in_dims, strict=True))
    dims = {name: dims[name] if isinstance(value, Tensor) else None for name, value in arguments.items()}
    return map_slices(lambda **of_slice: operator(*of_slice.values()), outputs, info, dims, arguments)
