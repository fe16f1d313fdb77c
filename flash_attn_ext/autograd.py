"""How a problem reaches the extension, and what autograd sees of it.

There is one backward pass, ``attention_backward`` of csrc/host, and autograd's node of it is C++
(``FlashAttentionFunctionBackward`` in csrc/host/call/autograd.cpp): it saves the tensors, calls the pass, refuses
second derivatives, and describes itself to compiled autograd, without a step through Python. Nearly every call gets
that node. Python has what PyTorch lets only Python do, and nothing else: a ``torch.autograd.Function`` for
``torch.func`` transforms and forward mode, which know no nodes of C++ (:class:`FlashAttentionFunction`), and the
derivative of the ``torch.library`` operators of ops.py, which compilers and traces see instead of the extension. Both
save and compute by :func:`save_for_backward` and :func:`backward_of`. Which way a call takes follows from what its
operands are (``_C.operands_of``), which is asked once, before it is brought into form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._canonical import operands_of
from flash_attn_ext._problem import DIFFERENTIABLE, NUM_TENSORS, Problem

PLAIN, SYMBOLIC = _C.PLAIN, _C.SYMBOLIC
NUM_LEADING = 6  # arguments of attention_backward before the problem
NO_DOUBLE_BACKWARD = _C.NO_DOUBLE_BACKWARD
NO_FORWARD_MODE = (
    "flash_attn_ext attention has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad.dual_level). Use "
    "reverse mode (torch.func.grad, vjp, jacrev), or flash_attn_ext.reference.attention_reference"
)
NO_VMAP = (
    "flash_attn_ext attention has no torch.vmap rule. It takes any number of leading batch dimensions: pass the "
    "mapped dimension as one of them"
)


def attend(problem: Problem, operands: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of a canonical problem, differentiable in both. Its seed is drawn here, where it has none yet.

    Plain tensors go straight to the extension: this is host time that every call pays. Tensors that only stand for
    something (torch.compile, export, FakeTensor, meta, tracing) go through the registered operator of ops.py.
    """
    if problem.dropout_p > 0:
        if problem.dropout_p == 1:
            return _with_everything_dropped(problem, operands)
        if problem.rng_seed is None:
            problem = problem._replace(rng_seed=draw_seed(problem.q.device))
    if operands >= PLAIN:
        return _C.attention(problem)
    if operands == SYMBOLIC:
        return torch.ops.flash_attn_ext.attention_forward(*problem)[:2]
    return FlashAttentionFunction.apply(problem, *(getattr(problem, name) for name in DIFFERENTIABLE))[:2]


def _with_everything_dropped(problem: Problem, operands: int) -> tuple[Tensor, Tensor]:
    """out is 0, and so is its gradient; the LSE does not see dropout. Nothing is drawn."""
    out, lse = attend(problem._replace(dropout_p=0.0), operands)
    return out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0.0), lse


class FlashAttentionFunction(torch.autograd.Function):
    """Attention forward and backward over ``_C`` (FlashAttention-2, Dao 2023, algorithms 1 and 2).

    What ``_C.attention`` does in C++, for ``torch.func`` and forward mode, which only know Functions of Python. Takes a
    :class:`Problem` and then, once more, its differentiable tensors: q, k, v, bias, alibi_slopes, sink. Returns (out,
    lse, lse_residual). Saves q, k, v, out, lse and the seed, and bias, mask, alibi_slopes, sink and cu_seqlens as they
    were given: nothing of size Sq x Sk of its own. Gradients go to the differentiable tensors, each only where it is
    asked for, and come from out, lse or both: the LSE's gradient enters through delta = rowsum(dout * out) - dlse.
    """

    @staticmethod
    def forward(problem, *_differentiable):
        if operands_of(*problem[:3]) != SYMBOLIC:
            return _C.attention_forward(problem)
        return torch.ops.flash_attn_ext.attention_forward(*problem)

    @staticmethod
    def setup_context(ctx, inputs, output):
        save_for_backward(ctx, inputs[0], output)

    @staticmethod
    def backward(ctx, dout, dlse, _dlse_residual):
        return (None, *backward_of(ctx, dout, dlse, ctx.needs_input_grad[1:]))

    @staticmethod
    def jvp(ctx, *tangents):
        raise RuntimeError(NO_FORWARD_MODE)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        raise RuntimeError(NO_VMAP)


def save_for_backward(ctx, problem, output) -> None:
    """What :func:`backward_of` needs: `problem` in the order of :class:`Problem`, `output` (out, lse, lse_residual)."""
    ctx.save_for_backward(*problem[:NUM_TENSORS], *output)
    ctx.options = problem[NUM_TENSORS:]
    if output[2] is not None:
        ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def backward_of(ctx, dout: Tensor | None, dlse: Tensor | None, wanted) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias, alibi_slopes and sink; None where `wanted` is False."""
    if dout is None and dlse is None:
        return (None,) * len(DIFFERENTIABLE)
    tensors, (out, lse, lse_residual) = ctx.saved_tensors[:NUM_TENSORS], ctx.saved_tensors[NUM_TENSORS:]
    if dout is None:
        dout = torch.zeros_like(out)
    arguments = (dout, dlse, out, lse, lse_residual, wanted, *tensors, *ctx.options)
    if SYMBOLIC in (operands_of(*tensors[:3]), operands_of(dout, out, lse)):
        gradients = torch.ops.flash_attn_ext.attention_backward(*arguments)
        return tuple(g if w else None for g, w in zip(gradients, wanted, strict=True))
    if torch.is_grad_enabled():  # create_graph=True, torch.func
        return _BackwardWithoutDerivative.apply(*arguments)
    return _backward(arguments)


def _backward(arguments: tuple) -> list[Tensor | None]:
    return _C.attention_backward(*arguments[:NUM_LEADING], arguments[NUM_LEADING:])


class _BackwardWithoutDerivative(torch.autograd.Function):
    """``_C.attention_backward`` of flat arguments, recorded only so that a second derivative says that there is none:
    not recording it would make it silently zero."""

    @staticmethod
    def forward(*arguments):
        return tuple(_backward(arguments))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_gradients):
        raise RuntimeError(NO_DOUBLE_BACKWARD)

    @staticmethod
    def jvp(ctx, *tangents):
        raise RuntimeError(NO_FORWARD_MODE)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        raise RuntimeError(NO_VMAP)


def draw_seed(device: torch.device) -> Tensor:
    """From PyTorch's generator of that device: manual_seed, checkpoint and CUDA graphs treat it as they do any draw."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
