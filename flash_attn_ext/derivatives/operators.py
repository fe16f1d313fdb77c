"""torch.library operators over the two passes, for everything that traces, watches or wraps tensors.

``torch.ops.flash_attn_ext.attention_tangents`` and ``attention_backward_tangents`` take the arguments of
``AttentionTangents`` and ``AttentionBackwardTangents``, one by one, and have their derivatives and batching rules. A
trace sees one operator without side effects instead of the operations on tiles, which write in place. Constant folding
(``torch.func.linearize``) would otherwise treat a tensor that starts as zeros as a constant. PyTorch's older ``vmap``
calls an operator slice by slice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_ext._call.problem import DIFFERENTIABLE, SCHEMA
from flash_attn_ext._torch_private import (
    DispatchKeySet,
    SingleLevelFunction,
    enable_single_level_autograd_function,
)
from flash_attn_ext.derivatives.batching import Mapped
from flash_attn_ext.derivatives.functions import (
    AttentionBackwardTangents,
    AttentionTangents,
    gradients_of_linear,
    gradients_of_tangents,
)
from flash_attn_ext.derivatives.kinds import TANGENTS
from flash_attn_ext.derivatives.named_functions import Refusal, in_order, keep, kept
from flash_attn_ext.derivatives.recording import DEVICES, TAGS, Caller, OperatorFunction, map_operator

_TANGENTS = "flash_attn_ext::attention_tangents"
_BACKWARD_TANGENTS = "flash_attn_ext::attention_backward_tangents"
_TANGENTS_SCHEMA = ", ".join(f"Tensor? {name}" for name in TANGENTS)
_LEFT_SCHEMA = "Tensor out, Tensor lse, Tensor? lse_residual"

torch.library.define(
    _TANGENTS, f"({_LEFT_SCHEMA}, {_TANGENTS_SCHEMA}, {SCHEMA}) -> (Tensor out_tangent, Tensor lse_tangent)", tags=TAGS
)
torch.library.define(
    _BACKWARD_TANGENTS,
    f"(Tensor dout, Tensor? dlse, {_LEFT_SCHEMA}, Tensor? out_tangent, Tensor? lse_tangent, {_TANGENTS_SCHEMA}, "
    f"bool[6] output_mask, {SCHEMA}) -> (Tensor out_tangent, Tensor lse_tangent, "
    + ", ".join(f"Tensor d{name}_tangent" for name in DIFFERENTIABLE)
    + ")",
    tags=TAGS,
)


def _tangents(*values: Any) -> tuple[Tensor, Tensor]:
    return AttentionTangents.compute(*values)


def _backward_tangents(*values: Any) -> tuple[Tensor, ...]:
    arguments = AttentionBackwardTangents.named(values)
    results = iter(AttentionBackwardTangents.compute(*values))
    names = AttentionBackwardTangents.results_of(arguments)
    return tuple(next(results) if name else arguments["q"].new_empty(0) for name in names)


def _tangents_fake(*values: Any) -> tuple[Tensor, Tensor]:
    arguments = AttentionTangents.named(values)
    return torch.empty_like(arguments["out"]), torch.empty_like(arguments["lse"])


def _backward_tangents_fake(*values: Any) -> tuple[Tensor, ...]:
    arguments = AttentionBackwardTangents.named(values)
    like = dict(arguments, out_tangent=arguments["out"], lse_tangent=arguments["lse"])
    names = AttentionBackwardTangents.results_of(arguments)
    return tuple(torch.empty_like(like[name]) if name else arguments["q"].new_empty(0) for name in names)


# Decorators would leave None under the names, and _frames.py finds functions by name.
torch.library.impl(_TANGENTS, DEVICES, _tangents)
torch.library.impl(_BACKWARD_TANGENTS, DEVICES, _backward_tangents)
torch.library.register_fake(_TANGENTS, _tangents_fake)
torch.library.register_fake(_BACKWARD_TANGENTS, _backward_tangents_fake)


class _Tangents(OperatorFunction):
    @staticmethod
    def forward(caller: Caller, *values: Any) -> Any:
        return _Tangents.below_autograd(torch.ops.flash_attn_ext.attention_tangents.default, caller, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        keep(ctx, AttentionTangents.KEPT, (*inputs[1:], *output))

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients_of_tangents(ctx, dout, dlse, ctx.needs_input_grad[1:]))

    @staticmethod
    def jvp(ctx: Any, _of_caller: None, *tangents: Any) -> Any:
        return AttentionTangents.jvp(ctx, *tangents)


class _OperatorRefusal(Refusal, SingleLevelFunction):
    pass


class _BackwardTangents(OperatorFunction):
    @classmethod
    def call(cls, keyset: DispatchKeySet, *values: Any) -> Any:
        with enable_single_level_autograd_function():
            arguments = _OperatorRefusal.of_all_but_tangents(AttentionBackwardTangents.named(values))
        return super().call(keyset, *arguments.values())

    @staticmethod
    def forward(caller: Caller, *values: Any) -> Any:
        operator = torch.ops.flash_attn_ext.attention_backward_tangents.default
        return _BackwardTangents.below_autograd(operator, caller, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        keep(ctx, AttentionBackwardTangents.NAMES, inputs[1:])
        names = AttentionBackwardTangents.results_of(AttentionBackwardTangents.named(inputs[1:]))
        ctx.mark_non_differentiable(*(result for result, name in zip(output, names, strict=True) if not name))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments, needed = kept(ctx), AttentionBackwardTangents.named(ctx.needs_input_grad[1:])
        along = dict(zip(AttentionBackwardTangents.results_of(arguments), cotangents, strict=True))
        gradients = gradients_of_linear(arguments, along, [needed[name] for name in TANGENTS])
        return (None, *in_order(AttentionBackwardTangents, gradients))

    @staticmethod
    def jvp(ctx: Any, _of_caller: None, *tangents: Any) -> Any:
        results = iter(AttentionBackwardTangents.jvp(ctx, *tangents))
        return tuple(next(results) if name else None for name in AttentionBackwardTangents.results_of(kept(ctx)))


_library = torch.library.Library("flash_attn_ext", "FRAGMENT")
_library.impl("attention_tangents", _Tangents.call, "Autograd", with_keyset=True)
_library.impl("attention_backward_tangents", _BackwardTangents.call, "Autograd", with_keyset=True)


def _map_tangents(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Mapped:
    operator = torch.ops.flash_attn_ext.attention_tangents
    mapped = (info, in_dims, arguments)
    return map_operator(operator, AttentionTangents.NAMES, lambda _: ("out_tangent", "lse_tangent"), mapped)


def _map_backward_tangents(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Mapped:
    operator = torch.ops.flash_attn_ext.attention_backward_tangents
    names, outputs = AttentionBackwardTangents.NAMES, AttentionBackwardTangents.results_of
    return map_operator(operator, names, outputs, (info, in_dims, arguments))


torch.library.register_vmap(_TANGENTS, _map_tangents)
torch.library.register_vmap(_BACKWARD_TANGENTS, _map_backward_tangents)
