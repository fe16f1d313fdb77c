"""The switch of PyTorch's fused inference path (torch.backends.mha), shared by all replacements that are in force."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from flash_attn_ext._torch_private import DisableTorchFunction
from flash_attn_ext.integrations import _nested_inference


class FusedInference:
    """PyTorch's fused inference path of its transformer modules, which is off while any replacement is in force.

    The path checks for modes by itself, except under torch.compile and on threads without one. Nested tensors, which
    nothing else takes, may still use it.
    """

    def __init__(self, take_nested: _nested_inference.TakeNested):
        self.take_nested = take_nested
        self.lock = threading.Lock()
        self.users = 0
        self.suspensions = 0
        self.enabled_before = True

    def switch_off(self) -> None:
        if torch.compiler.is_dynamo_compiling():  # dynamo can trace neither a lock nor the switch
            return
        with self.lock:
            if self.users == 0:
                self.enabled_before = torch.backends.mha.get_fastpath_enabled()
                _nested_inference.watch(self.take_nested)
            self.users += 1
            self._set()

    def switch_back(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        with self.lock:
            self.users -= 1
            if self.users == 0:
                _nested_inference.unwatch()
            self._set()

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """A context without any replacement in force. All threads share the switch, so the inference of another thread
        may take the path too, meanwhile."""
        self._change_suspensions(1)
        try:
            with DisableTorchFunction():
                yield
        finally:
            self._change_suspensions(-1)

    def _change_suspensions(self, change: int) -> None:
        with self.lock:
            self.suspensions += change
            self._set()

    def _set(self) -> None:
        torch.backends.mha.set_fastpath_enabled(self.enabled_before and (self.users == 0 or self.suspensions > 0))
