"""PyTorch's attention operators on our kernels, for tests of integrations.torch_backend."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

from torch.library import Library
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from flash_attn_ext import _C
from flash_attn_ext.integrations import torch_backend
from flash_attn_ext.integrations.torch_backend import operands, switch


@contextlib.contextmanager
def active() -> Iterator[None]:
    """As users switch it on."""
    torch_backend.register()
    activate_flash_attention_impl(torch_backend.NAME)
    try:
        yield
    finally:
        restore_flash_attention_impl()


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """`active`, and for a CPU the operators that PyTorch has on CUDA only.

    Its formulas around them do not depend on the device, and neither does our side.
    """
    library = Library("aten", "IMPL", "CPU")
    fronts = []
    if device == "cpu":
        for override in switch.OVERRIDES:
            if override.key == "CUDA":
                library.impl(override.operator, override.kernel)
                if override.operator in _C.operators_with_front():
                    fronts.append(_C.OperatorFront(override.operator, "CPU"))
    try:
        with active():
            yield
    finally:
        for front in fronts:
            front.remove()
        library._destroy()


def passes_of_cpp() -> tuple[int, int]:
    forward, backward = _C.passes_of_fronts()
    return forward, backward + _C.recorded_backward_passes()


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """ "forward" and "backward" for each pass of ours that an operator or PyTorch's function ran; those of C++ last."""
    passes: list[str] = []
    before = passes_of_cpp()

    def attention_forward(*arguments):
        passes.append("forward")
        return _C.attention_forward(*arguments)

    def attention_backward(*arguments):
        passes.append("backward")
        return _C.attention_backward(*arguments)

    operands._C = types.SimpleNamespace(attention_forward=attention_forward, attention_backward=attention_backward)
    try:
        yield passes
    finally:
        operands._C = _C
        for name, first, last in zip(("forward", "backward"), before, passes_of_cpp(), strict=True):
            passes += [name] * (last - first)
