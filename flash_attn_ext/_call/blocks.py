"""Users' lists of blocks as the boolean block mask that the extension takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import operands_of
from flash_attn_ext.masks import BlockLists, BlocksAndIntervals


def blocks_of(block_lists: Any, q: Tensor, k: Tensor) -> Tensor:
    """bool (..., Hq or 1, query blocks, key blocks). Heads come before the sequence in q and k. Devices,
    batch dimensions that q and k lack, and those in which both have 1 are checked with the call's other tensors."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    lists = _lists_of(block_lists, num_queries, num_keys)
    counts = lists.counts
    if counts.shape[-1] != -(-num_queries // lists.query_block):
        raise RuntimeError(
            f"block_lists has counts {tuple(counts.shape)}: {counts.shape[-1]} lists, expected "
            f"{-(-num_queries // lists.query_block)}, one for each block of {lists.query_block} of the {num_queries} "
            "queries"
        )
    of_q, of_k = q.shape[:-3], k.shape[:-3]
    for given, size_q, size_k in zip(*(reversed(batch) for batch in (counts.shape[:-2], of_q, of_k)), strict=False):
        size = size_k if size_q == 1 else size_q
        if size != 1 and given not in (1, size):
            raise RuntimeError(
                f"block_lists has counts {tuple(counts.shape)}, expected batch dimensions that are 1 or as those of q "
                f"{tuple(of_q)} and k {tuple(of_k)}, before heads and query blocks"
            )
    _check_values(lists, num_keys)
    blocks = _block_mask(lists, num_keys)
    heads, key_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in (q, k))
    given = counts.shape[-2] if counts.dim() > 1 else 1
    if given not in (1, heads, key_heads):
        raise RuntimeError(
            f"block_lists has counts {tuple(counts.shape)} with {given} heads, expected 1, {heads} as q has, or "
            f"{key_heads} as k has"
        )
    if given not in (1, heads):
        blocks = blocks.repeat_interleave(heads // key_heads, dim=-3)
    return blocks


def tensors_of(block_lists: Any) -> tuple[Any, ...]:
    """The tensors of lists, or what was given in place of them."""
    if isinstance(block_lists, BlockLists):
        return block_lists.counts, block_lists.indices
    return block_lists if isinstance(block_lists, tuple) else (block_lists,)


def _lists_of(block_lists: Any, num_queries: int, num_keys: int) -> BlockLists:
    if isinstance(block_lists, BlockLists):
        return block_lists
    if isinstance(block_lists, BlocksAndIntervals):
        raise TypeError(
            "block_lists is what from_block_mask returns, lists and intervals: pass **block_lists._asdict()"
        )
    if not isinstance(block_lists, tuple) or len(block_lists) != 2:
        kind = type(block_lists).__name__
        remedy = ": pass **flash_attn_ext.masks.from_block_mask(block_mask)._asdict()" * (kind == "BlockMask")
        raise TypeError(
            f"block_lists must be flash_attn_ext.masks.BlockLists or a pair (counts, indices), got {kind}{remedy}"
        )
    counts, indices = block_lists
    BlockLists(counts, indices)  # checks them
    sizes = [size for size in (64, 128) if counts.shape[-1] == -(-num_queries // size)]
    if len(sizes) == 2 and (num_keys <= 64 or num_queries == 0):  # all blocks are the only one, or there is none
        sizes = sizes[:1]
    if len(sizes) != 1:
        raise RuntimeError(
            f"block_lists has counts {tuple(counts.shape)} for {num_queries} queries, from which the size of blocks "
            "does not follow: pass flash_attn_ext.masks.BlockLists(counts, indices, query_block=..., key_block=...)"
        )
    return BlockLists(counts, indices, query_block=sizes[0], key_block=sizes[0])


def _block_mask(lists: BlockLists, num_keys: int) -> Tensor:
    """On a GPU one kernel makes the mask. In traces and transforms, PyTorch's operations do."""
    counts, indices = lists.counts, lists.indices
    if not counts.is_cuda or counts.dtype != indices.dtype or operands_of(counts, indices, indices) < _C.PLAIN:
        return lists.blocks(num_keys)
    return _C.block_mask(counts, indices, -(-num_keys // lists.key_block))


def _check_values(lists: BlockLists, num_keys: int) -> None:
    """On the CPU, where values can be looked at: in traces and transforms they cannot."""
    counts, indices = lists.counts, lists.indices
    if not counts.is_cpu or not counts.numel() or operands_of(counts, indices, indices) < _C.PLAIN:
        return
    most = indices.shape[-1]
    if int(counts.min()) < 0 or int(counts.max()) > most:
        raise ValueError(
            f"block_lists has counts from {int(counts.min())} to {int(counts.max())}, expected 0 to {most}, the blocks "
            "that a list has room for"
        )
    listed = indices[torch.arange(most, device=indices.device) < counts[..., None]]
    width = -(-num_keys // lists.key_block)
    if listed.numel() and (int(listed.min()) < 0 or int(listed.max()) >= width):
        raise ValueError(
            f"block_lists has blocks from {int(listed.min())} to {int(listed.max())}, expected 0 to {width - 1}: "
            f"{num_keys} keys are {width} blocks of {lists.key_block}"
        )
