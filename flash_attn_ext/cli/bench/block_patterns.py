"""Lists of blocks to time: each as a block mask, of which our call and FlexAttention get lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockPattern:
    """Each block of queries of each head sees that share of the keys, in runs that are drawn at random."""

    share: float
    size: int  # queries and keys of a block
    run: int  # keys that are listed together, a multiple of `size`

    def block_mask(self, tokens: int, heads: int, device: torch.device) -> Tensor:
        """bool (1, heads, query blocks, key blocks)."""
        blocks, runs = tokens // self.size, tokens // self.run
        listed = round(self.share * runs)
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.rand(1, heads, blocks, runs, generator=generator, device=device).argsort(-1) < listed
        return drawn.repeat_interleave(self.run // self.size, -1)
