"""The dropout seed of a call, in the tensors that PyTorch's schemas have for the state of its own generator.

An operator returns the first elements of two storages of ours: the seed, or the seed and MARK, and MARK as the
"offset". PyTorch's meta kernels declare the shapes, strides and storage offsets of both. A backward pass recognises
ours by the sizes of their storages, which no kernel of PyTorch allocates for a few bytes, so nothing waits for the
device. If the tensors were copied since (saved tensors that went to the CPU and back), their values tell whose they
are. Without dropout it does not matter which library ran the forward pass, and no kernel reads the two tensors.
"""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import Tensor

from flash_attn_ext._call.problem import Problem
from flash_attn_ext.integrations.torch_backend.operands import NotTaken

MARK = -0x666C6173685F6174  # no generator's offset is negative
_STORAGE_ELEMENTS = (37, 41)  # of int64, of the first tensor and of the offset
_states: dict[int, weakref.ref] = {}  # of forward passes with dropout whose backward pass may still run


def draw(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (our seed, the two tensors to return). These have dtype uint64 and shapes (2,) and () for flash
    attention, or dtype int64 and shapes () and ()."""
    state, mark = (torch.full((count,), MARK, dtype=torch.int64, device=device) for count in _STORAGE_ELEMENTS)
    seed = state[:1].random_(0, 2**63 - 1)  # as flash_attn_ext.attention draws it
    first = state[:2].view(dtype) if dtype == torch.uint64 else state[0]
    state_of_call = weakref.ref(first, lambda ref: _states.pop(id(ref), None))
    _states[id(state_of_call)] = state_of_call
    return seed, first, mark[0].view(dtype)


def unused(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensors to return without dropout, which no kernel reads. They are new for each call, because CUDA graph
    trees want outputs in their own memory pool."""
    return (
        torch.empty(2 if dtype == torch.uint64 else (), dtype=dtype, device=device),
        torch.empty((), dtype=dtype, device=device),
    )


def with_drawn(problem: Problem, dtype: torch.dtype) -> tuple[Problem, Tensor, Tensor]:
    """Returns (the problem with its seed, the two tensors to return) of a forward pass."""
    device = problem.q.device
    if problem.dropout_p == 0:
        return problem, *unused(device, dtype)
    seed, first, offset = draw(device, dtype)
    return problem._replace(rng_seed=seed), first, offset


def with_seed_of(problem: Problem, first: Tensor, offset: Tensor) -> Problem:
    """The problem of a backward pass, with the seed of its forward pass."""
    return problem if problem.dropout_p == 0 else problem._replace(rng_seed=seed_of(first, offset))


def seed_of(first: Tensor, offset: Tensor) -> Tensor:
    """Our seed from the two tensors that a backward pass with dropout got. Raises NotTaken if they are PyTorch's."""
    elements = first.view(torch.int64) if first.dtype == torch.uint64 else first
    storage_elements = tuple(tensor.untyped_storage().nbytes() // 8 for tensor in (first, offset))
    if storage_elements != _STORAGE_ELEMENTS or first.device != offset.device:
        mark = elements[-1:] if elements.dim() else offset
        if not _is_mark(mark):
            raise NotTaken("its forward pass ran on PyTorch's kernel, which drew other dropout bits")
    return elements.reshape(-1)[:1]


def _is_mark(element: Tensor) -> bool:
    """Whether an element is MARK, for which this waits for the device. A CUDA graph cannot wait; in it, all tensors of
    ours are recognised by their storages."""
    if element.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return element.numel() == 1 and int(element) == MARK


def warn_of_pending_backward_passes() -> None:
    if _states:
        warnings.warn(
            f"PyTorch's kernels are back, while {len(_states)} forward pass(es) with dropout that flash_attn_ext ran "
            "may still have their backward pass to come: it would draw other dropout bits, and the gradients would be "
            "wrong. Run the backward passes first, or drop the graphs",
            stacklevel=4,
        )
