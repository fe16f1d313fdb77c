"""What a mask says, as a plain 4-D tensor: transformers copies masks, passes them on and gives them to torch.compile,
so an object of our own, or an attribute of a tensor, would not arrive.

Three forms. Only the first has the size of anything that is not linear in the length of a sequence, and only where the
pattern of the mask has no other form:

- bool or floating, (B | 1, H | 1, L | 1, S): an ordinary mask, True = attend, or one that is added to the scores.
- uint8, (B | 0, 1, kind, keys + left): an **interval**. Keys past the first ``keys`` are seen by nobody, the last query
  is aligned with the last of them, and ``kind`` says whether there are causality and a window of ``left`` keys before
  the diagonal. Row [b, 0, 0, :keys] says which keys are no padding; with no rows, none is. A window's number of keys
  is that of the key tensor, so that ``left`` is what is left over.
- uint32, (sequences + 1, longest, 1, 1 | 2 + left): **packed** causal sequences. [:, 0, 0, 0] are the cumulative
  lengths, and ``longest`` is a bound of the lengths. Arithmetic on uint32 is not defined in PyTorch: code that takes
  such a mask for one that can be added fails.

Sizes are numbers on the host: nobody waits for a GPU to read them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CAUSAL, CAUSAL_WINDOW, WINDOW = 1, 2, 3  # kinds of intervals
INTERVAL, PACKED = torch.uint8, torch.uint32


class Visible(NamedTuple):
    """Which keys each query sees, as the options of ``attention`` and ``attention_varlen``."""

    is_causal: bool = False  # the last query sees the last key
    left: int | None = None  # a window's keys before the diagonal; as many after it, unless causal
    num_keys: int | None = None  # later keys are seen by nobody; None: there are none
    mask: Tensor | None = None
    bias: Tensor | None = None
    cu_seqlens: Tensor | None = None  # (sequences + 1,) int32, of queries and keys
    max_seqlen: int | None = None

    @property
    def causal(self) -> str | None:
        return "bottom_right" if self.is_causal else None

    @property
    def window(self) -> tuple[int, int | None] | None:
        if self.left is None:
            return None
        return self.left, (0 if self.is_causal else self.left)


def interval_form(is_causal: bool, left: int | None, num_keys: int, keep: Tensor | None, device) -> Tensor:
    """``keep``: (B, num_keys) bool, False where a key is padding, or None."""
    kind = (CAUSAL if left is None else CAUSAL_WINDOW) if is_causal else WINDOW
    if keep is None:
        return torch.empty((0, 1, kind, num_keys + (left or 0)), dtype=INTERVAL, device=device)
    rows = keep.view(INTERVAL)
    if left:
        rows = F.pad(rows, (0, left))
    return rows[:, None, None, :].expand(-1, 1, kind, -1)


def packed_form(cu_seqlens: Tensor, max_seqlen: int, left: int | None) -> Tensor:
    cu_seqlens = cu_seqlens.view(PACKED)[:, None, None, None]
    return cu_seqlens.expand(-1, max_seqlen, 1, 1 if left is None else 2 + left)


def read(mask: Tensor, num_keys: int) -> Visible:
    """What a mask of one of the three forms says of a tensor of ``num_keys`` keys."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(
            f"attention_mask has {got}, expected a tensor of 4 dimensions, (batch, heads, queries, keys), bool or "
            "floating: give a (batch, keys) mask to the model, which makes one of it by the function that register() "
            "registers"
        )
    if mask.dtype == INTERVAL:
        return _read_interval(mask, num_keys)
    if mask.dtype == PACKED:
        left = mask.shape[3] - 2
        return Visible(
            is_causal=True,
            left=None if left < 0 else left,
            cu_seqlens=mask[:, 0, 0, 0].view(torch.int32),
            max_seqlen=mask.shape[1],
        )
    if mask.dtype == torch.bool:
        return Visible(mask=mask)
    if mask.is_floating_point():
        return Visible(bias=mask)
    raise ValueError(f"attention_mask has dtype {mask.dtype}, expected torch.bool (True = attend) or a floating one")


def _read_interval(mask: Tensor, num_keys: int) -> Visible:
    kind, extent = mask.shape[2:]
    left = None if kind == CAUSAL else extent - num_keys
    visible = extent if kind == CAUSAL else num_keys
    if visible > num_keys or (left is not None and left < 0):
        raise ValueError(
            f"attention_mask is made for {extent} keys or more, but there are {num_keys}: it is that of another layer, "
            "or of another kind of cache"
        )
    keep = mask[:, :, :1, :visible].view(torch.bool) if mask.shape[0] else None
    return Visible(is_causal=kind != WINDOW, left=left, num_keys=visible, mask=keep)
