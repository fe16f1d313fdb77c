"""FLOPs of the operators, for ``torch.utils.flop_counter.FlopCounterMode`` and whatever else asks its registry.

The formulas count GEMMs: 2 FLOPs for each column of each pair, which is a query and a key that it sees by causality,
window, intervals, blocks and length. Pairs that masks and dropout hide count; the softmax does not. Where intervals
and blocks have no values, as in traces, they count as if they hid nothing. The forward pass has two GEMMs, the backward
pass five if q, k and v get gradients. Forward mode has five if all three have tangents, and a second
derivative of all three has twelve.

The registry's module imports triton, which takes longer than all of this package. So the formulas are registered when
other code imports it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext import ops  # noqa: F401  (defines the operators)
from flash_attn_ext._call.problem import DIFFERENTIABLE, KvCache, Problem, block_size
from flash_attn_ext.derivatives.kinds import tangent_name

REGISTRY = "torch.utils.flop_counter"
OPERATORS = torch.ops.flash_attn_ext
_Size = Any  # int or torch.SymInt; releases of PyTorch disagree about the types of sizes


def forward_flops(*args: Any, out_val: object = None, **kwargs: Any) -> int:
    """The FLOPs of Q K^T and P V."""
    problem = Problem(*args[: len(Problem._fields)], **kwargs)
    return _flops(_pairs(problem), problem.q.shape[-1] + problem.v.shape[-1])


def backward_flops(*args: Any, out_val: object = None, **kwargs: Any) -> int:
    """The FLOPs of Q K^T again and dO V^T, and of P^T dO, dS K and dS^T Q where v, q and k get gradients."""
    named = _named(OPERATORS.attention_backward, args, kwargs)
    problem, wanted = _problem_in(named), _wanted_in(named)
    columns = problem.q.shape[-1] * (1 + wanted["q"] + wanted["k"])
    columns += problem.v.shape[-1] * (_any_of_scores(wanted) + wanted["v"])
    return _flops(_pairs(problem), columns)


def tangents_flops(*args: Any, out_val: object = None, **kwargs: Any) -> int:
    """Q K^T again, dQ K^T and Q dK^T; (P dS) V and P dV: each where there are such tangents."""
    named = _named(OPERATORS.attention_tangents, args, kwargs)
    problem, given = _problem_in(named), _tangents_in(named)
    columns = problem.q.shape[-1] * (1 + given["q"] + given["k"])
    columns += problem.v.shape[-1] * (_any_of_scores(given) + given["v"])
    return _flops(_pairs(problem), columns)


def backward_tangents_flops(*args: Any, out_val: object = None, **kwargs: Any) -> int:
    """The same but for the products with V and dV, where out's tangent is given; dO V^T and dO dV^T; and of what is
    asked for, P'^T dO, dS' K and dS dK, dS'^T Q and dS^T dQ."""
    named = _named(OPERATORS.attention_backward_tangents, args, kwargs)
    problem, given, wanted = _problem_in(named), _tangents_in(named), _wanted_in(named)
    of_out = named["out_tangent"] is None
    columns = problem.q.shape[-1] * (1 + given["q"] + given["k"])
    columns += problem.q.shape[-1] * (wanted["q"] * (1 + given["k"]) + wanted["k"] * (1 + given["q"]))
    columns += problem.v.shape[-1] * (of_out * (_any_of_scores(given) + given["v"]))
    columns += problem.v.shape[-1] * (_any_of_scores(wanted) * (1 + given["v"]))
    columns += problem.v.shape[-1] * (wanted["v"] * (_any_of_scores(given) or given["sink"]))
    return _flops(_pairs(problem), columns)


