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

from flash_attn_ext.integrations.torch_sdpa.install import install_sdpa, uninstall_sdpa
from flash_attn_ext.integrations.torch_sdpa.mode import SdpaReplacement, replace_sdpa

__all__ = ["SdpaReplacement", "install_sdpa", "replace_sdpa", "uninstall_sdpa"]
