"""Warnings of calls that go to PyTorch's kernels: once for each reason, whatever the sizes in it."""

from __future__ import annotations

import re
import warnings

_warned: set[tuple[str, str]] = set()


def warn_once(what: str, reason: str, outcome: str, stacklevel: int) -> None:
    """`what` cannot be taken, for this `reason`; `outcome` says what runs. stacklevel: as of a warning made here."""
    kind = what, re.sub(r"\d+", "#", reason)
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(f"flash_attn_ext cannot take this call{what}{outcome}: {reason}", stacklevel=stacklevel)
