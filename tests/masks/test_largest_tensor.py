"""No tensor with every pair is made, on the way to intervals either: the largest one of each call has a bound."""

import pytest
import torch

from flash_attn_ext import masks
from flash_attn_ext.masks import converters
from support.largest_tensor import largest_of

TOKENS = 2048
BLOCK_PAIRS = 2**14


IDS = torch.arange(TOKENS) // 100
FAMILIES = {
    "documents": lambda: masks.documents(IDS) & masks.causal(TOKENS),
    "prefix_lm": lambda: masks.prefix_lm(TOKENS, 100) & masks.padding(TOKENS, 900),
    "chunked": lambda: masks.chunked(TOKENS, 100) | masks.window(TOKENS, (50, 0)),
    "blocks_within_causal": lambda: masks.blocks_within_causal(IDS % 4 - 1),
    "block_causal": lambda: masks.block_causal(TOKENS, 100),
    "global_and_window": lambda: masks.global_and_window(TOKENS, 64, 128),
    "shared_prefix": lambda: masks.shared_prefix(IDS % 4),
    "block_diffusion": lambda: masks.block_diffusion(TOKENS // 2, 100),
    "tree": lambda: masks.tree(torch.arange(TOKENS) - 1, prefix=100),
}
RANGES = torch.stack([torch.arange(0, TOKENS, 128), torch.arange(0, TOKENS, 128) + 128], 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    assert largest_of(FAMILIES[name], IDS) <= TOKENS * 8 * 8  # up to eight int64 for a query


@pytest.mark.parametrize(
    "convert",
    [
        lambda seen: masks.from_mask(seen),
        lambda seen: masks.from_mask_mod(lambda b, h, i, j: (j <= i) & (i // 100 == j // 100), 1, 1, TOKENS, TOKENS),
        lambda seen: masks.from_flashmask(((IDS + 1) * 100).view(1, 1, TOKENS, 1), causal=True),
        lambda seen: masks.from_magi(RANGES, RANGES, queries=TOKENS, keys=TOKENS),
    ],
    ids=["mask", "mask_mod", "flashmask", "magi"],
)
def test_converters(convert, monkeypatch):
    monkeypatch.setattr(converters, "BLOCK_PAIRS", BLOCK_PAIRS)
    seen = masks.documents(IDS).dense(TOKENS)
    # int64 positions of a block's pairs, or eight numbers for a query; every pair of this mask would be 4 MiB.
    assert largest_of(lambda: convert(seen), seen) <= max(8 * BLOCK_PAIRS, TOKENS * 8 * 8)
