"""Masks as transformers asks the registered mask function for them, beside its own boolean masks."""

from __future__ import annotations

import torch
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from flash_attn_ext.integrations.transformers import mask_form, masks
from flash_attn_ext.masks import Intervals

BATCH = 2
LENGTHS = [  # queries, keys, the first query's position, the first key's: as caches of transformers have them
    (7, 7, 0, 0),
    (1, 7, 6, 0),
    (3, 7, 4, 0),
    (4, 9, 0, 0),  # a static cache at its beginning
    (4, 9, 2, 0),
    (1, 9, 2, 0),
    (1, 4, 9, 6),  # sliding caches that are full
    (3, 6, 9, 6),
    (9, 9, 0, 0),
]
UNALIGNED = [(5, 5, 0, 4), (5, 5, 2, 4), (5, 5, 2, 3)]  # as many keys as queries, but other tokens
WINDOWS = [None, 1, 3, 4, 20]
PADDING = {
    None: None,
    "none": [[1] * 16, [1] * 16],
    "left": [[0, 0, 0] + [1] * 13, [1] * 16],
    "right": [[1] * 16, [1] * 2 + [0] * 14],
    "holes": [[1, 0] * 8, [0, 1, 1, 0] * 4],
    "short": [[1] * 3, [0, 1, 1]],
}


def shown(mask: torch.Tensor | None, q_length: int, kv_length: int) -> torch.Tensor:
    """(BATCH, 1, q_length, kv_length) bool, of what was returned."""
    if mask is None:
        return torch.ones(BATCH, 1, q_length, kv_length, dtype=torch.bool)
    visible = mask_form.read(mask, kv_length)
    query, key = torch.arange(q_length)[:, None], torch.arange(kv_length)[None]
    if visible.cu_seqlens is not None:
        assert q_length == kv_length and int(visible.cu_seqlens.diff().max()) <= visible.max_seqlen
        token = torch.arange(BATCH * q_length).view(BATCH, q_length)
        sequence = torch.bucketize(token, visible.cu_seqlens[1:], right=True)
        seen = sequence[:, :, None] == sequence[:, None, :]
    else:
        num_keys = kv_length if visible.num_keys is None else visible.num_keys
        query = query + (num_keys - q_length)
        seen = (key < num_keys)[None]
    if visible.intervals is not None:
        assert int(visible.intervals.min()) >= 0 and int(visible.intervals.max()) <= kv_length
        seen = seen & Intervals(visible.intervals).dense(kv_length)[:, 0]
    if visible.is_causal:
        seen = seen & (key <= query)
    if visible.window is not None:
        left, right = visible.window
        seen = seen & (key >= query - left) & (key <= query + right)
    if visible.mask is not None:
        keep = visible.mask[:, 0]
        seen = seen & torch.nn.functional.pad(keep, (0, kv_length - keep.shape[-1]))
    return seen.expand(BATCH, q_length, kv_length)[:, None]


def ask(mask_function, lengths, padding=None, **options):
    q_length, kv_length, q_offset, kv_offset = lengths
    given = None if PADDING[padding] is None else torch.tensor(PADDING[padding], dtype=torch.bool)
    request = dict(
        batch_size=BATCH,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=given,
    )
    mask = masks.fused_mask(**request, **options)
    expected = sdpa_mask(**request, allow_is_causal_skip=False, use_vmap=options.get("use_vmap", False))
    assert torch.equal(shown(mask, q_length, kv_length), expected)
    return mask


def num_bytes(mask: torch.Tensor | None) -> int:
    """As much as it has when generate() has made it contiguous."""
    return 0 if mask is None else mask.numel() * mask.element_size()


# Before transformers 5.23 windows of packed sequences are counted by the tokens of the row.
REMAPS = hasattr(masking_utils, "remap_positions_for_packed_sequence")


def packed_function(position_ids, window, is_remapped=REMAPS):
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    if is_remapped:
        function = masking_utils.remap_positions_for_packed_sequence(function, position_ids)
    return and_masks(packed_sequence_mask_function(find_packed_sequence_indices(position_ids)), function)
