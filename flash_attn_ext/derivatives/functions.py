"""The ``torch.autograd.Function``s of the passes, each with its derivatives in terms of the others.

They take flat arguments, named by a NAMES tuple each, because ``torch.func`` looks for tensors there. The results of a
forward pass (out, lse, lse_residual, and the tangents of the first two) are functions of the other arguments. So these
get the whole derivative, and the results get none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._call.problem import DIFFERENTIABLE, Problem
from flash_attn_ext.derivatives.backward_tangents import backward_tangents
from flash_attn_ext.derivatives.forward_tangents import forward_tangents
from flash_attn_ext.derivatives.kinds import TANGENTS, tangent_name
from flash_attn_ext.derivatives.named_functions import (
    LEFT,
    NO_FORWARD_OVER_FORWARD,
    DerivativeFunction,
    Refusal,
    are_symbolic,
    in_order,
    keep,
    kept,
    map_arguments,
    operator_takes,
    problem_in,
    some_of,
    tangents_in,
    wanted_names,
)
from flash_attn_ext.derivatives.relative_bias import with_all_pairs, with_sums_of_pairs


def gradients_of(arguments: dict, dout: Tensor | None, dlse: Tensor | None, wanted) -> dict[str, Tensor]:
    """The gradients of a problem in `arguments` that are `wanted`, by name; recorded."""
    if not any(wanted) or (dout is None and dlse is None):
        return {}
    if dout is None:
        dout = torch.zeros_like(arguments["out"])
    results = AttentionBackward.call(**arguments | dict(wanted=tuple(wanted), dout=dout, dlse=dlse))
    return dict(zip(wanted_names(wanted), results, strict=True))


def tangents_of_gradients(arguments: dict, wanted) -> dict[str, Tensor]:
    """The tangents of the gradients that are `wanted`, by name; recorded where only tangents are differentiated."""
    if not any(wanted):
        return {}
    results = AttentionBackwardTangents.call(**arguments | dict(wanted=tuple(wanted)))
    return dict(zip(wanted_names(wanted), results, strict=True))


def tangents_of_everything(arguments: dict, wanted) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The tangents of out and of lse, and those of :func:`tangents_of_gradients`, in one pass."""
    arguments = arguments | dict(wanted=tuple(wanted), out_tangent=None, lse_tangent=None)
    out_tangent, lse_tangent, *results = AttentionBackwardTangents.call(**arguments)
    return out_tangent, lse_tangent, dict(zip(wanted_names(wanted), results, strict=True))


