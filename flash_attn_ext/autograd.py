"""How a problem reaches the extension, and what autograd sees of it.

There is one backward pass, ``attention_backward`` of csrc/host, and autograd's node of it is C++
(``FlashAttentionFunctionBackward`` in csrc/host/call/autograd.cpp): it saves the tensors, calls the pass, and describes
itself to compiled autograd, without entering Python. Nearly every call gets that node. Python does only what PyTorch
lets no C++ do. It has a ``torch.autograd.Function`` for ``torch.func`` transforms and forward mode, which do not
support C++ nodes (:class:`FlashAttentionFunction`). It also has the derivative of the ``torch.library`` operators of
ops.py, which compilers and traces see instead of the extension; with ``create_graph=True`` the C++ node calls them too.
Higher derivatives are in derivatives/. The path of a call follows from the kind of its operands (``_C.operands_of``),
which is determined once, before the call is brought into form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import operands_of
from flash_attn_ext._call.problem import DIFFERENTIABLE, Problem
from flash_attn_ext._call.seeds import draw_seed
from flash_attn_ext._torch_private import are_functorch_transforms_active
from flash_attn_ext.derivatives.batching import Mapped
from flash_attn_ext.derivatives.functions import AttentionTangents, gradients_of
from flash_attn_ext.derivatives.named_functions import (
    LEFT,
    DerivativeFunction,
    in_order,
    keep,
    kept,
    map_arguments,
    tangents_in,
)
from flash_attn_ext.derivatives.relative_bias import with_all_pairs

PLAIN, SYMBOLIC = _C.PLAIN, _C.SYMBOLIC


def attend(problem: Problem, operands: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, row_max) of a canonical problem, differentiable in out and lse. row_max is None where the problem does
    not want it. Draws its seed if it has none yet.

    Plain tensors go straight to the extension, because every call pays this host time. Tensors without values of their
    own (torch.compile, export, FakeTensor, meta, tracing) go through the registered operator of ops.py. If a mode is
    active within a transform of torch.func, the Function comes first, because the operator has no forward mode there.
    """
    if problem.dropout_p > 0:
        if problem.dropout_p == 1:
            return _with_everything_dropped(problem, operands)
        if problem.rng_seed is None:
            problem = problem._replace(rng_seed=draw_seed(problem.q.device, operands))
    if operands >= PLAIN:
        return _C.attention(problem)
    if operands == SYMBOLIC and (is_compiling() or not are_functorch_transforms_active()):
        results = torch.ops.flash_attn_ext.attention_forward(*problem)
    else:
        results = FlashAttentionFunction.apply(*problem)
    out, lse, _, row_max = results
    return out, lse, row_max if problem.wants_row_max else None


def _with_everything_dropped(problem: Problem, operands: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """What ``attend`` returns where dropout drops every weight: out and its gradient are 0, and dropout affects nothing
    else. No seed is drawn."""
    out, lse, row_max = attend(problem._replace(dropout_p=0.0), operands)
    return out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0.0), lse, row_max


class FlashAttentionFunction(DerivativeFunction):
    """Attention forward and backward over ``_C`` (FlashAttention-2, Dao 2023, algorithms 1 and 2).

    It does what ``_C.attention`` does in C++, for ``torch.func`` and forward mode, which support only Python Functions.
    Takes the fields of a ``Problem``. Returns (out, lse, lse_residual, row_max). Saves q, k, v, out, lse, the seed, and
    the bias, mask, alibi_slopes, sink and cu_seqlens that were given. It saves nothing of size Sq x Sk of its own.
    Gradients go to q, k, v, bias, alibi_slopes and sink, if they are asked for, and come from out, lse or both: the
    LSE's gradient enters through delta = rowsum(dout * out) - dlse.
    """

    NAMES = Problem._fields

    @staticmethod
    def forward(*problem: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        if operands_of(*problem[:3]) != SYMBOLIC:
            return _C.attention_forward(problem)
        return FlashAttentionFunction.through_operator(*problem)

    @staticmethod
    def through_operator(*problem: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.flash_attn_ext.attention_forward(*problem)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
        return gradients_of_saved(ctx, dout, dlse, ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        arguments = kept(ctx) | tangents_in(FlashAttentionFunction.named(tangents))
        if arguments["bias_is_relative"]:
            arguments = with_all_pairs(arguments, ("bias", "bias_tangent"))
        return (*AttentionTangents.call(**arguments), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Mapped:
        return map_arguments(FlashAttentionFunction, outputs_of, info, in_dims, arguments)


def outputs_of(arguments: dict[str, Any]) -> tuple[str, ...]:
    """The names of a forward pass's results; "" for an absent one."""
    residual = "lse_residual" if arguments["bias"] is not None else ""
    return ("out", "lse", residual, "row_max" if arguments["wants_row_max"] else "")


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Saves what :func:`gradients_of_saved` needs: the fields of a :class:`Problem`, and (out, lse, lse_residual)."""
    keep(ctx, (*Problem._fields, *LEFT), (*inputs, *output[: len(LEFT)]))
    ctx.mark_non_differentiable(*(result for result in output[2:] if result is not None))


def gradients_of_saved(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, needs_input_grad: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of a problem's fields, None for those that are not asked for."""
    needed = dict(zip(Problem._fields, needs_input_grad, strict=True))
    gradients = gradients_of(kept(ctx), dout, dlse, [needed[name] for name in DIFFERENTIABLE])
    return in_order(FlashAttentionFunction, gradients)