def kvcache_flops(*args: Any, out_val: object = None, **kwargs: Any) -> int:
    """The FLOPs of a forward pass on the keys that each sequence has after the call."""
    named = _named(OPERATORS.attention_with_kvcache, args, kwargs)
    problem = _problem_in(named)
    cache = KvCache(**{name: named[name] for name in KvCache._fields})
    pages = 1 if cache.block_table is None else cache.block_table.shape[1]
    capacity = pages * problem.k.shape[2]
    num_new = 0 if cache.k_new is None else cache.k_new.shape[2]
    before = _values(cache.cache_seqlens)
    num_queries = problem.q.shape[2]
    if before is None:
        pairs = problem.q.shape[1] * problem.q.shape[0] * num_visible_pairs(problem, num_queries, capacity)
    else:
        after = [min(max(length, 0) + num_new, capacity) for length in before]
        pairs = sum(_pairs_of_sequence(problem, index, num_queries, length) for index, length in enumerate(after))
    return _flops(pairs, problem.q.shape[-1] + problem.v.shape[-1])


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in operator.default._schema.arguments), args, strict=False)) | kwargs


def _problem_in(named: dict[str, Any]) -> Problem:
    return Problem(**{name: named[name] for name in Problem._fields})


def _wanted_in(named: dict[str, Any]) -> dict[str, bool]:
    return dict(zip(DIFFERENTIABLE, named["output_mask"], strict=True))


def _tangents_in(named: dict[str, Any]) -> dict[str, bool]:
    return {name: named[tangent_name(name)] is not None for name in DIFFERENTIABLE}


def _any_of_scores(of: dict[str, bool]) -> bool:
    return of["q"] or of["k"] or of["bias"] or of["alibi_slopes"]


def _flops(pairs: _Size, columns: int) -> int:
    flops: int = 2 * pairs * columns
    return flops


