"""Shared by the Functions of functions.py: arguments by name, the choice of the operator, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import operands_of
from flash_attn_ext._call.problem import DIFFERENTIABLE, Problem
from flash_attn_ext._torch_private import are_functorch_transforms_active, is_within_a_functorch_level
from flash_attn_ext.derivatives.batching import Mapped, map_slices
from flash_attn_ext.derivatives.kinds import TANGENTS, tangent_name

_OTHERS = "flash_attn_ext.reference.attention_reference, or torch's scaled_dot_product_attention with SDPBackend.MATH"
NO_THIRD_DERIVATIVE = (
    "flash_attn_ext attention has first and second derivatives; a third one (backward, grad or jvp through a Hessian, "
    "or through what torch.autograd.functional.hessian, hvp or vhp return with create_graph=True) is not implemented. "
    f"To stop at the second derivative, detach it; for a third one, use {_OTHERS}"
)
NO_FORWARD_OVER_FORWARD = (
    "flash_attn_ext attention has no forward-mode derivative of its forward-mode derivative (jvp of jvp, jacfwd of "
    "jacfwd, torch.autograd.functional.jvp of itself). Second derivatives that it has: jacfwd(jacrev(f)), which "
    "torch.func.hessian is, jacrev(jacfwd(f)), jacrev(jacrev(f)), and the same of grad, vjp and jvp. A Hessian times a "
    f"vector is jvp of grad(f), or torch.autograd.functional.vhp; for anything else, use {_OTHERS}"
)
LEFT = ("out", "lse", "lse_residual")


class DerivativeFunction(torch.autograd.Function):
    """A Function of arguments by name. setup_context keeps them all; results are kept by those that say so."""

    NAMES: tuple[str, ...] = ()  # in the order of its operator

    @classmethod
    def call(cls, **arguments: Any) -> Any:
        values = tuple(arguments[name] for name in cls.NAMES)
        return cls.through_operator(*values) if operator_takes(values) else cls.apply(*values)

    @staticmethod
    def through_operator(*values: Any) -> Any:
        """The results of ``forward``, from the operator, which takes the same arguments."""
        raise NotImplementedError

    @classmethod
    def named(cls, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(cls.NAMES, values, strict=True))


def operator_takes(values: Iterable[Any]) -> bool:
    """Whether a call goes to the operator, which autograd records by itself, and not to the Function.

    PyTorch's older vmap loses what a Function records. Transforms of ``torch.func`` support Functions, which come
    before all of their levels. They are within a level only while they ask an operator for its tangents.
    """
    return is_within_a_functorch_level() if are_functorch_transforms_active() else are_symbolic(values)


def are_symbolic(values: Iterable[Any]) -> bool:
    """Whether kernels cannot take a call: one of its tensors has no memory that they may read, or a mode or trace is
    active."""
    return any(operands_of(value, value, value) == _C.SYMBOLIC for value in values if isinstance(value, Tensor))


def keep(ctx: Any, names: tuple[str, ...], values: tuple) -> None:
    """Saves values for :func:`kept`, which backward and jvp call."""
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
    """`arguments`, which have the names of what they are tangents of, under the names of TANGENTS; None for those of
    `names` that are absent."""
    return dict.fromkeys(TANGENTS) | {tangent_name(name): arguments.get(name) for name in names}


def in_order(cls: type[DerivativeFunction], gradients: dict) -> tuple:
    """Converts gradients by name to the order in which ``backward`` returns them."""
    return tuple(gradients.get(name) for name in cls.NAMES)


class Refusal:
    """A mixin for a Function that passes tensors on unchanged, to a function without a derivative in them. A backward
    pass that needs such a derivative gets the message. One that only needs those of other arguments never reaches it.
    """

    @staticmethod
    def forward(message: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_cotangents: Tensor | None) -> Any:
        raise RuntimeError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *_tangents: Any) -> Any:
        raise RuntimeError(NO_THIRD_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], _message: str, *tensors: Tensor) -> Mapped:
        return tensors, in_dims[1:]

    @classmethod
    def of_all_but_tangents(cls, arguments: dict) -> dict:
        """`arguments` of AttentionBackwardTangents, which only has derivatives in its tangents."""
        refused: dict[str, Tensor] = {}
        # Autograd goes backward, so a third derivative gets the message of the problem's tensors, not the other one.
        for names, message in ((("dout", "dlse"), NO_FORWARD_OVER_FORWARD), (DIFFERENTIABLE, NO_THIRD_DERIVATIVE)):
            given = {name: arguments[name] for name in names if arguments[name] is not None}
            tensors = cls.apply(message, *given.values())  # type: ignore[attr-defined]  # of the Function
            refused |= dict(zip(given, tensors, strict=True))
        return arguments | refused


def some_of(arguments: dict, names: tuple[str, ...]) -> dict:
    found = {name: arguments[name] for name in names}
    if "lse_residual" in found and arguments["bias"] is None:
        found["lse_residual"] = None  # an operator returns an empty tensor instead
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
