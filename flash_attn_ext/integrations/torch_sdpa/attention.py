"""Our attention as a stand-in for PyTorch's function: what takes a call, and what happens where ours cannot."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext import _C
from flash_attn_ext._sdpa import SdpaArguments, attend_or_decline
from flash_attn_ext.integrations._warnings import is_of_the_machine, warn_once
from flash_attn_ext.types import Fallback

TORCH_SDPA = F.scaled_dot_product_attention
Sdpa = Callable[..., Any]
AND_TORCH_RUNS = " and PyTorch's attention runs instead"  # in warnings


class _OfThread(threading.local):
    is_left_to_torch = False


of_thread = _OfThread()
"""Whether this thread is in a call that goes to PyTorch's attention, so that outer replacements let it pass."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Ours, but NotImplemented where there are operands to ask first."""
    if not is_compiling():
        out = _C.direct_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    return attend_or_decline((query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def _attention_or_torch(*args: Any, **kwargs: Any) -> Any:
    try:
        return scaled_dot_product_attention(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        if is_of_the_machine(error):
            raise
        reason = str(error)
    arguments = SdpaArguments(*args, **kwargs)
    warn_once("", reason, f"{AND_TORCH_RUNS}{_memory_of_scores(arguments)}", stacklevel=4)
    before, of_thread.is_left_to_torch = of_thread.is_left_to_torch, True
    try:
        return TORCH_SDPA(*_plain_mask(arguments)[:6], scale=arguments.scale, enable_gqa=arguments.enable_gqa)
    finally:
        of_thread.is_left_to_torch = before


attention_functions: dict[Fallback, Sdpa] = {"raise": scaled_dot_product_attention, "torch": _attention_or_torch}


def attention_with(fallback: Fallback) -> Sdpa:
    if fallback not in attention_functions:
        raise ValueError(f"fallback must be 'raise' or 'torch', got {fallback!r}")
    return attention_functions[fallback]


def _plain_mask(arguments: SdpaArguments) -> SdpaArguments:
    """Replaces PyTorch's CausalBias, which would call the name that install_sdpa replaces, by its boolean mask."""
    bias: Any = arguments.attn_mask
    variant = getattr(bias, "variant", None)
    if variant is None:
        return arguments
    num_queries, num_keys = bias.seq_len_q, bias.seq_len_kv
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=arguments.query.device)
    return arguments._replace(attn_mask=mask.tril(num_keys - num_queries if variant.name == "LOWER_RIGHT" else 0))


def _memory_of_scores(arguments: SdpaArguments) -> str:
    """A note about the memory that the unfused path may take; empty for tensors without a single shape."""
    query, key = arguments.query, arguments.key
    if not all(isinstance(t, Tensor) and not t.is_nested and t.dim() >= 2 for t in (query, key)):
        return ""
    score_bytes = math.prod(query.shape[:-1]) * key.shape[-2] * query.element_size()
    return f", which may hold {score_bytes / 2**20:.1f} MiB of scores at a time"
