"""The ``torch.autograd.Function``s of the passes, each with its derivatives in terms of the others.

They take flat arguments, named by a NAMES tuple each, because ``torch.func`` looks for tensors there. What a forward
pass left (out, lse, lse_residual, and the tangents of the first two) is a function of the other arguments: all of a
derivative goes to these, and none to what was left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._canonical import operands_of
from flash_attn_ext._problem import DIFFERENTIABLE, Problem
from flash_attn_ext.derivatives.backward_tangents import backward_tangents
from flash_attn_ext.derivatives.batching import Mapped, map_slices
from flash_attn_ext.derivatives.forward_tangents import forward_tangents
from flash_attn_ext.derivatives.kinds import TANGENTS, tangent_name

NO_THIRD_DERIVATIVE = (
    "flash_attn_ext attention has first and second derivatives; a third one (create_graph=True in a second backward "
    "pass, grad, jvp or hessian of a hessian) is not implemented. Use flash_attn_ext.reference.attention_reference, or "
    "torch's scaled_dot_product_attention with SDPBackend.MATH, there"
)
NO_FORWARD_OVER_FORWARD = (
    "flash_attn_ext attention has no forward-mode derivative of its forward-mode derivative (jvp of jvp, jacfwd of "
    "jacfwd). Second derivatives that it has: jacfwd(jacrev(f)), which torch.func.hessian is, jacrev(jacfwd(f)), "
    "jacrev(jacrev(f)), and the same of grad, vjp and jvp"
)
_LEFT = ("out", "lse", "lse_residual")


class DerivativeFunction(torch.autograd.Function):
    """A Function of arguments by name. setup_context keeps them all; results are kept by those that say so."""

    NAMES: tuple[str, ...] = ()

    @classmethod
    def call(cls, **arguments: Any) -> Any:
        return cls.apply(*(arguments[name] for name in cls.NAMES))

    @classmethod
    def named(cls, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(cls.NAMES, values, strict=True))


def keep(ctx: Any, names: tuple[str, ...], values: tuple) -> None:
    """For :func:`kept`, in backward and jvp alike."""
    tensors = [value if isinstance(value, Tensor) else None for value in values]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.names = names
    ctx.others = tuple(None if isinstance(value, Tensor) else value for value in values)
    ctx.set_materialize_grads(False)


def kept(ctx: Any) -> dict[str, Any]:
    both = zip(ctx.saved_tensors, ctx.others, strict=True)
    return dict(zip(ctx.names, (other if tensor is None else tensor for tensor, other in both), strict=True))


def problem_in(arguments: dict) -> Problem:
    return Problem(**{name: arguments[name] for name in Problem._fields})


def wanted_names(wanted) -> tuple[str, ...]:
    return tuple(name for name, is_wanted in zip(DIFFERENTIABLE, wanted, strict=True) if is_wanted)


def tangents_in(arguments: dict, names=DIFFERENTIABLE) -> dict[str, Tensor | None]:
    """`arguments` by the names of what they are tangents of, renamed as TANGENTS; those of `names` that are absent are
    None."""
    return dict.fromkeys(TANGENTS) | {tangent_name(name): arguments.get(name) for name in names}


def gradients_of(arguments: dict, dout: Tensor | None, dlse: Tensor | None, wanted) -> dict[str, Tensor]:
    """The backward pass of a problem in `arguments`, by name, of those that are `wanted`; recorded."""
    if not any(wanted) or (dout is None and dlse is None):
        return {}
    if dout is None:
        dout = torch.zeros_like(arguments["out"])
    results = AttentionBackward.call(**arguments | dict(wanted=tuple(wanted), dout=dout, dlse=dlse))
    return dict(zip(wanted_names(wanted), results, strict=True))


def tangents_of_gradients(arguments: dict, wanted) -> dict[str, Tensor]:
    """The tangents of the gradients that are `wanted`, by name; recorded only to refuse a third derivative."""
    if not any(wanted):
        return {}
    results = AttentionBackwardTangents.call(**arguments | dict(wanted=tuple(wanted)))
    return dict(zip(wanted_names(wanted), results, strict=True))


def tangents_of_everything(arguments: dict, wanted) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The tangents of out and of lse, and as :func:`tangents_of_gradients`, in one pass."""
    arguments |= dict(wanted=tuple(wanted), out_tangent=None, lse_tangent=None)
    out_tangent, lse_tangent, *results = AttentionBackwardTangents.call(**arguments)
    return out_tangent, lse_tangent, dict(zip(wanted_names(wanted), results, strict=True))


def in_order(cls: type[DerivativeFunction], gradients: dict) -> tuple:
    """Gradients by name, as ``backward`` returns them."""
    return tuple(gradients.get(name) for name in cls.NAMES)


def needed_by(cls: type[DerivativeFunction], ctx) -> dict[str, bool]:
    return dict(zip(cls.NAMES, ctx.needs_input_grad, strict=True))


