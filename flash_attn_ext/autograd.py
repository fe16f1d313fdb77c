"""The one autograd function behind every entry point, and the choice of how to reach the extension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_ext import _C
from flash_attn_ext._canonical import Problem

NUM_TENSORS = Problem._fields.index("rng_seed") + 1  # Problem begins with them
DIFFERENTIABLE = tuple(map(Problem._fields.index, ("q", "k", "v", "bias", "alibi_slopes", "sink")))

NO_DOUBLE_BACKWARD = (
    "flash_attn_ext attention is differentiable once: a second derivative (create_graph=True followed by another "
    "backward, torch.func.hessian, gradient penalties) is not implemented. Use "
    "flash_attn_ext.reference.attention_reference, or torch's scaled_dot_product_attention with SDPBackend.MATH, there"
)
NO_FORWARD_MODE = (
    "flash_attn_ext attention has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad.dual_level). Use "
    "reverse mode (torch.func.grad, vjp, jacrev), or flash_attn_ext.reference.attention_reference"
)
NO_VMAP = (
    "flash_attn_ext attention has no torch.vmap rule. It takes any number of leading batch dimensions: pass the "
    "mapped dimension as one of them"
)

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def attention_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) of a canonical problem that has no seed yet, differentiable in both.

    Plain tensors go straight to the extension: this is host time that every call pays. Tensors that only stand for
    something (torch.compile, export, FakeTensor, meta, tracing) go through the registered operator of ops.py.
    """
    if problem.dropout_p > 0:
        problem = problem._replace(rng_seed=draw_seed(problem.q.device))
    if not _holds_memory(problem):
        return torch.ops.flash_attn_ext.attention_forward(*problem)[:2]
    if _records_gradients(problem):
        return FlashAttentionFunction.apply(*problem)[:2]
    return _C.attention_forward(*problem)[:2]


class FlashAttentionFunction(torch.autograd.Function):
    """Attention forward and backward over ``_C`` (FlashAttention-2, Dao 2023, algorithms 1 and 2).

    Takes the fields of :class:`Problem` and returns (out, lse, lse_residual). Saves q, k, v, out, lse and the seed,
    and bias, mask, alibi_slopes, sink and cu_seqlens as they were given: nothing of size Sq x Sk of its own.
    Gradients go to q, k, v, bias, alibi_slopes and sink, each only where it is asked for, and come from out, lse or
    both: the LSE's gradient enters through delta = rowsum(dout * out) - dlse.
    """

    @classmethod
    def apply(cls, *problem):
        if torch._C._are_functorch_transforms_active():
            return super().apply(*problem)
        # Function.apply first binds the arguments through inspect.signature, which takes longer than a small forward
        # pass; forward() below takes its arguments as they come.
        return super(torch.autograd.Function, cls).apply(*problem)

    @staticmethod
    def forward(*problem):
        if _holds_memory(problem):
            return _C.attention_forward(*problem)
        return torch.ops.flash_attn_ext.attention_forward(*problem)

    @staticmethod
    def setup_context(ctx, inputs, output):
        lse_residual = output[2]
        ctx.save_for_backward(*inputs[:NUM_TENSORS], *output)
        ctx.options = inputs[NUM_TENSORS:]
        ctx.mark_non_differentiable(lse_residual)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse, _dlse_residual):
        gradients = [None] * len(Problem._fields)
        if dout is None and dlse is None:
            return tuple(gradients)
        *tensors, out, lse, lse_residual = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        output_mask = [ctx.needs_input_grad[index] for index in DIFFERENTIABLE]
        arguments = (dout, dlse, out, lse, lse_residual, output_mask, *tensors, *ctx.options)
        if not (_holds_memory(tensors) and _holds_memory((dout, out, lse))):
            backward = torch.ops.flash_attn_ext.attention_backward
        elif torch.is_grad_enabled():  # create_graph=True, torch.func
            backward = _BackwardWithoutDerivative.apply
        else:
            backward = _C.attention_backward
        for index, wanted, gradient in zip(DIFFERENTIABLE, output_mask, backward(*arguments), strict=True):
            if wanted:
                gradients[index] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx, *tangents):
        raise RuntimeError(NO_FORWARD_MODE)

    @staticmethod
    def vmap(info, in_dims, *problem):
        raise RuntimeError(NO_VMAP)


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


def _records_gradients(problem: Problem) -> bool:
    if torch.is_grad_enabled():
        for index in DIFFERENTIABLE:
            if problem[index] is not None and problem[index].requires_grad:
                return True
    # Inside these, tensors that do not require grad may still carry a derivative: the function must see them.
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _holds_memory(tensors) -> bool:
    """Whether the extension may read these tensors now (q, k, v come first), and nobody but autograd has to know."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return False
    q, k, v = tensors[:3]
    return type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES and not q.is_meta
