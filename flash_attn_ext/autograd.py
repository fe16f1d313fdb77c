"""How a problem reaches the extension, and what autograd sees of it.

Plain tensors under plain autograd, which is nearly every call, get their node in C++ (csrc/host/autograd.cpp). Below is
the same for what needs Python: ``torch.func`` transforms, forward mode, and the operators of ops.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flash_attn_ext import _C
from flash_attn_ext._canonical import Problem

NUM_TENSORS = Problem._fields.index("rng_seed") + 1  # Problem begins with them
DIFFERENTIABLE = tuple(map(Problem._fields.index, ("q", "k", "v", "bias", "alibi_slopes", "sink")))

NO_DOUBLE_BACKWARD = _C.NO_DOUBLE_BACKWARD
NO_FORWARD_MODE = (
    "flash_attn_ext attention has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad.dual_level). Use "
    "reverse mode (torch.func.grad, vjp, jacrev), or flash_attn_ext.reference.attention_reference"
)
NO_VMAP = (
    "flash_attn_ext attention has no torch.vmap rule. It takes any number of leading batch dimensions: pass the "
    "mapped dimension as one of them"
)


def attention_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) of a canonical problem that has no seed yet, differentiable in both.

    Plain tensors go straight to the extension: this is host time that every call pays. Tensors that only stand for
    something (torch.compile, export, FakeTensor, meta, tracing) go through the registered operator of ops.py.
    """
    if problem.dropout_p == 1.0:
        return _with_everything_dropped(problem)
    if problem.dropout_p > 0:
        problem = problem._replace(rng_seed=draw_seed(problem.q.device))
    if not _hold_memory(*problem[:3]):
        return torch.ops.flash_attn_ext.attention_forward(*problem)[:2]
    # Inside these, tensors that do not require grad may still carry a derivative, and only Python's Function sees it.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return FlashAttentionFunction.apply(problem, *(problem[index] for index in DIFFERENTIABLE))[:2]
    return _C.attention(*problem)


def _with_everything_dropped(problem: Problem) -> tuple[Tensor, Tensor]:
    """out is 0, and so is its gradient; the LSE does not see dropout. Nothing is drawn."""
    out, lse = attention_forward(problem._replace(dropout_p=0.0))
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
        if _hold_memory(*problem[:3]):
            return _C.attention_forward(*problem)
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
    if not (_hold_memory(*tensors[:3]) and _hold_memory(dout, out, lse)):
        gradients = torch.ops.flash_attn_ext.attention_backward(*arguments)
        return tuple(g if w else None for g, w in zip(gradients, wanted, strict=True))
    if torch.is_grad_enabled():  # create_graph=True, torch.func
        return _BackwardWithoutDerivative.apply(*arguments)
    return _C.attention_backward(*arguments)


class _BackwardWithoutDerivative(torch.autograd.Function):
    """``_C.attention_backward``, recorded only so that a second derivative says that there is none: not recording it
    would make it silently zero."""

    @staticmethod
    def forward(*arguments):
        return tuple(_C.attention_backward(*arguments))

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


def _hold_memory(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the extension may read these tensors now, and nobody but autograd has to know."""
    return not is_compiling() and _C.hold_memory(q, k, v)
