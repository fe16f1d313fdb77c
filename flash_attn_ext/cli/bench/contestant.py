"""A contestant: a forward pass, and the passes of it that are timed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

OURS = "ours"
SDPA_BACKENDS = {
    "torch sdpa": None,  # PyTorch chooses
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Contestant:
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]  # the tensors by which its backward pass differentiates
    backend: SDPBackend | None = None
    comparable: bool = True  # whether its result should be that of the others
    sequence_first: bool = False  # gets the gradient of its result in the layout of sequence_first()
    surroundings: Callable[[], contextlib.AbstractContextManager] | None = None  # a context for its calls
    compiles: bool = False  # in its first call, which then takes far longer than the others

    def context(self) -> contextlib.AbstractContextManager:
        if self.surroundings is not None:
            return self.surroundings()
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def make_call(self, pass_: str, dout: Tensor) -> Callable[[], object]:
        """The pass as a call without arguments, its result returned. For a backward pass, runs the forward once."""
        if pass_ == "forward":
            return self.forward
        if self.sequence_first:
            dout = sequence_first(dout)
        gradients = functools.partial(torch.autograd.grad, inputs=self.leaves, grad_outputs=dout)
        if pass_ == "forward+backward":
            return lambda: gradients(self.forward())
        out = self.forward()
        return lambda: gradients(out, retain_graph=True)


def sequence_first(tensor: Tensor) -> Tensor:
    """The same (B, H, S, D), lying in memory as (B, S, H, D)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
