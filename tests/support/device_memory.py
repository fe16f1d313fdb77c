"""Peaks of GPU memory."""

from collections.abc import Callable

import torch


def extra_memory(function: Callable[[], object]) -> int:
    """Bytes at the peak of a call above what was allocated before it. The first call loads what is loaded once."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
