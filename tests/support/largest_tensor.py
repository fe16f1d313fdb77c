"""The largest tensor on the way to a result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest memory that an operation returns, but for views of a tensor that was there."""

    def __init__(self, given: torch.Tensor | None):
        super().__init__()
        self.given, self.largest = None if given is None else given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def largest_of(make: Callable[[], object], given: torch.Tensor | None = None) -> int:
    with LargestTensor(given) as mode:
        make()
    return mode.largest
