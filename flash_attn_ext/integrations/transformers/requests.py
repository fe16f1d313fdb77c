"""A mask that transformers asks for, and the forms of it that hold for any mask function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_ext.integrations.transformers.private_names import is_tracing, sdpa_mask


class Request(NamedTuple):
    """A mask that transformers asks for: query i is token q_offset + i, and key j is token kv_offset + j."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any  # int or Tensor
    kv_offset: int
    mask_function: Any
    padding: Tensor | None  # (batch, tokens) bool, False where a token is padding
    device: torch.device | str
    use_vmap: bool


def kept_keys(request: Request, num_keys: int) -> Tensor | None:
    """(batch, num_keys) bool, False where a key is padding; None if none is. On a GPU, single tokens are not checked
    for that, because a loop of them would wait."""
    if request.padding is None:
        return None
    end = request.kv_offset + num_keys
    keep = request.padding[:, request.kv_offset : end]
    if keep.shape[1] < num_keys:
        keep = torch.nn.functional.pad(keep, (0, num_keys - keep.shape[1]))
    may_read = not is_tracing(keep) and (keep.device.type == "cpu" or request.q_length > 1)
    return None if may_read and bool(keep.all()) else keep


def kept_queries(request: Request) -> Tensor | None:
    """(batch, q_length) bool, False where a query is padding; None if none is, or there is one query."""
    if request.padding is None or request.q_length == 1:
        return None
    index = torch.arange(request.q_length, device=request.padding.device) + request.q_offset
    behind = request.padding.shape[
        1
    ]  # tokens behind the mask, and decoder tokens beside an encoder's, count as padding
    return torch.nn.functional.pad(request.padding, (0, 1))[:, index.clamp(max=behind)]


def dense(request: Request) -> Tensor:
    """A boolean mask, by transformers' own function."""
    mask: Tensor | None = sdpa_mask(
        batch_size=request.batch_size,
        q_length=request.q_length,
        kv_length=request.kv_length,
        q_offset=request.q_offset,
        kv_offset=request.kv_offset,
        mask_function=request.mask_function,
        attention_mask=request.padding,
        allow_is_causal_skip=False,
        use_vmap=request.use_vmap,
        device=request.device,
    )
    assert mask is not None  # allow_is_causal_skip
    return mask