class AttentionBackward(DerivativeFunction):
    """``_C.attention_backward``: the gradients that are `wanted`, and no others."""

    NAMES = ("dout", "dlse", *LEFT, "wanted", *Problem._fields)

    @staticmethod
    def forward(*values: Any) -> Any:
        if are_symbolic(values):
            return AttentionBackward.through_operator(*values)
        first = AttentionBackward.NAMES.index("q")
        return AttentionBackward._wanted(_C.attention_backward(*(*values[:first], values[first:])), values)

    @staticmethod
    def through_operator(*values: Any) -> Any:
        return AttentionBackward._wanted(torch.ops.flash_attn_ext.attention_backward(*values), values)

    @staticmethod
    def _wanted(gradients, values) -> tuple[Tensor, ...]:
        wanted = AttentionBackward.named(values)["wanted"]
        return tuple(gradient for gradient, is_wanted in zip(gradients, wanted, strict=True) if is_wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        keep(ctx, AttentionBackward.NAMES, inputs)

    @staticmethod
    def backward(ctx, *cotangents):
        along = dict(zip(wanted_names(kept(ctx)["wanted"]), cotangents, strict=True))
        return double_backward(ctx, along, ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        arguments, along = kept(ctx), AttentionBackward.named(tangents)
        wanted = arguments["wanted"]
        results = gradients_of(arguments, along["dout"], along["dlse"], wanted)
        if any(along[name] is not None for name in DIFFERENTIABLE):
            for name, tangent in _tangents_along(arguments, along, wanted).items():
                results[name] = results[name] + tangent if name in results else tangent
        return tuple(results.get(name) for name in wanted_names(wanted))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return map_arguments(AttentionBackward, lambda named: wanted_names(named["wanted"]), info, in_dims, arguments)


def double_backward(ctx, along: dict, needs_input_grad) -> tuple[Tensor | None, ...]:
    """Gradients of AttentionBackward's arguments, for cotangents `along` of the gradients that it computed, by name."""
    arguments = kept(ctx)
    needed = AttentionBackward.named(needs_input_grad)
    if all(cotangent is None for cotangent in along.values()):
        return in_order(AttentionBackward, {})
    arguments |= tangents_in(along)
    is_relative = arguments["bias_is_relative"]
    if is_relative:
        arguments = with_all_pairs(arguments, ("bias", "bias_tangent"))
    wanted = [needed[name] for name in DIFFERENTIABLE]
    if torch.is_grad_enabled() or not any(wanted):  # the tangents of out and lse may be differentiated once more
        out_tangent, lse_tangent = AttentionTangents.call(**arguments)
        left = dict(out_tangent=out_tangent, lse_tangent=lse_tangent)
        gradients = tangents_of_gradients(arguments | left, wanted)
    else:
        out_tangent, lse_tangent, gradients = tangents_of_everything(arguments, wanted)
    if is_relative:
        gradients = with_sums_of_pairs(gradients, "bias")
    of_cotangents = dict(dout=out_tangent, dlse=lse_tangent if arguments["dlse"] is not None else None)
    return in_order(AttentionBackward, gradients | of_cotangents)


def _tangents_along(arguments: dict, along: dict, wanted) -> dict[str, Tensor]:
    """The tangents of the gradients, for tangents of the problem only."""
    arguments |= tangents_in(along)
    is_relative = arguments["bias_is_relative"]
    if is_relative:
        arguments = with_all_pairs(arguments, ("bias", "bias_tangent"))
    if along["out"] is None or along["lse"] is None:
        tangents = tangents_of_everything(arguments, wanted)[2]
    else:  # forward mode has computed the tangents of out and lse in the forward pass
        arguments |= dict(out_tangent=along["out"], lse_tangent=along["lse"])
        tangents = tangents_of_gradients(arguments, wanted)
    return with_sums_of_pairs(tangents, "bias") if is_relative else tangents


class AttentionTangents(DerivativeFunction):
    """``forward_tangents``: (out_tangent, lse_tangent)."""

    NAMES = (*LEFT, *TANGENTS, *Problem._fields)
    KEPT = (*NAMES, "out_tangent", "lse_tangent")

    @staticmethod
    def forward(*values: Any) -> Any:
        if are_symbolic(values):
            return AttentionTangents.through_operator(*values)
        return AttentionTangents.compute(*values)

    @staticmethod
    def through_operator(*values: Any) -> Any:
        return torch.ops.flash_attn_ext.attention_tangents(*values)

    @staticmethod
    def compute(*values: Any) -> Any:
        arguments = AttentionTangents.named(values)
        return forward_tangents(problem_in(arguments), some_of(arguments, LEFT), some_of(arguments, TANGENTS))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        keep(ctx, AttentionTangents.KEPT, (*inputs, *output))

    @staticmethod
    def backward(ctx, dout, dlse):
        return gradients_of_tangents(ctx, dout, dlse, ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        along = AttentionTangents.named(tangents)
        if any(along[name] is not None for name in DIFFERENTIABLE):
            raise RuntimeError(NO_FORWARD_OVER_FORWARD)
        return AttentionTangents.call(**kept(ctx) | {name: along[name] for name in TANGENTS})  # linear in them

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return map_arguments(AttentionTangents, lambda _: ("out_tangent", "lse_tangent"), info, in_dims, arguments)


def gradients_of_tangents(ctx, dout: Tensor | None, dlse: Tensor | None, needs_input_grad) -> tuple[Tensor | None, ...]:
    """Gradients of AttentionTangents' arguments."""
    arguments = kept(ctx)
    needed = AttentionTangents.named(needs_input_grad)
    if dout is None and dlse is None:
        return in_order(AttentionTangents, {})
    if dout is None:
        dout = torch.zeros_like(arguments["out"])
    arguments |= dict(dout=dout, dlse=dlse)
    gradients = tangents_of_gradients(arguments, [needed[name] for name in DIFFERENTIABLE])
    of_tangents = gradients_of(arguments, dout, dlse, [needed[name] for name in TANGENTS])
    return in_order(AttentionTangents, gradients | {tangent_name(n): g for n, g in of_tangents.items()})


class _FunctionRefusal(Refusal, torch.autograd.Function):
    pass


class AttentionBackwardTangents(DerivativeFunction):
    """``backward_tangents`` of what is `wanted`, after the tangents of out and lse if these are not given.

    It is linear in tangents, and differentiable only in them, as torch.autograd.functional.hvp does: a derivative in
    any other argument is refused.
    """

    NAMES = ("dout", "dlse", *LEFT, "out_tangent", "lse_tangent", *TANGENTS, "wanted", *Problem._fields)
    _SAVED = ("dout", "dlse", "out_tangent", "lse_tangent", *LEFT)

    @classmethod
    def call(cls, **arguments: Any) -> Any:
        if not operator_takes(arguments.values()):  # the operator refuses by itself
            arguments = _FunctionRefusal.of_all_but_tangents(arguments)
        return super().call(**arguments)

    @staticmethod
    def forward(*values: Any) -> Any:
        if are_symbolic(values):
            return AttentionBackwardTangents.through_operator(*values)
        return AttentionBackwardTangents.compute(*values)

    @staticmethod
    def through_operator(*values: Any) -> Any:
        results = torch.ops.flash_attn_ext.attention_backward_tangents(*values)
        names = AttentionBackwardTangents.results_of(AttentionBackwardTangents.named(values))
        return tuple(result for result, name in zip(results, names, strict=True) if name)

    @staticmethod
    def compute(*values: Any) -> Any:
        arguments = AttentionBackwardTangents.named(values)
        saved = some_of(arguments, AttentionBackwardTangents._SAVED)
        wanted = wanted_names(arguments["wanted"])
        return backward_tangents(problem_in(arguments), saved, some_of(arguments, TANGENTS), wanted)

    @staticmethod
    def results_of(arguments: dict) -> tuple[str, ...]:
        """The names of the operator's results, "" for one that there is not."""
        left = ("out_tangent", "lse_tangent") if arguments["out_tangent"] is None else ("", "")
        wanted = zip(DIFFERENTIABLE, arguments["wanted"], strict=True)
        return (*left, *(name if is_wanted else "" for name, is_wanted in wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        keep(ctx, AttentionBackwardTangents.NAMES, inputs)

    @staticmethod
    def backward(ctx, *cotangents):
        arguments, needed = kept(ctx), AttentionBackwardTangents.named(ctx.needs_input_grad)
        names = filter(None, AttentionBackwardTangents.results_of(arguments))
        along = dict(zip(names, cotangents, strict=True))
        return in_order(AttentionBackwardTangents, gradients_of_linear(arguments, along, [needed[n] for n in TANGENTS]))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        arguments, along = kept(ctx), AttentionBackwardTangents.named(tangents)
        names = tuple(filter(None, AttentionBackwardTangents.results_of(arguments)))
        arguments |= {name: along[name] for name in TANGENTS}
        out_tangent, lse_tangent, results = tangents_of_everything(arguments, arguments["wanted"])
        results |= dict(out_tangent=out_tangent, lse_tangent=lse_tangent)
        return tuple(results[name] for name in names)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        def outputs(named: dict) -> tuple[str, ...]:
            return tuple(filter(None, AttentionBackwardTangents.results_of(named)))

        return map_arguments(AttentionBackwardTangents, outputs, info, in_dims, arguments)


def gradients_of_linear(arguments: dict, along: dict, wanted) -> dict[str, Tensor]:
    """The gradients of those tangents of AttentionBackwardTangents that are `wanted`, by name, for cotangents
    `along` of its results. The derivative of gradients is symmetric."""
    if not any(wanted):
        return {}
    gradients = gradients_of(arguments, along.get("out_tangent"), along.get("lse_tangent"), wanted)
    if any(along.get(name) is not None for name in DIFFERENTIABLE):
        for name, gradient in tangents_of_everything(arguments | tangents_in(along), wanted)[2].items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return {tangent_name(name): gradient for name, gradient in gradients.items()}
