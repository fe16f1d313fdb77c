"""Every name of transformers that is used here but not documented there, with its purpose.

A release may change them. register() imports this module, and tests/huggingface/test_private_names.py has a test for
each name.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

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
    "reads_its_mask",
    "sdpa_mask",
    "table_of",
]

# Builders of mask functions in masking_utils, which tell the pattern of a mask function.
WINDOW = "sliding_window_overlay"
BIDIRECTIONAL_WINDOW = "sliding_window_bidirectional_overlay"
PACKED = "packed_sequence_mask_function"
REMAPPED = "remap_positions_for_packed_sequence"  # since 5.23
CHUNKS = "chunked_overlay"
BLOCKS = "blockwise_overlay"
PADDING = "padding_mask_function"
AND_MASKS = "and_masks"
OR_MASKS = "or_masks"
# The variables over which the mask function of each builder closes.
_VARIABLES = {
    WINDOW: ("sliding_window",),
    BIDIRECTIONAL_WINDOW: ("sliding_window",),
    PACKED: ("packed_sequence_mask",),
    REMAPPED: ("mask_function", "position_ids"),
    CHUNKS: ("chunk_size", "left_padding"),
    BLOCKS: ("block_sequence_ids",),
    PADDING: ("padding_mask",),
    AND_MASKS: ("mask_functions",),
    OR_MASKS: ("mask_functions",),
}
# Types of models that compute with a composed mask themselves, or change its shape or order, but do not ask
# transformers for a boolean one.
_READS_ITS_MASK = frozenset(
    {
        "doge",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "nemotron_asr_streaming_encoder",
        "pix2struct_text_model",
        "siglip2_vision_model",
    }
)
# These cut their masks only where layers share keys and values (num_kv_shared_layers).
_READS_ITS_MASK_IN_SHARED_LAYERS = frozenset({"gemma4_text", "gemma4_unified_text"})
# The name of functions that and_masks builds. torch.compile shows only the name of a mask function.
AND_MASK = "and_mask"


def reads_its_mask(config: Any) -> bool:
    model_type = getattr(config, "model_type", None)
    if model_type in _READS_ITS_MASK_IN_SHARED_LAYERS:
        return bool(getattr(config, "num_kv_shared_layers", 0))
    return model_type in _READS_ITS_MASK


def table_of(interface: Any) -> dict[str, Any]:
    """The table of AttentionInterface or AttentionMaskInterface. The documented ``register`` adds to it, but no
    documented function removes from it."""
    table: dict[str, Any] = interface._global_mapping
    return table


class Built(NamedTuple):
    """How transformers made a mask function."""

    builder: str
    values: tuple[Any, ...]  # of the builder's variables, in their order


def built_of(function: Any) -> Built | None:
    """How the builder in masking_utils made a mask function; None for the user's own, and for other builders.
    transformers passes nothing else of the pattern."""
    builder, _, inner = getattr(function, "__qualname__", "").partition(".<locals>.")
    if not inner or getattr(function, "__globals__", None) is not vars(masking_utils):
        return None
    names = function.__code__.co_freevars
    given = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    variables = _VARIABLES.get(builder, ())
    return (
        Built(builder, tuple(given[name] for name in variables)) if variables and given.keys() >= {*variables} else None
    )


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
