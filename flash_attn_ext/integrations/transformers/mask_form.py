"""Encodes a mask as a plain 4-D tensor. transformers copies masks, passes them on and gives them to torch.compile, so
an object of our own, or an attribute of a tensor, would be lost.

There are four forms. Only the first may have the size of (queries, keys), if a mask has no other form:

- bool or floating, (B | 1, H | 1, L | 1, S): an ordinary mask, True = attend, or one that is added to the scores.
- uint8, (B | 0, 1, kind, 5 (keys + number) + kind): **flags** and an interval. ``keys`` is the number of keys that the
  layer has. ``kind`` says whether there are causality and a window of ``number`` keys before the diagonal, or causality
  where no query sees the last ``number`` keys and the last query is aligned with the last key before these. Row
  [b, 0, 0, :keys] says which keys are no padding; without rows, there is no padding. A mask that was cut to the keys,
  or to fewer queries than ``kind``, has none of these shapes. A cut to more queries changes nothing and cannot be
  found.
- uint32, (sequences + 1, blocks, 1, 1 | 2 + left): **packed** causal sequences. [:, 0, 0, 0] are the cumulative
  lengths, and none is longer than ``blocks`` times BLOCK.
- uint32, (B | 1, 1, L + 1, 2n) with L above 1: **intervals** of keys, as ``attention`` takes them in int32, and a last
  row, each number of which is the number of keys. There are more keys than these 2n numbers, so the form loses none
  when it is cut to the keys.

Sizes are numbers on the host, so reading them does not wait for a GPU. Dimensions that only encode a number have a
stride of 0, and are small enough for a copy to do no harm. Rows of flags take about five bytes for each key, and their
copies up to six times that. A model that adds its mask to scores itself, instead of
calling the attention function, fails because of the shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext.masks import Intervals
from flash_attn_ext.masks.intervals import MAX_INTERVALS
from flash_attn_ext.types import Causal

KEYS, CAUSAL, CAUSAL_WINDOW, WINDOW, CAUSAL_PREFIX = 2, 3, 4, 5, 6  # kinds of flags; not 1, which broadcasts
_KINDS = 5  # as many as there are
FLAGS = torch.uint8
BLOCK = 128


class Visible(NamedTuple):
    """The keys that each query sees, as the options of ``attention`` and ``attention_varlen``."""

    is_causal: bool = False  # the last query sees the last key
    left: int | None = None  # a window's keys before the diagonal; as many after it, unless causal
    num_keys: int | None = None  # no query sees later keys; None: there are none
    mask: Tensor | None = None
    bias: Tensor | None = None
    intervals: Tensor | None = None  # (B | 1, 1, L, 2n) int32
    cu_seqlens: Tensor | None = None  # (sequences + 1,) int32, of queries and keys
    max_seqlen: int | None = None

    @property
    def causal(self) -> Causal | None:
        return "bottom_right" if self.is_causal else None

    @property
    def window(self) -> tuple[int, int | None] | None:
        if self.left is None:
            return None
        return self.left, (0 if self.is_causal else self.left)


def flags_form(kind: int, num_keys: int, keep: Tensor | None, device: torch.device | str, number: int = 0) -> Tensor:
    """``keep``: (B, visible keys) bool, False where a key is padding, or None where there is none."""
    extent = _KINDS * (num_keys + number) + kind
    if keep is None:
        return torch.empty((0, 1, kind, extent), dtype=FLAGS, device=device)
    flags = keep.to(FLAGS) if is_compiling() else keep.view(FLAGS)  # inductor has no view of bool
    return F.pad(flags, (0, extent - keep.shape[1]))[:, None, None, :].expand(-1, 1, kind, -1)


def packed_form(cu_seqlens: Tensor, max_seqlen: int, left: int | None) -> Tensor:
    cu_seqlens = cu_seqlens.view(torch.uint32)[:, None, None, None]
    return cu_seqlens.expand(-1, -(-max_seqlen // BLOCK), 1, 1 if left is None else 2 + left)


def intervals_form(intervals: Intervals, num_keys: int) -> Tensor | None:
    """None where there are so few keys that a boolean mask takes no more numbers."""
    bounds = intervals.tensor
    return F.pad(bounds, (0, 0, 0, 1), value=num_keys).view(torch.uint32) if bounds.shape[3] < num_keys else None


def num_keys_of_intervals(mask: Tensor) -> Tensor:
    """(1,) int32, or (0,) without batch entries: the number of keys that a mask in the form of intervals is for."""
    return mask.view(torch.int32)[:1, 0, -1, 0]


def read(mask: Tensor, num_keys: int) -> Visible:
    """Decodes a mask of one of the four forms, for a tensor of ``num_keys`` keys."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(
            f"attention_mask has {got}, expected a tensor of 4 dimensions, (batch, heads, queries, keys), bool or "
            "floating: give a (batch, keys) mask to the model, which makes one of it by the function that register() "
            "registers, and a (batch, queries, keys) one as attention_mask[:, None]"
        )
    if mask.dtype == FLAGS:
        return _read_flags(mask, num_keys)
    if mask.dtype == torch.uint32 and mask.shape[2] > 1:
        return Visible(intervals=_read_intervals(mask))
    if mask.dtype == torch.uint32:
        left = mask.shape[3] - 2
        return Visible(
            is_causal=True,
            left=None if left < 0 else left,
            cu_seqlens=mask[:, 0, 0, 0].view(torch.int32),
            max_seqlen=mask.shape[1] * BLOCK,
        )
    if mask.dtype == torch.bool:
        return Visible(mask=mask)
    if mask.is_floating_point():
        return Visible(bias=mask)
    raise _of_unknown_form(mask)


