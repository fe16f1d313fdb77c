"""Memory for tiles on the CPU, which is reused for tile after tile.

The system maps fresh memory of a tile's size page by page as it is first written, which can take longer than the
product that is written there. On a GPU, PyTorch's allocator keeps such memory ready.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor


class Scratch:
    """Buffers in the order in which they are taken."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._buffers: list[Tensor] = []
        self._taken = 0

    def take(self, *shape: int) -> Tensor | None:
        """Uninitialised memory for the `out` argument of an operation; None on a GPU."""
        if self._device.type != "cpu":
            return None
        size = math.prod(shape)
        if self._taken == len(self._buffers):
            self._buffers.append(torch.empty(size, dtype=self._dtype, device=self._device))
        elif self._buffers[self._taken].numel() < size:
            self._buffers[self._taken] = torch.empty(size, dtype=self._dtype, device=self._device)
        self._taken += 1
        return self._buffers[self._taken - 1][:size].view(shape)

    @contextlib.contextmanager
    def reused(self) -> Iterator[None]:
        """A context. Buffers that are taken within it are free again afterwards."""
        taken = self._taken
        yield
        self._taken = taken
