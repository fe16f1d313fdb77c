"""Send every ``torch.nn.functional.scaled_dot_product_attention`` call to this library, models untouched.

    with flash_attn_ext.replace_sdpa():
        loss = model(x).sum()
        loss.backward()

``replace_sdpa`` works through PyTorch's own override mechanism, ``torch.overrides.TorchFunctionMode``, also under
``torch.compile``. nn.MultiheadAttention and nn.TransformerEncoderLayer arrive here too: PyTorch turns off their fused
inference path while a mode is active. (nn.MultiheadAttention with need_weights=True, its default, asks for the
attention weights and therefore never calls scaled_dot_product_attention; nn.TransformerEncoderLayer passes
need_weights=False.)

A mode belongs to a thread. ``replace_sdpa`` therefore covers calls of the thread that entered it, and backward passes
that it starts (where activation checkpointing calls the model again); ``install_sdpa`` covers all threads, by replacing
the function's names, and costs other calls nothing.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, overrides
from torch.compiler import is_compiling

from flash_attn_ext import _C
from flash_attn_ext._sdpa import SdpaArguments, attend_or_decline, operands_to_ask
from flash_attn_ext._torch_private import (
    function_mode_at,
    num_function_modes,
    register_torchscript_builtin,
    run_by_dynamo,
)
from flash_attn_ext.integrations import _backward_passes
from flash_attn_ext.integrations._fused_inference import FusedInference
from flash_attn_ext.integrations._multi_head_attention import multi_head_attention_with
from flash_attn_ext.integrations._warnings import is_of_the_machine, warn_once
from flash_attn_ext.types import Fallback

if TYPE_CHECKING:  # at run time Python 3.10 has it in typing_extensions only
    from typing_extensions import Self

_TORCH_SDPA = F.scaled_dot_product_attention
_OVERRIDDEN = (
    _TORCH_SDPA,
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
        self.attention = _attention_with(fallback)
        self.multi_head_attention = _multi_head_attention_functions[fallback]

    def __enter__(self) -> Self:
        fused_inference.switch_off()
        _backward_passes.watch()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _backward_passes.unwatch()
        fused_inference.switch_back()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OVERRIDDEN:
            if types and operands_to_ask(*args, *kwargs.values()):
                return _ask_operands(self, func, args, kwargs)
            return self.attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            if types and operands_to_ask(*args, *kwargs.values()):
                return _ask_operands(self, func, args, kwargs)
            if torch.compiler.is_dynamo_compiling():
                _let_dynamo_take_copies_whole()
            return self.multi_head_attention(*args, **kwargs)
        if func is Tensor.unflatten and not types:  # torch.compile cannot trace its super() call under a mode
            func = torch.unflatten
        if not torch.compiler.is_dynamo_compiling() and _backward_passes.starts_one(func):
            return _backward_passes.run(self, func, args, kwargs)
        return func(*args, **kwargs)


def install_sdpa(fallback: Fallback = "raise") -> None:
    """:func:`replace_sdpa` for all threads of the process, until :func:`uninstall_sdpa`.

    The name ``torch.nn.functional.scaled_dot_product_attention`` is replaced, and so is every name in a loaded module
    that stands for the same function (of code that imported it before), and PyTorch's fused inference path of
    nn.TransformerEncoderLayer and nn.MultiheadAttention is switched off (torch.backends.mha), since it calls none. No
    mode is entered: one costs every call of PyTorch about a microsecond, which adds up where a model generates token by
    token. So calls of ``torch.ops.aten.scaled_dot_product_attention`` are reached by ``replace_sdpa`` only.

    Calling it again changes ``fallback``. A ``replace_sdpa`` block inside decides for itself.

    Raises ValueError for another ``fallback`` than those of :func:`replace_sdpa`.

    Example:
        >>> flash_attn_ext.install_sdpa()
        >>> q = torch.randn(1, 4, 30, 16)
        >>> out = torch.nn.functional.scaled_dot_product_attention(q, q, q)  # this library's
        >>> flash_attn_ext.uninstall_sdpa()
    """
    with _lock:
        attention = _attention_with(fallback)
        if _process.attention is None:
            fused_inference.switch_off()
            _process.names = _replace_names()
            # TorchScript takes the new name for PyTorch's operator, as it takes the old one, because it cannot compile
            # ours.
            register_torchscript_builtin(_sdpa_of_any_thread, "aten::scaled_dot_product_attention")
        _process.fallback, _process.attention = fallback, attention


def uninstall_sdpa() -> None:
    """Undo :func:`install_sdpa`, from any thread. Does nothing when it is not installed.

    Example:
        >>> before = torch.nn.functional.scaled_dot_product_attention
        >>> flash_attn_ext.install_sdpa()
        >>> flash_attn_ext.uninstall_sdpa()
        >>> torch.nn.functional.scaled_dot_product_attention is before
        True
    """
    with _lock:
        if _process.attention is None:
            return
        _process.attention = None
        for module, name, before in _process.names:
            if getattr(module, name, None) is _sdpa_of_any_thread:
                setattr(module, name, before)
        _process.names = []
        fused_inference.switch_back()


class _Process:
    """The state of install_sdpa in this process."""

    fallback: Fallback = "raise"
    attention: Callable[..., Tensor] | None = None  # the function that takes the calls
    names: list[tuple[Any, ...]] = []  # noqa: RUF012, (module, name, what it stood for) of those that were replaced


_process = _Process()
_lock = threading.Lock()


def _sdpa_of_any_thread(*args: Any, **kwargs: Any) -> Tensor:
    """The function that torch.nn.functional.scaled_dot_product_attention names while install_sdpa is in force."""
    attention = _process.attention
    if attention is None:
        return _TORCH_SDPA(*args, **kwargs)
    if _mode_of_this_thread() is not None:
        return _TORCH_SDPA(*args, **kwargs)  # the mode of this thread intercepts it
    out: Tensor = attention(*args, **kwargs)
    if out is NotImplemented:
        out = _ask_operands(SdpaReplacement(_process.fallback), _TORCH_SDPA, args, kwargs)
    return out


# Graphs and pickles that hold it name PyTorch's function, as they do without this library. Users may compile it as
# that function.
_sdpa_of_any_thread.__module__ = F.__name__
_sdpa_of_any_thread.__name__ = _sdpa_of_any_thread.__qualname__ = _TORCH_SDPA.__name__
_sdpa_of_any_thread.__doc__ = _TORCH_SDPA.__doc__


def _replace_names() -> list[tuple[Any, ...]]:
    """Replaces the names of PyTorch's function in all modules but ours and PyTorch's own. Of PyTorch's names only the
    public one is replaced, whatever it stands for."""
    replaced: list[tuple[Any, ...]] = [(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", __name__.split(".")[0]):
            members = getattr(module, "__dict__", None) or {}
            replaced += [(module, member, value) for member, value in list(members.items()) if value is _TORCH_SDPA]
    for module, member, _ in replaced:
        setattr(module, member, _sdpa_of_any_thread)
    return replaced


def _mode_of_this_thread() -> SdpaReplacement | None:
    """The innermost mode of this thread."""
    for index in reversed(range(num_function_modes())):  # an empty stack ends the search at once
        mode = function_mode_at(index)
        if isinstance(mode, SdpaReplacement):
            return mode
    return None


def _take_nested(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles a nested input of one of PyTorch's transformer modules, which only their fused inference path takes."""
    mode = _mode_of_this_thread() or _process
    if mode.attention is not None:
        reason = (
            f"{type(args[0]).__name__} got a nested tensor, which this library does not take, and PyTorch only on its "
            "fused inference path"
        )
        if mode.fallback == "raise":
            raise TypeError(
                f"{reason}: pass a padded tensor and src_key_padding_mask (key_padding_mask), or use fallback='torch'"
            )
        _warn(reason)
    with fused_inference.as_it_was():
        return forward(*args, **kwargs)