def _of_unknown_form(mask: Tensor) -> ValueError:
    return ValueError(
        f"attention_mask has dtype {mask.dtype} and shape {tuple(mask.shape)}, expected torch.bool (True = attend) or "
        "a floating dtype: pass attention_mask.bool()"
    )


def _read_intervals(mask: Tensor) -> Tensor:
    if mask.shape[1] != 1 or mask.shape[3] not in range(2, 2 * MAX_INTERVALS + 1, 2):
        raise ValueError(
            f"attention_mask has dtype uint32 and shape {tuple(mask.shape)}, which no mask function of fused_ext "
            "makes: pass masks on as they are, without slicing them"
        )
    return mask.view(torch.int32)[:, :, :-1]


def _read_flags(mask: Tensor, num_keys: int) -> Visible:
    kind, extent = mask.shape[2:]
    is_whole = KEYS <= kind <= CAUSAL_PREFIX and (extent - kind) % _KINDS == 0 and extent > num_keys
    if mask.shape[1] != 1 or not is_whole:
        raise ValueError(
            f"attention_mask has dtype {mask.dtype} and shape {tuple(mask.shape)}, for {num_keys} keys, which no mask "
            "function of fused_ext makes: pass masks on as they are, without slicing them, and one of your own as "
            "attention_mask.bool()"
        )
    made_for = (extent - kind) // _KINDS
    number = made_for - num_keys
    if kind == CAUSAL_PREFIX:
        is_right = 0 < number < num_keys
    else:
        is_right = number == 0 or (number > 0 and kind in (CAUSAL_WINDOW, WINDOW))
    if not is_right:
        raise ValueError(
            f"attention_mask is made for {made_for} keys, but there are {num_keys}: it is that of another layer, "
            "or of another kind of cache"
        )
    visible = num_keys - number if kind == CAUSAL_PREFIX else num_keys
    keep = None
    if mask.shape[0] > 0:
        flags = mask[:, :, :1, :visible]
        keep = flags.bool() if is_compiling() else flags.view(torch.bool)
    return Visible(
        is_causal=kind in (CAUSAL, CAUSAL_WINDOW, CAUSAL_PREFIX),
        left=number if kind in (CAUSAL_WINDOW, WINDOW) else None,
        num_keys=visible,
        mask=keep,
    )
