"""Sharding rules, so that DTensors whose batch or heads are sharded go through attention without communication.

    from flash_attn_ext.integrations import dtensor

    dtensor.register()
    out = flash_attn_ext.attention(q, k, v)  # DTensors, all sharded on the batch, on the heads, or on both

Registration is explicit, because ``torch.distributed.tensor`` takes many times longer to import than this library.
FSDP, and other code that passes plain tensors to attention, needs no rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flash_attn_ext import _frames
from flash_attn_ext._call.problem import DIFFERENTIABLE, NUM_TENSORS, Problem
from flash_attn_ext._torch_private import schema_infos_of
from flash_attn_ext.derivatives.functions import AttentionBackward, AttentionBackwardTangents, AttentionTangents
from flash_attn_ext.derivatives.kinds import tangent_name

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding
except ImportError as error:
    raise ImportError(
        "torch.distributed.tensor is not in this PyTorch, so there are no DTensors to shard: install a PyTorch that "
        "was built with torch.distributed (torch.distributed.is_available())"
    ) from error

OPERATORS = torch.ops.flash_attn_ext
_TABLES = ("bias", "mask", "intervals", "blocks")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k")
Placements = list[Any]  # None for arguments that are no tensors
Rules = list[tuple[Placements, Placements]]


def register() -> None:
    """Give ``attention``, ``attention_varlen`` and ``scaled_dot_product_attention`` rules for DTensors, their backward
    passes and second derivatives too.

    On each dimension of a mesh, a call is sharded on the batch or on the heads, or is replicated; DTensor chooses what
    takes the least communication, and redistributes other tensors. Heads are sharded if each process gets whole groups
    of query heads: if the number of shards divides that of key heads, or all query heads share one key head, which is
    replicated then, or there are as many key heads as query heads. Packed sequences are sharded on the
    heads only. Gradients of a tensor that all processes share while the call is sharded (a bias that broadcasts, sinks
    on a sharded batch, one key head) are Partial.

    Calling it again does nothing new. A call with dropout raises RuntimeError, since processes would have to draw other
    bits.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> from flash_attn_ext.integrations import dtensor
        >>> dtensor.register()
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one process, to show it
        >>> q = distribute_tensor(torch.randn(2, 8, 30, 64), dist.init_device_mesh("cpu", (1,)), [Shard(1)])
        >>> flash_attn_ext.attention(q, q, q).placements
        (Shard(dim=1),)
        >>> dist.destroy_process_group()
    """
    known = schema_infos_of(DTensor)
    rules = {
        OPERATORS.attention_forward: _forward,
        OPERATORS.attention_backward: _backward,
        OPERATORS.attention_tangents: _tangents,
        OPERATORS.attention_backward_tangents: _backward_tangents,
    }
    for operator, rule in rules.items():
        register_sharding(operator.default)(rule)
        # DTensor's cache of a call has to depend on all arguments. By default it depends on those from the first int
        # on, but the flags for wanted gradients come before that.
        known[operator.default].static_argnum = 0


def _forward(*arguments: Any) -> Rules:
    """Returns [(placements of out, lse, lse_residual and row_max, placements of the arguments)]."""
    problem = Problem(*arguments)
    _refuse_dropout(problem)
    return [(_of_forward_results(problem, layout), _of_arguments(problem, layout)) for layout in _layouts(problem)]


def _backward(*values: Any) -> Rules:
    """Returns [(placements of the gradients, placements of the arguments)]."""

    def of_results(problem: Problem, layout: str, arguments: Placements, _given: dict[str, Any]) -> Placements:
        return _of_gradients(problem, layout, arguments)

    return _of_derivative(AttentionBackward.NAMES, values, of_results)


def _tangents(*values: Any) -> Rules:
    """Returns [(placements of out_tangent and lse_tangent, placements of the arguments)]."""

    def of_results(problem: Problem, layout: str, _arguments: Placements, _given: dict[str, Any]) -> Placements:
        return _of_forward_results(problem, layout)[:2]

    return _of_derivative(AttentionTangents.NAMES, values, of_results)


def _backward_tangents(*values: Any) -> Rules:
    """Returns [(placements of out_tangent, lse_tangent and the tangents of gradients, placements of the arguments)]."""

    def of_results(problem: Problem, layout: str, arguments: Placements, given: dict[str, Any]) -> Placements:
        absent: Placements = [Replicate()] * 2  # (0,) where they are arguments
        left = _of_forward_results(problem, layout)[:2] if given["out_tangent"] is None else absent
        return left + _of_gradients(problem, layout, arguments)

    return _of_derivative(AttentionBackwardTangents.NAMES, values, of_results)


def _of_derivative(
    names: tuple[str, ...],
    values: tuple[Any, ...],
    of_results: Callable[[Problem, str, Placements, dict[str, Any]], Placements],
) -> Rules:
    """Arguments before a problem's fields have the placements of what they are tangents or gradients of."""
    given = dict(zip(names, values, strict=True))
    problem = Problem(**{name: given[name] for name in Problem._fields})
    _refuse_dropout(problem)
    acceptable = []
    for layout in _layouts(problem):
        out, lse, residual, _ = _of_forward_results(problem, layout)
        arguments = _of_arguments(problem, layout)
        known = dict(out=out, dout=out, out_tangent=out, lse=lse, dlse=lse, lse_tangent=lse, lse_residual=residual)
        known |= {tangent_name(name): arguments[Problem._fields.index(name)] for name in DIFFERENTIABLE}
        leading = names[: len(names) - len(arguments)]
        before = [None if given[name] is None else known.get(name) for name in leading]
        acceptable.append((of_results(problem, layout, arguments, given), before + arguments))
    return acceptable


