"""Calls that go to PyTorch's kernels: for which errors, and one warning for each reason, whatever the sizes in it."""

from __future__ import annotations

import re
import warnings

import torch

_warned: set[tuple[str, str]] = set()


def is_of_the_machine(error: Exception) -> bool:
    """Out of memory, for which the CPU's allocator has no type of its own, or what a device says: nothing to do with
    the call, and no reason for another kernel."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "DefaultCPUAllocator" in str(error)


def warn_once(what: str, reason: str, outcome: str, stacklevel: int) -> None:
    """`what` cannot be taken, for this `reason`; `outcome` says what runs. stacklevel: as of a warning made here."""
    kind = what, re.sub(r"\d+", "#", reason)
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(f"flash_attn_ext cannot take this call{what}{outcome}: {reason}", stacklevel=stacklevel)