def _pairs(problem: Problem) -> _Size:
    """The pairs of all heads, in all sequences."""
    heads = problem.q.shape[1]
    if problem.cu_seqlens_q is None or problem.cu_seqlens_k is None:
        batch, num_queries, num_keys = problem.q.shape[0], problem.q.shape[2], problem.k.shape[2]
        if not (_have_values(problem.intervals) or _have_values(problem.blocks)):
            return heads * batch * num_visible_pairs(problem, num_queries, num_keys)
        return sum(_pairs_of_sequence(problem, index, num_queries, num_keys) for index in range(batch))
    ends_q, ends_k = _values(problem.cu_seqlens_q), _values(problem.cu_seqlens_k)
    if ends_q is None or ends_k is None:
        batch = problem.cu_seqlens_q.shape[0] - 1
        mean_q, mean_k = ((tensor.shape[0] + batch - 1) // torch.sym_max(batch, 1) for tensor in (problem.q, problem.k))
        return heads * batch * num_visible_pairs(problem, mean_q, mean_k)
    lengths = ([end - begin for begin, end in itertools.pairwise(of_tensor)] for of_tensor in (ends_q, ends_k))
    return sum(
        _pairs_of_sequence(problem, index, num_queries, num_keys, ends_q[index])
        for index, (num_queries, num_keys) in enumerate(zip(*lengths, strict=True))
    )


def _pairs_of_sequence(problem: Problem, index: int, num_queries: int, num_keys: int, first_query: int = 0) -> int:
    """The pairs of all heads of a sequence whose tensors have values. first_query: its first token, if it is packed."""
    heads = problem.q.shape[1]
    intervals, blocks = (table if _have_values(table) else None for table in (problem.intervals, problem.blocks))
    if intervals is None and blocks is None:
        pairs: int = heads * num_visible_pairs(problem, num_queries, num_keys)
        return pairs
    if intervals is None:
        of_sequence = torch.tensor([0, num_keys], device=problem.q.device).expand(1, num_queries, 2)
    elif intervals.dim() == 3:
        of_sequence = intervals[:, first_query : first_query + num_queries]
    else:
        of_sequence = intervals[index if intervals.shape[0] > 1 else 0]
    seen = None if blocks is None else blocks[index if blocks.shape[0] > 1 else 0]
    begins, ends = _clip_to_visible(problem, of_sequence, num_keys)
    order = begins.argsort(-1)
    begins, ends = begins.gather(-1, order), ends.gather(-1, order)
    counted = begins.new_zeros(begins.shape[:-1])  # where the keys end that earlier intervals have
    total = counted.sum()
    for begin, end in zip(begins.unbind(-1), ends.unbind(-1), strict=True):
        begin = torch.maximum(begin, counted)
        counted = torch.maximum(counted, end)
        if seen is not None:
            begin, end = (
                _keys_before(seen, bound, num_queries, num_keys) for bound in (begin, torch.maximum(begin, end))
            )
        total = total + (end - begin).clamp(min=0).sum()
    return int(total) * (heads // max(of_sequence.shape[0], 1 if seen is None else seen.shape[0]))


def _keys_before(seen: Tensor, bounds: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """How many keys of the blocks that are seen, (heads, query blocks, key blocks), lie before (heads, queries)."""
    size, width = block_size(seen.shape[2], num_keys), seen.shape[2]
    if width == 0:
        return torch.zeros_like(bounds)
    before = torch.nn.functional.pad(seen.long().cumsum(-1) * size, (1, 0))[..., :width].flatten(1)
    bounds = bounds.expand(max(len(seen), len(bounds)), -1).clamp(0, num_keys)
    block = (bounds // size).clamp(max=width - 1)
    row = torch.arange(num_queries, device=seen.device) // block_size(seen.shape[1], num_queries)
    place = row * width + block
    at = [table.expand(len(place), -1).gather(1, place) for table in (before, seen.flatten(1))]
    return at[0] + at[1] * (bounds - block * size)


def _clip_to_visible(problem: Problem, intervals: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """(heads, queries, 2 n) -> begins and ends (heads, queries, n) of what causality and the window leave."""
    num_queries = intervals.shape[1]
    diagonal = torch.arange(num_queries, device=intervals.device)[:, None]
    diagonal = diagonal + (0 if problem.causal == "top_left" else num_keys - num_queries)
    right = 0 if problem.causal is not None else problem.window_right
    begins, ends = intervals[..., 0::2].long().clamp(min=0), intervals[..., 1::2].long().clamp(max=num_keys)
    if problem.window_left is not None:
        begins = torch.maximum(begins, diagonal - problem.window_left)
    if right is not None:
        ends = torch.minimum(ends, diagonal + right + 1)
    return begins, ends


def num_visible_pairs(problem: Problem, num_queries: _Size, num_keys: _Size) -> _Size:
    """The number of pairs that the problem's causality and window leave of one sequence. It is the sum of the intervals
    of csrc/attention/visibility.h, without a loop, so that lengths may be symbols."""
    diagonal = 0 if problem.causal == "top_left" else num_keys - num_queries
    right = 0 if problem.causal is not None else problem.window_right
    ends = num_queries * num_keys
    if right is not None:
        ends = _sum_of_clamped(diagonal + right + 1, num_queries, num_keys)
    if problem.window_left is None:
        return ends
    return ends - _sum_of_clamped(diagonal - problem.window_left, num_queries, num_keys)


def _sum_of_clamped(first: _Size, count: _Size, highest: _Size) -> _Size:
    """The sum of min(max(x, 0), highest) for x in [first, first + count)."""

    def below(end: _Size) -> _Size:
        rising = torch.sym_max(torch.sym_min(end, highest), 0)
        beyond = torch.sym_max(end - highest, 0)
        return rising * (rising - 1) // 2 + beyond * highest

    return below(first + count) - below(first)


def _values(lengths: Tensor) -> list[int] | None:
    """The values of a tensor of lengths; this waits for a GPU. None where it has none."""
    return lengths.tolist() if _have_values(lengths) else None


def _have_values(tensor: Tensor | None) -> bool:
    """Whether a tensor is there and may be read: in traces and CUDA graphs it has no values."""
    if type(tensor) is not Tensor or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _register(module: Any) -> None:
    formulas = {
        OPERATORS.attention_forward: forward_flops,
        OPERATORS.attention_backward: backward_flops,
        OPERATORS.attention_tangents: tangents_flops,
        OPERATORS.attention_backward_tangents: backward_tangents_flops,
        OPERATORS.attention_with_kvcache: kvcache_flops,
    }
    for operator, formula in formulas.items():
        module.register_flop_formula(operator, get_raw=True)(formula)


class _WhenImported:
    """An entry of sys.meta_path that finds the registry's module as the others do, and registers once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)
                sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if REGISTRY in sys.modules:
    _register(sys.modules[REGISTRY])
else:
    sys.meta_path.insert(0, _WhenImported())
