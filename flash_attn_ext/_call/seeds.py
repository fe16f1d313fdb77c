"""The seed of a call's dropout, and what compilers may do with its draw.

A backward pass drops the weights that its forward pass dropped, so it needs that pass's seed. A partitioner may
recompute parts of the forward pass in the backward pass, for a checkpoint or to stay within an activation memory
budget. So compilers and traces see the draw as an operator, ``torch.ops.flash_attn_ext.draw_seed``. It puts PyTorch's
operator into their graph, with a note that its result must be saved.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]  # public, though PyTorch's stubs do not say so
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from flash_attn_ext import _C
from flash_attn_ext._torch_private import ProxyTorchDispatchMode, activation_memory_budget, nodes_with_policy

PLAIN, SYMBOLIC = _C.PLAIN, _C.SYMBOLIC
_DRAW = "flash_attn_ext::draw_seed"
_END = 2**63 - 1


def draw_seed(device: torch.device, operands: int = PLAIN) -> Tensor:
    """Draws from PyTorch's generator of that device, as manual_seed, checkpoint and CUDA graphs expect.

    operands: the kind of the call's operands, a constant of ``_C``.
    """
    if operands == SYMBOLIC and not is_tracing():  # TorchScript's tracer takes no device for an operator
        seed: Tensor = torch.ops.flash_attn_ext.draw_seed(device=device)
        return seed
    return _draw(device=device)


def _draw(*, device: torch.device) -> Tensor:
    return torch.randint(_END, (1,), dtype=torch.int64, device=device)


def _draw_with_a_note(*, device: torch.device) -> Tensor:
    """Inductor does not replace the overload with a generator, so a compiled call draws the bits of an eager one."""
    with _known_to_partitioners():
        seed: Tensor = torch.ops.aten.randint.generator(_END, (1,), generator=None, dtype=torch.int64, device=device)
        return seed


def _known_to_partitioners() -> contextlib.AbstractContextManager[None]:
    """Within this context, nodes are made whose result the backward pass gets unchanged.

    Partitioners save what a checkpoint policy says must be saved. With an activation memory budget of 0 they save
    nothing but a graph's inputs. There a policy of recomputing helps: it makes them restore the generator's state.
    """
    nothing_is_saved = activation_memory_budget() == 0
    return nodes_with_policy(CheckpointPolicy.PREFER_RECOMPUTE if nothing_is_saved else CheckpointPolicy.MUST_SAVE)


torch.library.define(
    _DRAW, "(*, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
)
torch.library.impl(_DRAW, "CompositeExplicitAutograd", _draw)


def _draw_fake(*, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=device)


def _draw_traced(mode: Any, _operator: Any, _types: Any, _arguments: Any, keywords: dict[str, Any]) -> Tensor:
    with mode:
        return _draw_with_a_note(**keywords)


torch.library.register_fake(_DRAW, _draw_fake)
# PyTorch 2.15 notes the policy of a selective checkpoint when an operator has returned, over the draw's own note.
SAC_IGNORED_OPS.add(torch.ops.flash_attn_ext.draw_seed.default)
torch.library.register_torch_dispatch(_DRAW, ProxyTorchDispatchMode, _draw_traced)
# PyTorch's operator does what ``randomness`` of torch.vmap asks for: it draws once, or for each slice, or raises.
_library = torch.library.Library("flash_attn_ext", "FRAGMENT")
_library.impl("draw_seed", _draw_with_a_note, "FuncTorchVmapMode")
