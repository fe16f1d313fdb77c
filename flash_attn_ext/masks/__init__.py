"""Structured masks as intervals of keys: linear in the length of a sequence, never a table of all pairs.

A query of most masks in use sees one to four intervals of keys. A function of this module makes them, for a family of
masks or from what another library has. Each returns :class:`Intervals`. They combine with ``&`` and ``|``, and
``dense(keys)`` shows them as a boolean mask:

>>> from flash_attn_ext import masks
>>> packed = masks.documents(torch.tensor([0, 0, 0, 1, 1])) & masks.causal(5)
>>> packed.dense(5)[0, 0].int()
tensor([[1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1]], dtype=torch.int32)

A mask that shows or hides whole blocks of keys, such as a router picks, is made of :class:`BlockLists` instead.

In what follows, query i and key j are positions in a sequence. The definition of each family is a line of
``flash_attn_ext.reference.MASKS``.
"""

from flash_attn_ext.masks.block_lists import BlockLists, BlocksAndIntervals, from_block_mask, from_blocks
from flash_attn_ext.masks.constructors import (
    block_causal,
    block_diffusion,
    blocks_within_causal,
    causal,
    chunked,
    documents,
    global_and_window,
    padding,
    prefix_lm,
    shared_prefix,
    tree,
    window,
)
from flash_attn_ext.masks.converters import from_cudnn, from_flashmask, from_magi, from_mask, from_mask_mod
from flash_attn_ext.masks.intervals import Intervals

__all__ = [
    "BlockLists",
    "BlocksAndIntervals",
    "Intervals",
    "block_causal",
    "block_diffusion",
    "blocks_within_causal",
    "causal",
    "chunked",
    "documents",
    "from_block_mask",
    "from_blocks",
    "from_cudnn",
    "from_flashmask",
    "from_magi",
    "from_mask",
    "from_mask_mod",
    "global_and_window",
    "padding",
    "prefix_lm",
    "shared_prefix",
    "tree",
    "window",
]
