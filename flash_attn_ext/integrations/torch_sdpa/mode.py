"""The mode behind ``replace_sdpa``, and what operands that override PyTorch's function are asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, overrides

from flash_attn_ext._sdpa import operands_to_ask
from flash_attn_ext._torch_private import DisableTorchFunction, function_mode_at, num_function_modes, run_by_dynamo
from flash_attn_ext.integrations._fused_inference import fused_inference
from flash_attn_ext.integrations._warnings import warn_once
from flash_attn_ext.integrations.torch_sdpa import backward_passes
from flash_attn_ext.integrations.torch_sdpa.attention import (
    AND_TORCH_RUNS,
    TORCH_SDPA,
    Sdpa,
    attention_functions,
    attention_with,
    of_thread,
)
from flash_attn_ext.integrations.torch_sdpa.multi_head_attention import multi_head_attention_with
from flash_attn_ext.types import Fallback

if TYPE_CHECKING:  # at run time Python 3.10 has it in typing_extensions only
    from typing_extensions import Self

_OVERRIDDEN = (
    TORCH_SDPA,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def replace_sdpa(fallback: Fallback = "raise") -> SdpaReplacement:
    """Context manager: inside it, ``F.scaled_dot_product_attention`` is this library's.

    Args:
        fallback: what happens to a call that this library cannot take. "raise": its error is raised, which says why.
            "torch": PyTorch's own attention runs, with one warning for each different reason.

    Contexts nest; the innermost decides. Nested tensors are among what this library cannot take. With fallback="torch"
    they go to PyTorch, in nn.TransformerEncoderLayer and nn.MultiheadAttention too. TorchScript (torch.jit.script)
    always calls PyTorch's attention: no override reaches into it.

    Under ``torch.compile``: enter it around the compiled call, not inside it, where PyTorch's fused inference path of
    nn.TransformerEncoderLayer (in eval mode, without gradients) cannot be switched off and bypasses it. What only the
    extension can refuse (an option out of its range, no backend for the device) raises with either fallback, when the
    compiled code runs.

    Raises ValueError for another ``fallback``.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, nhead=4, batch_first=True)
        >>> with flash_attn_ext.replace_sdpa():
        ...     layer(torch.randn(2, 30, 64)).sum().backward()
    """
    return SdpaReplacement(fallback)


class SdpaReplacement(overrides.TorchFunctionMode):
    """The mode behind :func:`replace_sdpa`."""

    def __init__(self, fallback: Fallback):
        super().__init__()
        self.fallback = fallback
        self.attention = attention_with(fallback)
        self.multi_head_attention = _multi_head_attention_functions[fallback]

    def __enter__(self) -> Self:
        fused_inference.switch_off()
        backward_passes.watch()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        backward_passes.unwatch()
        fused_inference.switch_back()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OVERRIDDEN and not of_thread.is_left_to_torch:
            if types and operands_to_ask(*args, *kwargs.values()):
                return ask_operands(self, func, args, kwargs)
            if types and torch.compiler.is_dynamo_compiling():
                # Dynamo asks a class about attributes though its overrides are off, once modes are active.
                with DisableTorchFunction():
                    return self.attention(*args, **kwargs)
            return self.attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            if types and operands_to_ask(*args, *kwargs.values()):
                return ask_operands(self, func, args, kwargs)
            if torch.compiler.is_dynamo_compiling():
                _let_dynamo_take_copies_whole()
            return self.multi_head_attention(*args, **kwargs)
        if func is Tensor.unflatten and not types:  # torch.compile cannot trace its super() call under a mode
            func = torch.unflatten
        if not torch.compiler.is_dynamo_compiling() and backward_passes.starts_one(func):
            return backward_passes.run(self, func, args, kwargs)
        return func(*args, **kwargs)


class Installation:
    """The state of install_sdpa in this process."""

    fallback: Fallback = "raise"
    attention: Sdpa | None = None  # the function that takes the calls, while it is installed
    stand_in: Sdpa  # what torch.nn.functional.scaled_dot_product_attention then names
    names: list[tuple[Any, ...]] = []  # noqa: RUF012, (module, name, what it stood for) of those that were replaced


installation = Installation()


def mode_of_this_thread() -> SdpaReplacement | None:
    """The innermost mode of this thread."""
    for index in reversed(range(num_function_modes())):  # an empty stack ends the search at once
        mode = function_mode_at(index)
        if isinstance(mode, SdpaReplacement):
            return mode
    return None


def ask_operands(mode: SdpaReplacement, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operands' classes make of a call. What they leave to PyTorch comes back to the mode, without them."""
    if func is TORCH_SDPA and installation.attention is not None:
        func = installation.stand_in  # what classes find under PyTorch's name now
    asked = operands_to_ask(*args, *kwargs.values())
    types = tuple(type(operand) for operand in asked)
    with mode:
        for operand in asked:
            result = operand.__torch_function__(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
    raise TypeError(f"no implementation found for {func.__name__} on types that implement __torch_function__: {types}")


def _attention_after_asking(fallback: Fallback, attention: Sdpa) -> Sdpa:
    def sdpa(*args: Any, **kwargs: Any) -> Any:
        out = attention(*args, **kwargs)
        return ask_operands(SdpaReplacement(fallback), TORCH_SDPA, args, kwargs) if out is NotImplemented else out

    return sdpa


_multi_head_attention_functions = {
    fallback: multi_head_attention_with(_attention_after_asking(fallback, attention))
    for fallback, attention in attention_functions.items()
}


def _let_dynamo_take_copies_whole() -> None:
    """Makes torch.compile take copies of F.multi_head_attention_forward whole, like the original, which it cannot
    trace."""
    for copy in _multi_head_attention_functions.values():
        torch.compiler.allow_in_graph(copy)


run_by_dynamo(_let_dynamo_take_copies_whole)


def _allow_nested(module: nn.Module) -> None:
    """Raises or warns, as the replacement in force has it, before a nested input goes to PyTorch."""
    mode = mode_of_this_thread() or installation
    if mode.attention is None:
        return
    reason = (
        f"{type(module).__name__} got a nested tensor, which this library does not take, and PyTorch only on its fused "
        "inference path"
    )
    if mode.fallback == "raise":
        raise TypeError(
            f"{reason}: pass a padded tensor and src_key_padding_mask (key_padding_mask), or use fallback='torch'"
        )
    warn_once("", reason, AND_TORCH_RUNS, stacklevel=5)


fused_inference.allow_nested = _allow_nested
