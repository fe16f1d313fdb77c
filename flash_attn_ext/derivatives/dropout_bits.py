"""The bits of dropout for a tile of scores, as csrc/attention/dropout.h draws them, on any device.

Philox-4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One counter gives 8
draws of 16 bits, for queries {q, q + 8} x keys {k, k + 8, k + 16, k + 24} of a block of 16 queries x 32 keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK_QUERIES, _BLOCK_KEYS, _LANES = 16, 32, 8
_WORD = 0xFFFFFFFF


class Region(NamedTuple):
    """A region of scores: the first batch entry and query head, how many of each, and queries and keys [start,
    stop)."""

    batch: slice
    heads: slice
    queries: slice
    keys: slice


def kept(seed: Tensor, dropout_p: float, of: Region) -> Tensor:
    """bool (batch, heads, queries, keys), True = kept. seed: (1,) int64, dropout_p above 0 and below 1."""
    first_query, first_key = of.queries.start // _BLOCK_QUERIES, of.keys.start // _BLOCK_KEYS
    query_blocks = -(-of.queries.stop // _BLOCK_QUERIES) - first_query
    key_blocks = -(-of.keys.stop // _BLOCK_KEYS) - first_key

    def counters(start: int, count: int, dimension: int) -> Tensor:
        numbers = torch.arange(start, start + count, device=seed.device)
        return numbers.view([-1 if index == dimension else 1 for index in range(4)])

    words = _philox_4x32_7(
        [
            counters(first_key * _LANES, key_blocks * _LANES, 3),
            counters(first_query * _LANES, query_blocks * _LANES, 2),
            counters(of.heads.start, of.heads.stop - of.heads.start, 1),
            counters(of.batch.start, of.batch.stop - of.batch.start, 0),
        ],
        seed,
    )
    threshold = min(max(math.floor(dropout_p * 2**16 + 0.5), 1), 2**16 - 1)
    # (batch, heads, query block, half, query, key block, word, key)
    draws = torch.stack([torch.stack([word & 0xFFFF, word >> 16]) for word in words])
    draws = draws.unflatten(-1, (key_blocks, _LANES)).unflatten(-3, (query_blocks, _LANES))
    bits = (draws >= threshold).permute(2, 3, 4, 1, 5, 6, 0, 7)
    bits = bits.flatten(5, 7).flatten(2, 4)
    skipped_queries, skipped_keys = of.queries.start % _BLOCK_QUERIES, of.keys.start % _BLOCK_KEYS
    queries = slice(skipped_queries, skipped_queries + of.queries.stop - of.queries.start)
    return bits[:, :, queries, skipped_keys : skipped_keys + of.keys.stop - of.keys.start]


def _philox_4x32_7(counter: list[Tensor], seed: Tensor) -> list[Tensor]:
    """Returns four 32-bit words, in int64. The 64 bits of a product are correct, whatever sign int64 gives them."""
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(7):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            ((second >> 32) & _WORD) ^ counter[1] ^ key[0],
            second & _WORD,
            ((first >> 32) & _WORD) ^ counter[3] ^ key[1],
            first & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    # Words begin with the sizes of their own dimensions, and rounds broadcast them.
    return list(torch.broadcast_tensors(*counter))
