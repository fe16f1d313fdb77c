"""This library behind PyTorch's own switch of attention kernels, ``torch.nn.attention``.

    from flash_attn_ext.integrations import torch_backend

    torch_backend.register()
    torch.nn.attention.activate_flash_attention_impl("flash_attn_ext")
    ...
    torch.nn.attention.restore_flash_attention_impl()

While it is active, the aten operators of flash, cuDNN and efficient attention on CUDA, that of flash attention on the
CPU, and their backward passes run here, on every thread and for every caller: C++, TorchScript, PyTorch's
transformer modules, compiled and exported graphs that hold them, nested tensors of layout torch.jagged,
``varlen_attn``, DTensor, context parallelism. A plain call of ``F.scaled_dot_product_attention`` is taken before
PyTorch chooses an operator. For other calls PyTorch still chooses the operator. Those that no fused operator takes run
on its unfused path, and do not reach this library.

A call that this library cannot take goes to the kernel that was there before, with one warning for each reason.

``switch.py`` replaces and restores; each of the other modules has one family of operators.
"""

from __future__ import annotations

from flash_attn_ext import _frames
from flash_attn_ext.integrations.torch_backend.switch import activate

NAME = "flash_attn_ext"

_frames.skip_functions_of(__name__)


def register() -> None:
    """Make "flash_attn_ext" a name that ``torch.nn.attention.activate_flash_attention_impl`` knows. Activates nothing.

    Calling it again does nothing new. Raises ImportError where PyTorch has no such switch, which is before 2.11.

    Example:
        >>> from flash_attn_ext.integrations import torch_backend
        >>> torch_backend.register()
        >>> torch.nn.attention.activate_flash_attention_impl("flash_attn_ext")
        >>> torch.nn.attention.current_flash_attention_impl()
        'flash_attn_ext'
        >>> torch.nn.attention.restore_flash_attention_impl()
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(
            "torch.nn.attention has no register_flash_attention_impl here: it came with PyTorch 2.11. Upgrade PyTorch, "
            "or use flash_attn_ext.install_sdpa()"
        ) from error
    register_flash_attention_impl(NAME, register_fn=activate)
