"""Errors that do not send a call to PyTorch's kernels, and warnings about those that do, one for each reason."""

from __future__ import annotations

import re
import warnings

import torch

_warned: set[tuple[str, str]] = set()


def is_of_the_machine(error: Exception) -> bool:
    """Whether an error concerns the machine: it is out of memory, for which the CPU's allocator has no type of its own,
    or a device reports an error. Another kernel would not help."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "DefaultCPUAllocator" in str(error)


def warn_once(what: str, reason: str, outcome: str, stacklevel: int) -> None:
    """Warns that `what` cannot be taken, for this `reason`, once for each reason, whatever the sizes in it. `outcome`
    says what runs. stacklevel: that of a warning made here."""
    kind = what, re.sub(r"\d+", "#", reason)
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(f"flash_attn_ext cannot take this call{what}{outcome}: {reason}", stacklevel=stacklevel)
