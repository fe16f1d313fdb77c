"""Replaces PyTorch's operators by ours, and restores PyTorch's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.library import Library

from flash_attn_ext import _C
from flash_attn_ext._torch_private import destroy, forget_choices_of_kernels, has_kernel, keys_of
from flash_attn_ext.integrations._fused_inference import fused_inference
from flash_attn_ext.integrations._warnings import is_of_the_machine, warn_once
from flash_attn_ext.integrations.torch_backend import cpu_flash, cudnn, efficient, flash, seeds
from flash_attn_ext.integrations.torch_backend.operands import OursAlone


class Override(NamedTuple):
    """An aten operator, the dispatch key of its kernel, and what runs instead."""

    operator: str
    key: str
    kernel: Callable


_CUDA: dict[str, Callable] = {
    "_scaled_dot_product_flash_attention": flash.scaled_dot_product_forward,
    "_scaled_dot_product_flash_attention_backward": flash.scaled_dot_product_backward,
    "_flash_attention_forward": flash.flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash.flash_forward_into,
    "_flash_attention_backward": flash.flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn.scaled_dot_product_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn.scaled_dot_product_backward,
    "_cudnn_attention_forward": cudnn.cudnn_forward,
    "_cudnn_attention_forward_no_dropout_inplace": cudnn.cudnn_forward_into,
    "_cudnn_attention_backward": cudnn.cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient.scaled_dot_product_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient.scaled_dot_product_backward,
    "_efficient_attention_forward": efficient.efficient_forward,
    "_efficient_attention_backward": efficient.efficient_backward,
}
_CPU: dict[str, Callable] = {
    "_scaled_dot_product_flash_attention_for_cpu": cpu_flash.scaled_dot_product_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": cpu_flash.scaled_dot_product_backward,
}
OVERRIDES = tuple(
    Override(operator, key, kernel)
    for key, kernels in (("CUDA", _CUDA), ("CPU", _CPU))
    for operator, kernel in kernels.items()
    if hasattr(torch.ops.aten, operator)  # some are newer than the oldest PyTorch that the library takes
)

# PyTorch's function, before it chooses one of those operators. Our kernel for it is in C++ only. Keys of autograd come
# first, because with a kernel for the device only, PyTorch would regard the function as one without a derivative.
FUNCTION = "scaled_dot_product_attention"
_FUNCTION_KEYS = ("AutogradCUDA", "CUDA", "AutogradCPU", "CPU")

# Python kernels that have a C++ kernel in front of them (csrc/host/aten/), which takes most calls.
_WITH_FRONT = frozenset(
    kernels[operator] for kernels in (_CUDA, _CPU) for operator in _C.operators_with_front() if operator in kernels
)

_lock = threading.Lock()
_handles: list[Handle] = []  # of activations that are in force
_libraries: list[Library] = []
_fronts: list[_C.OperatorFront] = []
_ever_in_place: list[object] = []  # kept, because a thread may still run one that PyTorch would free


class Handle:
    """One activation. Removing the last one restores PyTorch's kernels."""

    def remove(self) -> None:
        """Undo the activation, from any thread. Does nothing the second time."""
        with _lock:
            is_last = _handles == [self]
            if is_last:
                _restore()
            if self in _handles:
                _handles.remove(self)
        if is_last:
            seeds.warn_of_pending_backward_passes()


def activate() -> Handle:
    """Replace the operators, for all threads, until the handle's ``remove()``. Activations nest.

    ``torch.nn.attention.activate_flash_attention_impl`` calls this function.

    Example:
        >>> from flash_attn_ext.integrations.torch_backend.switch import activate
        >>> handle = activate()
        >>> q = torch.randn(1, 4, 30, 16)
        >>> out = torch.nn.functional.scaled_dot_product_attention(q, q, q)  # this library's
        >>> handle.remove()
    """
    handle = Handle()
    with _lock:
        if not _handles:
            _replace()
        _handles.append(handle)
    return handle


def _replace() -> None:
    fused_inference.switch_off()
    try:
        for key in dict.fromkeys(override.key for override in OVERRIDES):
            _libraries.append(Library("aten", "IMPL", key))
            for override in OVERRIDES:
                # A PyTorch that was built without this kind of device has no kernel.
                if override.key == key and has_kernel(_name(override), key):
                    _put_in_place(override, _libraries[-1])
        for key in _FUNCTION_KEYS:
            _put_front(FUNCTION, key)
        _clear_dispatch_caches()
    except BaseException:
        _restore()
        raise


def _restore() -> None:
    while _fronts:
        _fronts.pop().remove()
    while _libraries:
        destroy(_libraries.pop())
    fused_inference.switch_back()
    _clear_dispatch_caches()


def _clear_dispatch_caches() -> None:
    """Without this, torch.compile would look for kernels that are gone, and its graphs would lack derivatives."""
    for operator in (FUNCTION, *(override.operator for override in OVERRIDES)):
        forget_choices_of_kernels(getattr(torch.ops.aten, operator))


def _put_in_place(override: Override, library: Library) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that there is a kernel already, which is the purpose
        library.impl(override.operator, _with_fallback(override), allow_override=True)
    _ever_in_place.append(torch.library.get_kernel(_name(override), override.key))
    if override.kernel in _WITH_FRONT:
        _put_front(override.operator, override.key)


def _put_front(operator: str, key: str) -> None:
    _fronts.append(_C.OperatorFront(operator, key))
    _ever_in_place.append(torch.library.get_kernel(f"aten::{operator}", key))


def _name(override: Override) -> str:
    return f"aten::{override.operator}"


def _with_fallback(override: Override) -> Callable:
    """Our kernel, or the one that is there now for calls that ours cannot take. Calling the operator would come back
    here."""
    ours = override.kernel
    before = torch.library.get_kernel(_name(override), override.key)
    keys = keys_of(override.key)

    def kernel(*args, **kwargs):
        try:
            return ours(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError) as error:
            if is_of_the_machine(error) or isinstance(error, OursAlone):
                raise
            reason = str(error)
        warn_once(f" of {override.operator}", reason, ", and PyTorch's kernel runs", stacklevel=3)
        return before.call_boxed(keys, *args, **kwargs)

    return kernel