def _refuse_dropout(problem: Problem) -> None:
    if problem.dropout_p > 0:
        raise RuntimeError(
            f"dropout_p is {problem.dropout_p}, but q is a DTensor, and sharded attention has no dropout: processes "
            "would have to draw other bits. Pass dropout_p=0.0, or call attention on local tensors, with "
            "torch.distributed.tensor.experimental.local_map or to_local(), where each process draws from its own "
            "generator"
        )


def _layouts(problem: Problem) -> list[str]:
    """The ways in which one dimension of the mesh may shard the call."""
    layouts = ["replicate"]
    if problem.cu_seqlens_q is None:
        layouts.append("batch")
    heads_q, heads_k = problem.q.shape[1], problem.k.shape[1]
    if heads_k == 1 < heads_q:
        layouts.append("query heads")
    elif heads_k == heads_q or heads_k % _num_shards(problem) == 0:
        layouts.append("heads")
    return layouts


def _num_shards(problem: Problem) -> int:
    """An upper bound of the number of shards of heads. It leaves out mesh dimensions on which only the batch is
    sharded, or nothing."""
    of_tensors: list[Any] = list(problem[:3])  # DTensorSpecs in place of the tensors
    mesh, placements = of_tensors[0].mesh, zip(*(spec.placements for spec in of_tensors), strict=True)
    packed = problem.cu_seqlens_q is not None
    return math.prod(
        mesh.size(dim)
        for dim, of_dim in enumerate(placements)
        if not (all(p.is_replicate() for p in of_dim) or (not packed and all(p.is_shard(0) for p in of_dim)))
    )


def _of_arguments(problem: Problem, layout: str) -> Placements:
    """A placement for each tensor of the problem, None for all other arguments."""
    of_tensors = [
        None if tensor is None else _of_argument(name, tensor, layout)
        for name, tensor in zip(Problem._fields, problem[:NUM_TENSORS], strict=False)
    ]
    return of_tensors + [None] * (len(Problem._fields) - NUM_TENSORS)


def _of_argument(name: str, tensor: Any, layout: str) -> Any:
    if layout == "replicate" or name in (*_LENGTHS, "rng_seed"):
        return Replicate()
    if name in ("k", "v") and layout == "query heads":
        return Replicate()
    if name == "sink":
        return Replicate() if layout == "batch" else Shard(0)
    if name == "alibi_slopes" and tensor.ndim == 1:
        return Replicate() if layout == "batch" else Shard(0)
    dim = 0 if layout == "batch" or (name == "intervals" and tensor.ndim == 3) else 1  # packed ones begin with heads
    if name in _TABLES and tensor.shape[dim] == 1:
        return Replicate()
    return Shard(dim)


def _of_forward_results(problem: Problem, layout: str) -> Placements:
    """The placements of out, lse, lse_residual and row_max. The last two are (0,) where the call has none."""
    if layout == "replicate":
        return [Replicate()] * 4
    dim = 0 if layout == "batch" else 1
    lse = Shard(0 if problem.cu_seqlens_q is not None else dim)
    absent = Replicate()
    residual = absent if problem.bias is None else lse
    return [Shard(dim), lse, residual, lse if problem.wants_row_max else absent]


def _of_gradients(problem: Problem, layout: str, arguments: Placements) -> Placements:
    """The placements of the gradients are those of the arguments. But if all processes have an argument, each has a
    partial sum of its gradient."""
    gradients = []
    for name, placement in zip(Problem._fields, arguments, strict=True):
        if name in DIFFERENTIABLE:
            absent = placement is None or layout == "replicate"
            gradients.append(Replicate() if absent else Partial() if placement.is_replicate() else placement)
    return gradients


_frames.skip_functions_of(__name__)
