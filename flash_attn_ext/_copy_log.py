"""Logs the tensors that are copied because kernels cannot read them in place: logger "flash_attn_ext", level DEBUG."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._torch_private import data_address

_ROW_ALIGNMENT_BYTES = 16

logger = logging.getLogger("flash_attn_ext")


def log_copy(name: str, tensor: Tensor, needed: str) -> None:
    """Called by the extension, from any thread, for each tensor that it copies."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s was copied: the kernels read %s; it has shape %s, strides %s and %s-byte elements, and begins %s bytes "
            "past a multiple of %s. To save the copy, %s",
            name,
            needed,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.element_size(),
            data_address(tensor) % _ROW_ALIGNMENT_BYTES,
            _ROW_ALIGNMENT_BYTES,
            _advice(name, tensor),
        )


def _advice(name: str, tensor: Tensor) -> str:
    if name in ("dout", "dlse"):
        return f"give the operation that follows attention a dense gradient ({name[1:]}.sum() makes an expanded one)"
    unit = _ROW_ALIGNMENT_BYTES // tensor.element_size()
    columns = tensor.shape[-1]
    if tensor.dim() > 1 and columns % unit:
        padded = math.ceil(columns / unit) * unit
        return f"allocate rows of {padded} elements and pass [..., :{columns}] of them"
    return f"pass {name}.contiguous(), or for a view into a larger tensor an offset of a multiple of {unit} elements"


_C.set_copy_log(log_copy)
