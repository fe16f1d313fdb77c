"""Hugging Face transformers with this library's attention.

    from flash_attn_ext.integrations import transformers as fused
    fused.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fused_ext")

Importing this module changes nothing and does not need transformers; :func:`register` does. docs/transformers.md says
how to use it, and what is honoured or refused.
"""

from __future__ import annotations

import importlib
import re
import threading
from typing import Any

# The name does not contain "flash". transformers takes such names for packages of flash-attention; it then casts the
# inputs, makes other masks, and may download kernels.
NAME = "fused_ext"

# The oldest and the newest release of transformers that the tests pass with. Older ones are refused.
OLDEST, NEWEST = "5.15", "5.24"

__all__ = ["NAME", "NEWEST", "OLDEST", "register", "unregister"]


def register() -> None:
    """Make ``attn_implementation="fused_ext"`` known to transformers, in the whole process, until :func:`unregister`.

    An attention function and the mask function that goes with it are registered. Nothing else of transformers changes:
    models that do not ask for the name run as before. Calling it again does nothing.

    Raises:
        ImportError: transformers is not installed, is older than ``OLDEST``, or lacks a name that this needs.
        RuntimeError: another package has registered something under that name.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from flash_attn_ext.integrations import transformers as fused
        >>> fused.register()
        >>> sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
        >>> model.set_attn_implementation("fused_ext")
        >>> model(torch.zeros(1, 5, dtype=torch.int64)).logits.shape
        torch.Size([1, 5, 64])
        >>> fused.unregister()
    """
    with _lock:
        attention_functions, mask_functions = _interfaces()
        ours = _functions()
        taken = [_table_of(interface).get(NAME) for interface in (attention_functions, mask_functions)]
        if any(function not in (None, own) for function, own in zip(taken, ours, strict=True)):
            raise RuntimeError(
                f"another package has registered attn_implementation={NAME!r} with transformers: undo that first"
            )
        attention_functions.register(NAME, ours[0])
        mask_functions.register(NAME, ours[1])


def unregister() -> None:
    """Undo :func:`register`. Does nothing when it is not registered. A model that still asks for the name fails with
    transformers' own error, and can be sent elsewhere by ``model.set_attn_implementation("sdpa")``.

    Raises ImportError as :func:`register` does.

    Example:
        >>> from flash_attn_ext.integrations import transformers as fused
        >>> fused.register()
        >>> fused.unregister()
    """
    with _lock:
        for interface, own in zip(_interfaces(), _functions(), strict=True):
            if _table_of(interface).get(NAME) is own:
                del _table_of(interface)[NAME]


_lock = threading.Lock()


def _interfaces() -> tuple[Any, Any]:
    """The two tables of transformers, with attention functions and with mask functions."""
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError as error:
        raise ImportError(f"{_NEEDED}, which cannot be imported ({error}): {_INSTALL}") from error
    if _release(version) < _release(OLDEST):
        raise ImportError(f"{_NEEDED}, but {version} is installed: {_INSTALL}")
    try:
        modeling, masking = (importlib.import_module(f"transformers.{name}") for name in _MODULES)
        importlib.import_module(f"{__name__}.private_names")
        return modeling.AttentionInterface, masking.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"transformers {version} does not offer what flash_attn_ext.integrations.transformers needs ({error}), "
            f"which was tested with {OLDEST} to {NEWEST}: pip install 'transformers=={NEWEST}.*'"
        ) from error


_MODULES = ("modeling_utils", "masking_utils")
_NEEDED = f"flash_attn_ext.integrations.transformers needs transformers {OLDEST} or later"
_INSTALL = f"pip install 'transformers>={OLDEST}'"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _table_of(interface: Any) -> dict[str, Any]:
    table: dict[str, Any] = importlib.import_module(f"{__name__}.private_names").table_of(interface)
    return table


def _functions() -> tuple[Any, Any]:
    attention = importlib.import_module(f"{__name__}.attention")
    masks = importlib.import_module(f"{__name__}.masks")
    return attention.fused_attention, masks.fused_mask
