"""``install_sdpa``: our attention under the names of PyTorch's function, for all threads."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch.nn.functional as F
from torch import Tensor, overrides

from flash_attn_ext._torch_private import register_torchscript_builtin
from flash_attn_ext.integrations._fused_inference import fused_inference
from flash_attn_ext.integrations.torch_sdpa.attention import TORCH_SDPA, attention_with
from flash_attn_ext.integrations.torch_sdpa.mode import SdpaReplacement, ask_operands, installation, mode_of_this_thread
from flash_attn_ext.types import Fallback

_lock = threading.Lock()


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
        attention = attention_with(fallback)
        if installation.attention is None:
            fused_inference.switch_off()
            # PyTorch looks its functions up by name once, and remembers which of them modes and classes may override.
            overrides.get_overridable_functions()
            installation.names = _replace_names()
            # TorchScript takes the new name for PyTorch's operator, as it takes the old one, because it cannot compile
            # ours.
            register_torchscript_builtin(_sdpa_of_any_thread, "aten::scaled_dot_product_attention")
        installation.fallback, installation.attention = fallback, attention


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
        if installation.attention is None:
            return
        installation.attention = None
        for module, name, before in installation.names:
            if getattr(module, name, None) is _sdpa_of_any_thread:
                setattr(module, name, before)
        installation.names = []
        fused_inference.switch_back()


def _sdpa_of_any_thread(*args: Any, **kwargs: Any) -> Tensor:
    """The function that torch.nn.functional.scaled_dot_product_attention names while install_sdpa is in force."""
    attention = installation.attention
    if attention is None:
        return TORCH_SDPA(*args, **kwargs)
    if mode_of_this_thread() is not None:
        return TORCH_SDPA(*args, **kwargs)  # the mode of this thread intercepts it
    out: Tensor = attention(*args, **kwargs)
    if out is NotImplemented:
        out = ask_operands(SdpaReplacement(installation.fallback), TORCH_SDPA, args, kwargs)
    return out


# Graphs and pickles that hold it name PyTorch's function, as they do without this library. Users may compile it as
# that function.
_sdpa_of_any_thread.__module__ = F.__name__
_sdpa_of_any_thread.__name__ = _sdpa_of_any_thread.__qualname__ = TORCH_SDPA.__name__
_sdpa_of_any_thread.__doc__ = TORCH_SDPA.__doc__
installation.stand_in = _sdpa_of_any_thread


def _replace_names() -> list[tuple[Any, ...]]:
    """Replaces the names of PyTorch's function in all modules but ours and PyTorch's own. Of PyTorch's names only the
    public one is replaced, whatever it stands for."""
    public = F.scaled_dot_product_attention
    if public is _sdpa_of_any_thread:  # somebody has put back what they found during an earlier installation
        public = TORCH_SDPA
    replaced: list[tuple[Any, ...]] = [(F, "scaled_dot_product_attention", public)]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", __name__.split(".")[0]):
            members = getattr(module, "__dict__", None) or {}
            replaced += [(module, member, value) for member, value in list(members.items()) if value is TORCH_SDPA]
    for module, member, _ in replaced:
        setattr(module, member, _sdpa_of_any_thread)
    return replaced
