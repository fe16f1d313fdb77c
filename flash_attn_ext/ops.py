"""torch.library operators over the same binding, for torch.compile, torch.export and all other tracers.

``torch.ops.flash_attn_ext.attention_forward``, ``attention_backward`` and ``attention_with_kvcache`` take exactly the
arguments of their namesakes in ``_C`` (see ``_C.pyi``), one by one. Their fake kernels return shapes, strides and
dtypes without computing. The derivatives and batching rules of the first two are those of ``FlashAttentionFunction``
and ``AttentionBackward``; the third has none, and its schema says that it writes k and v. Each has an overload
"varying", which compilers' graphs call if scale, softcap or dropout_p changes from call to call. The operators of
forward mode and second derivatives are in derivatives/operators.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._call.problem import (
    CACHE_SCHEMA,
    DIFFERENTIABLE,
    NUM_TENSORS,
    NUMBERS,
    SCHEMA,
    SCHEMA_OF_VARYING,
    KvCache,
    Problem,
    accumulate_dtype,
)
from flash_attn_ext._torch_private import FunctionalTensorMode, parameters_of
from flash_attn_ext.autograd import FlashAttentionFunction, gradients_of_saved, outputs_of, save
from flash_attn_ext.derivatives import operators as _operators_of_derivatives  # noqa: F401  (defines them)
from flash_attn_ext.derivatives.batching import Mapped
from flash_attn_ext.derivatives.functions import AttentionBackward, double_backward
from flash_attn_ext.derivatives.named_functions import keep, kept, wanted_names
from flash_attn_ext.derivatives.recording import DEVICES, TAGS, Caller, OperatorFunction, map_operator

_FORWARD = "flash_attn_ext::attention_forward"
_BACKWARD = "flash_attn_ext::attention_backward"
_WITH_KVCACHE = "flash_attn_ext::attention_with_kvcache"
_NUM_LEADING = AttentionBackward.NAMES.index("q")  # arguments of attention_backward before the problem
_NUM_PROBLEM_FIELDS = len(Problem._fields)
_SYMBOLS = (torch.SymFloat, torch.SymInt)


def _forward(*problem: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, *others = _C.attention_forward(problem)
    lse_residual, row_max = (lse.new_empty(0) if result is None else result for result in others)
    return out, lse, lse_residual, row_max


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    out = arguments[AttentionBackward.NAMES.index("out")]
    gradients = _C.attention_backward(*(*arguments[:_NUM_LEADING], arguments[_NUM_LEADING:]))
    return tuple(out.new_empty(0) if g is None else g for g in gradients)


def _with_kvcache(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, row_max = _C.attention_with_kvcache(arguments[:_NUM_PROBLEM_FIELDS], arguments[_NUM_PROBLEM_FIELDS:])
    return out, lse, lse.new_empty(0) if row_max is None else row_max


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    _check_devices(problem._fields, arguments[:NUM_TENSORS])
    out, lse, row_max = _empty_outputs(problem)
    return out, lse, lse.new_empty(lse.shape if problem.bias is not None else (0,)), row_max


def _with_kvcache_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, cache = Problem(*arguments[:_NUM_PROBLEM_FIELDS]), KvCache(*arguments[_NUM_PROBLEM_FIELDS:])
    _check_devices(problem._fields, arguments[:NUM_TENSORS])
    _check_devices(("q", *cache._fields), (problem.q, *cache[:-1]))
    return _empty_outputs(problem)


def _check_devices(names: tuple[str, ...], tensors: Sequence[Any]) -> None:
    """Checks that all are on the device of the first one, q."""
    device = tensors[0].device
    for name, tensor in zip(names, tensors, strict=False):
        if tensor is not None and tensor.device != device and name != "rng_seed":
            raise RuntimeError(f"{name} is on {tensor.device}, but q is on {device}; move it with {name}.to(q.device)")


def _empty_outputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    q, v = problem.q, problem.v
    out = empty_in_order_of(q, (*q.shape[:-1], v.shape[-1]), sequence_first=problem.sequence_first)
    statistics = q.shape[:-1] if problem.cu_seqlens_q is None else (q.shape[1], q.shape[0])
    lse = q.new_empty(statistics, dtype=accumulate_dtype(q.dtype))
    return out, lse, lse.new_empty(lse.shape if problem.wants_row_max else (0,))


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    output_mask, problem = arguments[_NUM_LEADING - 1], Problem(*arguments[_NUM_LEADING:])
    return tuple(
        _empty_gradient(name, getattr(problem, name)) if wanted else problem.q.new_empty(0)
        for name, wanted in zip(DIFFERENTIABLE, output_mask, strict=True)
    )


def _empty_gradient(name: str, of: Tensor) -> Tensor:
    return empty_in_order_of(of, of.shape) if name in ("q", "k", "v") else of.new_empty(of.shape)


def empty_in_order_of(like: Tensor, shape: Sequence[int], *, sequence_first: bool = False) -> Tensor:
    """An empty tensor whose dimensions lie in memory as those of `like`: the rule of csrc/host/memory/allocate.h.

    Dimensions are sorted by the strides of `like`, largest first. Dimensions of equal stride keep their order, and so
    do all of a broadcast `like` (a stride of 0 in a dimension that is not 1); with `sequence_first` that order is
    (batch, sequence, heads, head dim).
    """
    strides = like.stride()
    order: Sequence[int] = (0, 2, 1, 3) if sequence_first else range(like.dim())
    if not any(stride == 0 and size != 1 for stride, size in zip(strides, like.shape, strict=True)):
        order = sorted(order, key=lambda dim: -strides[dim])
    memory = like.new_empty([shape[dim] for dim in order])
    return memory.permute([list(order).index(dim) for dim in range(like.dim())])


def _define(name: str, parameters: str, results: str, kernels: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    """An operator, and its overload "varying" for numbers that change from call to call of a compiled function.

    kernels: the real one and the fake one.
    """
    kernel, fake = kernels
    torch.library.define(name, f"({parameters}) -> {results}", tags=TAGS)
    torch.library.impl(name, DEVICES, kernel)
    torch.library.register_fake(name, fake)
    torch.library.register_torch_dispatch(name, FunctionalTensorMode, _with_tensors_for_symbols)
    # A CUDA graph would keep the numbers of the call that it was captured in.
    tags = (*TAGS, torch.Tag.cudagraph_unsafe)
    torch.library.define(f"{name}.varying", f"({parameters}, {SCHEMA_OF_VARYING}) -> {results}", tags=tags)
    operators = getattr(torch.ops.flash_attn_ext, name.partition("::")[2])
    places = _places_of_numbers(operators.varying)

    def kernel_of_varying(*arguments: Any) -> Any:
        return kernel(*_with_values(places, arguments))

    torch.library.impl(f"{name}.varying", DEVICES, kernel_of_varying)
    torch.library.register_fake(f"{name}.varying", lambda *arguments: fake(*arguments[: -len(NUMBERS)]))


def _places_of_numbers(operator: Any) -> list[int]:
    names = parameters_of(operator)
    return [names.index(name) for name in NUMBERS]


def _with_values(places: list[int], arguments: Sequence[Any]) -> list[Any]:
    """Converts the arguments of the overload "varying" to those of the operator."""
    of_operator, varying = list(arguments[: -len(NUMBERS)]), arguments[-len(NUMBERS) :]
    for place, tensor in zip(places, varying, strict=True):
        if tensor is not None:
            of_operator[place] = tensor.item()
    return of_operator


def _with_tensors_for_symbols(mode: Any, operator: Any, types: Any, arguments: Sequence[Any], keywords: Any) -> Any:
    """Converts numbers that vary to tensors, for a compiler's graph. PyTorch has these tensors anyway, and it
    compiles a function again for each value of a symbol that anything but arithmetic uses."""
    places = _places_of_numbers(operator)
    if not any(isinstance(arguments[place], _SYMBOLS) for place in places):
        return mode.__torch_dispatch__(operator, types, arguments, keywords)
    constants, varying = list(arguments), []
    with mode:
        for place in places:
            is_symbol = isinstance(arguments[place], _SYMBOLS)
            one = torch.ones((), dtype=torch.float64, device="cpu") if is_symbol else None
            varying.append(one * arguments[place] if is_symbol else None)
            constants[place] = 0.0 if is_symbol else arguments[place]
        return operator.overloadpacket.varying(*constants, *varying)


_define(_FORWARD, SCHEMA, "(Tensor out, Tensor lse, Tensor lse_residual, Tensor row_max)", (_forward, _forward_fake))
_define(
    _BACKWARD,
    f"Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor? lse_residual, bool[6] output_mask, {SCHEMA}",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi_slopes, Tensor dsink)",
    (_backward, _backward_fake),
)
_define(_WITH_KVCACHE, CACHE_SCHEMA, "(Tensor out, Tensor lse, Tensor row_max)", (_with_kvcache, _with_kvcache_fake))


class _Forward(OperatorFunction):
    @staticmethod
    def forward(caller: Caller, *problem: Any) -> Any:
        return _Forward.below_autograd(torch.ops.flash_attn_ext.attention_forward.default, caller, problem)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        save(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
        return (None, *gradients_of_saved(ctx, dout, dlse, ctx.needs_input_grad[1:]))

    @staticmethod
    def jvp(ctx: Any, _of_caller: None, *tangents: Any) -> tuple[Tensor | None, ...]:
        return FlashAttentionFunction.jvp(ctx, *tangents)


class _Backward(OperatorFunction):
    @staticmethod
    def forward(caller: Caller, *arguments: Any) -> Any:
        return _Backward.below_autograd(torch.ops.flash_attn_ext.attention_backward.default, caller, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        keep(ctx, AttentionBackward.NAMES, inputs[1:])
        wanted = inputs[1 + AttentionBackward.NAMES.index("wanted")]
        ctx.mark_non_differentiable(*(g for g, is_wanted in zip(output, wanted, strict=True) if not is_wanted))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        along = dict(zip(DIFFERENTIABLE, cotangents, strict=True))
        along = {name: along[name] for name in wanted_names(kept(ctx)["wanted"])}
        return (None, *double_backward(ctx, along, ctx.needs_input_grad[1:]))

    @staticmethod
    def jvp(ctx: Any, _of_caller: None, *tangents: Any) -> tuple[Tensor | None, ...]:
        wanted = wanted_names(kept(ctx)["wanted"])
        of_wanted = dict(zip(wanted, AttentionBackward.jvp(ctx, *tangents), strict=True))
        return tuple(of_wanted.get(name) for name in DIFFERENTIABLE)


_library = torch.library.Library("flash_attn_ext", "FRAGMENT")
_library.impl("attention_forward", _Forward.call, "Autograd", with_keyset=True)
_library.impl("attention_backward", _Backward.call, "Autograd", with_keyset=True)


def _map_forward(info: Any, in_dims: tuple[Any, ...], *problem: Any) -> Mapped:
    operator = torch.ops.flash_attn_ext.attention_forward
    return map_operator(operator, Problem._fields, outputs_of, (info, in_dims, problem))


def _map_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Mapped:
    operator = torch.ops.flash_attn_ext.attention_backward
    return map_operator(operator, AttentionBackward.NAMES, _gradients_of, (info, in_dims, arguments))


torch.library.register_vmap(_FORWARD, _map_forward)
torch.library.register_vmap(_BACKWARD, _map_backward)


def _gradients_of(arguments: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name if is_wanted else "" for name, is_wanted in zip(DIFFERENTIABLE, arguments["wanted"], strict=True))
