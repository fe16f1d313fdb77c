"""Detects models that compute attention by code of their own, whatever implementation they are asked for."""

from __future__ import annotations

import functools
import sys

from torch import nn

from flash_attn_ext.integrations.transformers.private_names import asks_for_an_implementation

# By model_type: the layer that computes with masks by code of its own, in models whose other layers do ask for an
# implementation.
_LAYERS = {"bigbird_pegasus": "its encoder", "deepseek_v4": "its sparse attention"}


def refuse_own_attention(config_type: type) -> None:
    """Raises ValueError for a model that would get our masks, but could not decode them."""
    layer = _LAYERS.get(getattr(config_type, "model_type", "")) or _own_attention(config_type)
    if layer is not None:
        raise ValueError(
            f"attn_implementation='fused_ext' does not reach {layer}, which computes attention by itself: use "
            "attn_implementation='eager', and flash_attn_ext.replace_sdpa() if it calls scaled_dot_product_attention"
        )


@functools.cache
def _own_attention(config_type: type) -> str | None:
    """The name of a layer that computes attention by itself, or None. A model's layers are in a module beside its
    configuration, and those that honour an implementation look it up in one table."""
    package = config_type.__module__.rpartition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{package}.modeling_")]
    if any(asks_for_an_implementation(module) for module in modules):
        return None
    for module in modules:
        for name, member in vars(module).items():
            is_layer = isinstance(member, type) and issubclass(member, nn.Module) and "Attention" in name
            if is_layer and member.__module__ == module.__name__ and "forward" in vars(member):
                return f"{module.__name__}.{name}"
    return None
