"""The functions of flash-attention 2 by their own names, on this library's attention.

    from flash_attn_ext.integrations.flash_attn import flash_attn_func

or, for code that imports the package ``flash_attn`` itself::

    from flash_attn_ext.integrations import flash_attn
    flash_attn.install()
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import pad_input, unpad_input

Importing this module changes nothing; only :func:`install` does, until :func:`uninstall`. docs/flash_attn.md says what
is the same, better or refused, argument by argument.
"""

from flash_attn_ext.integrations.flash_attn.functions import flash_attn_func, flash_attn_varlen_func
from flash_attn_ext.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from flash_attn_ext.integrations.flash_attn.packed_tensors import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn_ext.integrations.flash_attn.stand_in import install, uninstall

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
