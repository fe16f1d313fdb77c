"""Every name of transformers that is used here but not documented there, with its purpose.

A release may change them. register() imports this module, and tests/huggingface/test_private_names.py has a test for
each name.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,  # compared by identity, to find plain mask functions
    causal_mask_function,
    sdpa_mask,  # makes the boolean mask of a pattern that has no other form
)
from transformers.utils.import_utils import is_tracing  # whether values cannot be read: compile, export, graph capture

__all__ = [
    "AND_MASK",
    "AND_MASKS",
    "BIDIRECTIONAL_WINDOW",
    "BLOCKS",
    "CHUNKS",
    "OR_MASKS",
    "PACKED",
    "PADDING",
    "REMAPPED",
    "WINDOW",
    "asks_for_an_implementation",
    "bidirectional_mask_function",
    "built_of",
    "causal_mask_function",
    "is_tracing",
    "position_ids_of_the_caller",
    "sdpa_mask",
    "table_of",
]

# Builders of mask functions in masking_utils, which tell the pattern of a mask function, and the variables over which
# each one's mask function closes.
WINDOW = ("sliding_window_overlay", "sliding_window")
BIDIRECTIONAL_WINDOW = ("sliding_window_bidirectional_overlay", "sliding_window")
PACKED = ("packed_sequence_mask_function", "packed_sequence_mask")
REMAPPED = ("remap_positions_for_packed_sequence", "mask_function", "position_ids")  # since 5.23
CHUNKS = ("chunked_overlay", "chunk_size", "left_padding")
BLOCKS = ("blockwise_overlay", "block_sequence_ids")
PADDING = ("padding_mask_function", "padding_mask")
AND_MASKS = ("and_masks", "mask_functions")
OR_MASKS = ("or_masks", "mask_functions")
# The name of functions that and_masks builds. torch.compile shows only the name of a mask function.
AND_MASK = "and_mask"


def table_of(interface: Any) -> dict[str, Any]:
    """The table of AttentionInterface or AttentionMaskInterface. The documented ``register`` adds to it, but no
    documented function removes from it."""
    table: dict[str, Any] = interface._global_mapping
    return table


def built_of(function: Any) -> tuple[str, dict[str, Any]] | None:
    """The builder in masking_utils that made a mask function, and the variables over which that closes; None for the
    user's own. transformers passes nothing else of the pattern."""
    builder, _, inner = getattr(function, "__qualname__", "").partition(".<locals>.")
    if not inner or getattr(function, "__globals__", None) is not vars(masking_utils):
        return None
    names = function.__code__.co_freevars
    return builder, dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def position_ids_of_the_caller(depth: int) -> Tensor | None:
    """The variable position_ids of the function that called a mask function, ``depth`` calls up from here. All of
    transformers' create_*causal_mask functions have it, but none passes it on, and the layers of some models (llama4,
    moshi) never get it. It is None under torch.compile."""
    position_ids = sys._getframe(depth + 1).f_locals.get("position_ids")
    return position_ids if isinstance(position_ids, Tensor) else None


def asks_for_an_implementation(module: Any) -> bool:
    """Whether a module of models looks up its attention in transformers' table, which all of them give the same
    name."""
    return "ALL_ATTENTION_FUNCTIONS" in vars(module)
