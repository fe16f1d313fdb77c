"""cuDNN's FlexAttention, of the package nvidia-cudnn-frontend, as a peer for masks that are intervals of keys.

It takes the bounds of the intervals and makes a plan of them. The plan is made once and not timed, as the block mask of
PyTorch's FlexAttention is.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext.cli.bench.contestant import Contestant, sequence_first
from flash_attn_ext.cli.bench.workload import Inputs, Workload
from flash_attn_ext.masks import Intervals

CUDNN_FLEX = "cudnn flex"
MODULE = "cudnn.flex_attention"


def cudnn_flex_contestant(workload: Workload, inputs: Inputs) -> Contestant:
    """The contestant for a workload with intervals and no other option. Its plan is made, and its kernels compile, in
    its first call, so that a failure is its own."""
    assert inputs.intervals is not None
    bounds = cudnn_bounds(Intervals(inputs.intervals), workload.batch)
    leaves = tuple(
        sequence_first(tensor.detach()).requires_grad_(tensor.requires_grad)
        for tensor in (inputs.q, inputs.k, inputs.v)
    )

    @functools.cache
    def plan() -> Any:
        package = importlib.import_module(MODULE)
        return package.create_mask_plan(bounds, *(leaf.transpose(1, 2) for leaf in leaves))

    def forward() -> Tensor:
        package = importlib.import_module(MODULE)
        out: Tensor = package.flex_attn_func(*(leaf.transpose(1, 2) for leaf in leaves), mask_plan=plan())
        return out.transpose(1, 2)

    return Contestant(forward, leaves, sequence_first=True, compiles=True)


def cudnn_bounds(seen: Intervals, batch: int) -> Tensor:
    """(heads or 1, an odd number of bounds, batch · queries) int32: the keys [0, F0), [F1, F2), [F3, F4), ...

    The bounds of a query ascend, and are as few as they can be.
    """
    merged = seen.merged().tensor
    if bool((merged[..., 0] == 0).all()):
        ascending = merged[..., 1:]
    else:
        ascending = torch.cat([torch.zeros_like(merged[..., :1]), merged], -1)
    return ascending.expand(batch, -1, -1, -1).permute(1, 3, 0, 2).flatten(2).contiguous()
