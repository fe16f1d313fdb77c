"""Exact attention for PyTorch: forward, backward, and every option of attention, never holding the matrix of scores.

The functions are in ``flash_attn_ext.functional``, the definition of each rule in ``flash_attn_ext.reference``;
``python -m flash_attn_ext info`` says what this installation can run.
"""

__version__ = "0.1.0"

try:
    import torch
except ImportError as error:
    raise ImportError("flash_attn_ext needs PyTorch, which is not installed here: pip install torch") from error

from flash_attn_ext import _import_errors, _load

try:
    _load.load_extension(torch.__version__)
except ImportError as error:
    message = _import_errors.explain_missing_extension(error, __version__, torch.__version__)
    raise ImportError(message) from error

from flash_attn_ext import _copy_log, _flops, _frames, bias_tables, masks, ops, reference, types
from flash_attn_ext._explanation import Explanation, Plan
from flash_attn_ext.autograd import FlashAttentionFunction
from flash_attn_ext.functional import (
    attention,
    attention_varlen,
    attention_with_kvcache,
    explain,
    scaled_dot_product_attention,
)
from flash_attn_ext.integrations.torch_sdpa import install_sdpa, replace_sdpa, uninstall_sdpa

__all__ = [
    "Explanation",
    "FlashAttentionFunction",
    "Plan",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "explain",
    "install_sdpa",
    "replace_sdpa",
    "scaled_dot_product_attention",
    "uninstall_sdpa",
]

_frames.skip_functions_of(__name__)
