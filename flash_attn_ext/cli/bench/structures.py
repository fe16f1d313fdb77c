"""Structured masks to time: each as intervals of keys, and as the rule by which FlexAttention makes its block mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_ext import masks
from flash_attn_ext.masks import Intervals

DOCUMENT, PREFIX, CHUNK = 4096, 2048, 8192
SHARED_PREFIX, BRANCH = 8192, 2048
NUM_GLOBAL, WINDOW = 64, 512  # keys; WINDOW includes the query's own
IMAGE_PERIOD, IMAGE_BEGIN, IMAGE_END = 1024, 256, 512  # an image of 256 tokens in every 1024
Rule = Callable[[Tensor, Tensor], Tensor]  # of a query and a key


@dataclass(frozen=True)
class Structure:
    """Both for a number of tokens and a device."""

    intervals: Callable[[int, torch.device], Intervals]
    rule: Callable[[int, torch.device], Rule]


def _documents(tokens: int, device: torch.device) -> Tensor:
    return torch.arange(tokens, device=device) // DOCUMENT


def _images(tokens: int, device: torch.device) -> Tensor:
    at = torch.arange(tokens, device=device)
    within = at % IMAGE_PERIOD
    return (at // IMAGE_PERIOD).masked_fill((within < IMAGE_BEGIN) | (within >= IMAGE_END), -1)


def _branches(tokens: int, device: torch.device) -> Tensor:
    at = torch.arange(tokens, device=device)
    return ((at - SHARED_PREFIX) // BRANCH + 1).clamp(min=0)


def _rule_of_documents(tokens: int, device: torch.device) -> Rule:
    ids = _documents(tokens, device)
    return lambda i, j: (i >= j) & (ids[i] == ids[j])


def _rule_of_images(tokens: int, device: torch.device) -> Rule:
    ids = _images(tokens, device)
    return lambda i, j: (i >= j) | ((ids[i] == ids[j]) & (ids[i] >= 0))


def _rule_of_branches(tokens: int, device: torch.device) -> Rule:
    branches = _branches(tokens, device)
    return lambda i, j: (i >= j) & ((branches[j] == 0) | (branches[i] == branches[j]))


def _global_and_window(tokens: int, device: torch.device) -> Intervals:
    seen = masks.global_and_window(tokens, NUM_GLOBAL, (WINDOW - 1, 0), device=device)
    return seen & masks.causal(tokens, device=device)


STRUCTURES = {
    "documents": Structure(
        lambda tokens, device: masks.documents(_documents(tokens, device)) & masks.causal(tokens, device=device),
        _rule_of_documents,
    ),
    "images": Structure(lambda tokens, device: masks.blocks_within_causal(_images(tokens, device)), _rule_of_images),
    "prefix": Structure(
        lambda tokens, device: masks.prefix_lm(tokens, PREFIX, device=device),
        lambda tokens, device: lambda i, j: (i >= j) | (j < PREFIX),
    ),
    "chunks": Structure(
        lambda tokens, device: masks.chunked(tokens, CHUNK, device=device),
        lambda tokens, device: lambda i, j: (i >= j) & (i // CHUNK == j // CHUNK),
    ),
    "global and window": Structure(
        _global_and_window, lambda tokens, device: lambda i, j: (i >= j) & ((j < NUM_GLOBAL) | (i - j < WINDOW))
    ),
    "shared prefix": Structure(
        lambda tokens, device: masks.shared_prefix(_branches(tokens, device)), _rule_of_branches
    ),
    "causal": Structure(
        lambda tokens, device: masks.causal(tokens, device=device), lambda tokens, device: lambda i, j: i >= j
    ),
}


def ends_of_documents(tokens: int, device: torch.device) -> Tensor:
    """(documents + 1,) int32: where each begins, and where the last one ends."""
    ends = torch.arange(0, tokens + DOCUMENT, DOCUMENT, device=device, dtype=torch.int32)
    return ends.clamp(max=tokens)


@functools.cache
def visible_pairs(name: str, tokens: int) -> int:
    """The number of (query, key) pairs of a head."""
    bounds = STRUCTURES[name].intervals(tokens, torch.device("cpu")).merged().tensor.long()
    return int((bounds[..., 1::2] - bounds[..., 0::2]).sum())