class AttentionBackward(DerivativeFunction):
    """``_C.attention_backward``: the gradients that are `wanted`, and no others."""

    NAMES = ("dout", "dlse", *_LEFT, "wanted", *Problem._fields)  # in the operator's order

    @staticmethod
    def forward(dout, dlse, out, lse, lse_residual, wanted, *problem):
        leading = (dout, dlse, out, lse, lse_residual, wanted)
        if _C.SYMBOLIC in (operands_of(*problem[:3]), operands_of(dout, out, lse if dlse is None else dlse)):
            gradients = torch.ops.flash_attn_ext.attention_backward(*leading, *problem)
        else:
            gradients = _C.attention_backward(*leading, problem)
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
    needed = dict(zip(AttentionBackward.NAMES, needs_input_grad, strict=True))
    if all(cotangent is None for cotangent in along.values()):
        return in_order(AttentionBackward, {})
    arguments |= tangents_in(along)
    wanted = [needed[name] for name in DIFFERENTIABLE]
    if torch.is_grad_enabled() or not any(wanted):  # the tangents of out and lse may be differentiated once more
        out_tangent, lse_tangent = AttentionTangents.call(**arguments)
        left = dict(out_tangent=out_tangent, lse_tangent=lse_tangent)
        gradients = tangents_of_gradients(arguments | left, wanted)
    else:
        out_tangent, lse_tangent, gradients = tangents_of_everything(arguments, wanted)
    of_cotangents = dict(dout=out_tangent, dlse=lse_tangent if arguments["dlse"] is not None else None)
    return in_order(AttentionBackward, gradients | of_cotangents)


def _tangents_along(arguments: dict, along: dict, wanted) -> dict[str, Tensor]:
    """Of the gradients, for tangents of the problem alone."""
    arguments |= tangents_in(along)
    if along["out"] is None or along["lse"] is None:
        return tangents_of_everything(arguments, wanted)[2]
    # Forward mode came by in the forward pass.
    return tangents_of_gradients(arguments | dict(out_tangent=along["out"], lse_tangent=along["lse"]), wanted)


class AttentionTangents(DerivativeFunction):
    """``forward_tangents``: (out_tangent, lse_tangent)."""

    NAMES = (*TANGENTS, *_LEFT, *Problem._fields)

    @staticmethod
    def forward(*values):
        arguments = AttentionTangents.named(values)
        return forward_tangents(problem_in(arguments), _some(arguments, _LEFT), _some(arguments, TANGENTS))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        keep(ctx, (*AttentionTangents.NAMES, "out_tangent", "lse_tangent"), (*inputs, *output))

    @staticmethod
    def backward(ctx, dout, dlse):
        arguments, needed = kept(ctx), needed_by(AttentionTangents, ctx)
        if dout is None and dlse is None:
            return in_order(AttentionTangents, {})
        if dout is None:
            dout = torch.zeros_like(arguments["out"])
        arguments |= dict(dout=dout, dlse=dlse)
        gradients = tangents_of_gradients(arguments, [needed[name] for name in DIFFERENTIABLE])
        of_tangents = gradients_of(arguments, dout, dlse, [needed[name] for name in TANGENTS])
        return in_order(AttentionTangents, gradients | {tangent_name(n): g for n, g in of_tangents.items()})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(NO_FORWARD_OVER_FORWARD)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return map_arguments(AttentionTangents, lambda _: ("out_tangent", "lse_tangent"), info, in_dims, arguments)


class AttentionBackwardTangents(DerivativeFunction):
    """``backward_tangents`` of what is `wanted`, after those of out and lse where these are not given."""

    NAMES = ("wanted", "dout", "dlse", "out_tangent", "lse_tangent", *TANGENTS, *_LEFT, *Problem._fields)
    _SAVED = ("dout", "dlse", "out_tangent", "lse_tangent", *_LEFT)

    @staticmethod
    def forward(*values):
        arguments = AttentionBackwardTangents.named(values)
        saved = _some(arguments, AttentionBackwardTangents._SAVED)
        wanted = wanted_names(arguments["wanted"])
        return backward_tangents(problem_in(arguments), saved, _some(arguments, TANGENTS), wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx, *_cotangents):
        raise RuntimeError(NO_THIRD_DERIVATIVE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(NO_THIRD_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        def outputs(named: dict) -> tuple[str, ...]:
            left = ("out_tangent", "lse_tangent") if named["out_tangent"] is None else ()
            return (*left, *wanted_names(named["wanted"]))

        return map_arguments(AttentionBackwardTangents, outputs, info, in_dims, arguments)


def _some(arguments: dict, names: tuple[str, ...]) -> dict:
    found = {name: arguments[name] for name in names}
    if "lse_residual" in found and arguments["bias"] is None:
        found["lse_residual"] = None  # an operator leaves an empty tensor
    return found


def map_arguments(
    cls: type[DerivativeFunction],
    outputs: Callable[[dict[str, Any]], tuple[str, ...]],
    info: Any,
    in_dims: tuple[Any, ...],
    arguments: tuple[Any, ...],
) -> Mapped:
    """A Function's ``vmap``."""
    named = cls.named(arguments)
    dims = {name: dim if isinstance(named[name], Tensor) else None for name, dim in cls.named(in_dims).items()}
    return map_slices(cls.call, outputs, info, dims, named)