fused_inference = FusedInference(_take_nested)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Ours, but NotImplemented where there are operands to ask first."""
    if not is_compiling():
        out = _C.direct_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    return attend_or_decline((query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def _ask_operands(mode: SdpaReplacement, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operands' classes make of a call. What they leave to PyTorch comes back to the mode, without them."""
    if func is _TORCH_SDPA and _process.attention is not None:
        func = _sdpa_of_any_thread  # what classes find under PyTorch's name now
    asked = operands_to_ask(*args, *kwargs.values())
    types = tuple(type(operand) for operand in asked)
    with mode:
        for operand in asked:
            result = operand.__torch_function__(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
    raise TypeError(f"no implementation found for {func.__name__} on types that implement __torch_function__: {types}")


def _attention_or_torch(*args: Any, **kwargs: Any) -> Any:
    try:
        return scaled_dot_product_attention(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        if is_of_the_machine(error):
            raise
        reason = str(error)
    arguments = SdpaArguments(*args, **kwargs)
    _warn(reason, _memory_of_scores(arguments))
    return _TORCH_SDPA(*_plain_mask(arguments)[:6], scale=arguments.scale, enable_gqa=arguments.enable_gqa)


_Sdpa = Callable[..., Any]
_attention_functions: dict[Fallback, _Sdpa] = {"raise": scaled_dot_product_attention, "torch": _attention_or_torch}


def _attention_with(fallback: Fallback) -> _Sdpa:
    if fallback not in _attention_functions:
        raise ValueError(f"fallback must be 'raise' or 'torch', got {fallback!r}")
    return _attention_functions[fallback]


def _attention_after_asking(fallback: Fallback, attention: _Sdpa) -> _Sdpa:
    def sdpa(*args: Any, **kwargs: Any) -> Any:
        out = attention(*args, **kwargs)
        return _ask_operands(SdpaReplacement(fallback), _TORCH_SDPA, args, kwargs) if out is NotImplemented else out

    return sdpa


_multi_head_attention_functions = {
    fallback: multi_head_attention_with(_attention_after_asking(fallback, attention))
    for fallback, attention in _attention_functions.items()
}


def _let_dynamo_take_copies_whole() -> None:
    """Makes torch.compile take copies of F.multi_head_attention_forward whole, like the original, which it cannot
    trace."""
    for copy in _multi_head_attention_functions.values():
        torch.compiler.allow_in_graph(copy)


run_by_dynamo(_let_dynamo_take_copies_whole)


def _plain_mask(arguments: SdpaArguments) -> SdpaArguments:
    """Replaces PyTorch's CausalBias, which would call the name that install_sdpa replaces, by its boolean mask."""
    bias: Any = arguments.attn_mask
    variant = getattr(bias, "variant", None)
    if variant is None:
        return arguments
    num_queries, num_keys = bias.seq_len_q, bias.seq_len_kv
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=arguments.query.device)
    return arguments._replace(attn_mask=mask.tril(num_keys - num_queries if variant.name == "LOWER_RIGHT" else 0))


def _memory_of_scores(arguments: SdpaArguments) -> str:
    """A note about the memory that the unfused path may take; empty for tensors without a single shape."""
    query, key = arguments.query, arguments.key
    if not all(isinstance(t, Tensor) and not t.is_nested and t.dim() >= 2 for t in (query, key)):
        return ""
    score_bytes = math.prod(query.shape[:-1]) * key.shape[-2] * query.element_size()
    return f", which may hold {score_bytes / 2**20:.1f} MiB of scores at a time"


def _warn(reason: str, memory: str = "") -> None:
    warn_once("", reason, f" and PyTorch's attention runs instead{memory}", stacklevel=5)
