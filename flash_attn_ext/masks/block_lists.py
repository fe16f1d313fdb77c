"""Lists of the blocks of keys that each block of queries sees, and FlexAttention's ``BlockMask`` as such lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_ext.masks.converters import by_blocks, seen_of_mod
from flash_attn_ext.masks.intervals import Intervals, count

BLOCK_SIZES = (64, 128)


class BlockLists:
    """The blocks of keys that each block of queries sees, for sparse attention (MoBA, NSA's selection, VSA, Quest).

    Block i of the queries sees blocks ``indices[..., i, :counts[..., i]]`` of the keys; what follows them is ignored.
    Block n has the queries, or the keys, from ``n * size`` to before ``(n + 1) * size``, and the last block may have
    fewer. Lists may have any order, and a block that comes twice counts once. A count of 0 sees nothing.

    Args:
        counts: int32 or int64, (batch or 1, heads or 1, query blocks), with batch dimensions that broadcast with those
            of q and k. Heads are those of queries, or those of keys: then the query heads of a key head share a list.
        indices: int32 or int64, the same dimensions, and a last one for the blocks of a list.
        query_block, key_block: the queries and the keys of a block, each 64 or 128.

    Raises:
        TypeError: ``counts`` or ``indices`` is no tensor, or a size no int.
        RuntimeError: dtypes, layouts, devices or shapes. ValueError: a size other than 64 and 128.

    Example:
        >>> own_and_first = torch.tensor([[0, 0], [1, 0], [2, 0]], dtype=torch.int32)  # for each of three query blocks
        >>> counts = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> lists = flash_attn_ext.masks.BlockLists(counts[None, None], own_and_first[None, None])
        >>> lists.blocks(3 * 128)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 0, 1]], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 1, 4, 3 * 128, 64)
        >>> flash_attn_ext.attention(q, k, v, block_lists=lists, causal="top_left").shape
        torch.Size([1, 4, 384, 64])
    """

    __slots__ = ("counts", "indices", "key_block", "query_block")

    def __init__(self, counts: Tensor, indices: Tensor, *, query_block: int = 128, key_block: int = 128) -> None:
        for name, tensor in (("counts", counts), ("indices", indices)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} of block lists must be an int32 or int64 tensor, got {type(tensor).__name__}")
            if tensor.dtype not in (torch.int32, torch.int64):
                raise RuntimeError(f"{name} of block lists must be int32 or int64, got {tensor.dtype}")
            if tensor.is_nested:
                raise RuntimeError(f"{name} of block lists must be dense, got a nested tensor: pad it")
            if tensor.layout != torch.strided:
                raise RuntimeError(f"{name} of block lists must be dense, got {tensor.layout}: pass its to_dense()")
        if counts.device != indices.device:
            raise RuntimeError(f"counts of block lists are on {counts.device}, but indices on {indices.device}")
        if counts.dim() < 1 or indices.dim() != counts.dim() + 1 or indices.shape[:-1] != counts.shape:
            raise RuntimeError(
                "block lists must be counts (..., query blocks) and indices (..., query blocks, blocks of a list), got "
                f"{tuple(counts.shape)} and {tuple(indices.shape)}"
            )
        self.counts, self.indices = counts, indices
        self.query_block, self.key_block = _size("query_block", query_block), _size("key_block", key_block)

    def __repr__(self) -> str:
        return (
            f"BlockLists({tuple(self.counts.shape)} lists of at most {self.indices.shape[-1]} blocks, each of "
            f"{self.query_block} queries x {self.key_block} keys, on {self.counts.device})"
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BlockLists:
        """The same lists on a device, as ``torch.Tensor.to`` moves them."""
        moved = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.counts, self.indices))
        return BlockLists(*moved, query_block=self.query_block, key_block=self.key_block)

    def blocks(self, keys: int) -> Tensor:
        """Which blocks are seen: bool, (..., query blocks, key blocks) for that number of keys. Blocks that do not
        exist are left out."""
        return _block_mask_of(self.counts, self.indices, -(-count("keys", keys) // self.key_block))

    def dense(self, queries: int, keys: int, *, heads: int | None = None) -> Tensor:
        """The boolean mask, (..., queries, keys), True = seen: for inspection and tests, since it has every pair. With
        ``heads``, that of so many query heads: lists of key heads are those of their query heads."""
        blocks = self.blocks(keys)
        if heads is not None and blocks.dim() > 2 and blocks.shape[-3] > 1:
            blocks = blocks.repeat_interleave(heads // blocks.shape[-3], -3)
        pairs = blocks.repeat_interleave(self.query_block, -2).repeat_interleave(self.key_block, -1)
        return pairs[..., : count("queries", queries), :keys]


class BlocksAndIntervals(NamedTuple):
    """A mask as two keywords of ``attention``: pass them as ``**mask._asdict()``."""

    block_lists: BlockLists
    intervals: Intervals | None


def from_blocks(blocks: Tensor, *, query_block: int = 128, key_block: int = 128) -> BlockLists:
    """The lists of a boolean block mask. Does not wait for a GPU: each list has room for all blocks.

    Args:
        blocks: bool, (..., query blocks, key blocks), True = seen.
        query_block, key_block: the queries and the keys of a block, each 64 or 128.

    Raises:
        TypeError: ``blocks`` is no tensor. RuntimeError: its dtype or shape. ValueError: a size of blocks.

    Example:
        >>> lists = flash_attn_ext.masks.from_blocks(torch.tensor([[True, False, True], [False, True, False]]))
        >>> lists.counts.tolist(), lists.indices.tolist()
        ([2, 1], [[0, 2, 1], [1, 0, 2]])
    """
    if not isinstance(blocks, Tensor):
        raise TypeError(f"blocks must be a bool tensor (..., query blocks, key blocks), got {type(blocks).__name__}")
    if blocks.dtype != torch.bool or blocks.dim() < 2:
        raise RuntimeError(
            f"blocks must be bool, (..., query blocks, key blocks), got {blocks.dtype} {tuple(blocks.shape)}"
        )
    order = torch.argsort((~blocks).to(torch.uint8), dim=-1, stable=True)
    counts = blocks.sum(-1, dtype=torch.int32)
    return BlockLists(counts, order.to(torch.int32), query_block=query_block, key_block=key_block)


def from_block_mask(
    block_mask: Any, mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
) -> BlocksAndIntervals:
    """The lists of a ``BlockMask`` of FlexAttention, and intervals of what ``mask_mod`` leaves inside partial blocks.

    The blocks are its full and its partial ones together. Only inside partial blocks does ``mask_mod`` decide, as in
    FlexAttention. An interval may reach over blocks that are not listed, so a causal ``mask_mod`` needs one interval,
    whatever the blocks are. Waits for a GPU. If there are partial blocks, every pair is evaluated once, so convert a
    mask that stays the same once.

    Args:
        block_mask: a ``torch.nn.attention.flex_attention.BlockMask``. Its blocks have multiples of 64 queries and keys.
        mask_mod: in place of ``block_mask.mask_mod``.

    Returns:
        ``(block_lists, intervals)``: the two keywords of ``attention``. ``intervals`` is None where nothing is hidden
        inside a block.

    Raises:
        ValueError: a row needs more than four intervals; the message names it and the number. Blocks of another size.
            A slice of a ``BlockMask`` along its queries.
        RuntimeError: ``mask_mod`` returns another dtype than bool. TypeError: ``block_mask`` is no ``BlockMask``.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> def causal(b, h, i, j):
        ...     return i >= j
        >>> mask = flash_attn_ext.masks.from_block_mask(create_block_mask(causal, 1, 1, 256, 256, device="cpu"))
        >>> mask.block_lists.blocks(256)[0, 0].tolist(), mask.intervals.tensor[0, 0, 5].tolist()
        ([[True, False], [True, True]], [0, 6])
        >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
        >>> flash_attn_ext.attention(q, k, v, **mask._asdict()).shape
        torch.Size([1, 4, 256, 64])
    """
    from torch.nn.attention.flex_attention import BlockMask  # here, since it imports the compiler

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask of FlexAttention, got {type(block_mask).__name__}")
    queries, keys = (int(length) for length in block_mask.seq_lengths)
    sizes = tuple(int(size) for size in block_mask.BLOCK_SIZE)
    if any(size % BLOCK_SIZES[0] or size == 0 for size in sizes):
        raise ValueError(
            f"block_mask has blocks of {sizes[0]} queries x {sizes[1]} keys, expected multiples of 64: pass such a "
            "BLOCK_SIZE to create_block_mask"
        )
    rows = block_mask.kv_num_blocks.shape[-1]
    if rows < -(-queries // sizes[0]):
        raise ValueError(
            f"block_mask has {rows} rows of blocks of {sizes[0]} queries, but its seq_lengths say {queries} queries, "
            "as those of a slice do: convert the whole one, or make one for these queries with "
            "BlockMask.from_kv_blocks(..., seq_lengths=)"
        )
    width = -(-keys // sizes[1])
    partial = _block_mask_of(block_mask.kv_num_blocks, block_mask.kv_indices, width)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _block_mask_of(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, width)
    lists = _divide(partial | full, sizes, queries, keys)
    partial = partial & ~full
    if not bool(partial.any()):
        return BlocksAndIntervals(lists, None)
    mod = block_mask.mask_mod if mask_mod is None else mask_mod
    batch, heads = partial.shape[:2]
    position = torch.arange(keys, device=partial.device)

    def evaluate(begin: int, end: int) -> Tensor:
        def of_rows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mod(b, h, i + begin, j)

        seen = seen_of_mod(of_rows, batch, heads, end - begin, keys, partial.device)
        rows = torch.arange(begin, end, device=partial.device) // sizes[0]
        is_full, is_partial = (table[:, :, rows][..., position // sizes[1]] for table in (full, partial))
        seen = is_full | (is_partial & seen)
        # A key of no listed block may be in an interval or not. It takes what the last listed key before it has, so
        # that no interval begins or ends there.
        last_listed = torch.where(is_full | is_partial, position, -1).cummax(-1).values
        return seen.gather(-1, last_listed.clamp(min=0)) & (last_listed >= 0)

    return BlocksAndIntervals(lists, by_blocks(evaluate, (batch, heads, queries, keys), partial.device))


def _size(name: str, value: Any) -> int:
    size = count(name, value)
    if size not in BLOCK_SIZES:
        raise ValueError(f"{name} must be 64 or 128, got {size}: divide larger blocks into blocks of 128")
    return size


def _block_mask_of(counts: Tensor, indices: Tensor, width: int) -> Tensor:
    """bool (..., query blocks, width). What follows a list goes to a column before the first one, and a block that does
    not exist to that or to one behind the last. Both columns are cut off."""
    position = torch.arange(indices.shape[-1], device=indices.device)
    column = torch.where(position < counts[..., None], indices.clamp(-1, width), -1).long() + 1
    empty = torch.zeros((*indices.shape[:-1], width + 2), dtype=torch.bool, device=indices.device)
    return empty.scatter(-1, column, True)[..., 1 : width + 1]


def _divide(blocks: Tensor, sizes: tuple[int, ...], queries: int, keys: int) -> BlockLists:
    """Lists of blocks of 64 or 128, the larger where it divides the blocks of ``sizes``."""
    small = tuple(next(size for size in reversed(BLOCK_SIZES) if given % size == 0) for given in sizes)
    for dim, given, size, length in ((-2, sizes[0], small[0], queries), (-1, sizes[1], small[1], keys)):
        blocks = blocks.repeat_interleave(given // size, dim).narrow(dim, 0, -(-length // size))
    return from_blocks(blocks, query_block=small[0], key_block=small[1])
