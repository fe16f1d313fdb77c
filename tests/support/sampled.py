"""Sequences too long for the reference: float64 answers at some queries and keys, each computed from all of the others.

A query's output and dQ follow from its row of scores. A key's dK and dV follow from its column, and from the LSE and
delta of all queries, which are computed a block of rows at a time. Problems have causality, a window, packed sequences
and grouped heads: the keys of a query are an interval. There are as many keys as queries, and one batch entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from support.backends import Backend
from support.cases import Case, Inputs, make_inputs
from support.checks import check_draws
from support.errors import Comparison, compare
from support.packed import PackedCase, cu_seqlens, make_packed, run_packed
from support.runners import Result, run_ours

PAIRS = 2**26  # whose scores are held at a time, in float64
BAND = 32  # neighbouring queries, or keys, that are compared together, since sizes differ with the number of keys
SAMPLED = ("out", "dq", "dk", "dv")
Tensor = torch.Tensor


@dataclass(frozen=True)
class Heads:
    """(heads, tokens, head dim), and the keys [begin, end) that each query sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    begin: Tensor
    end: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def key_head(self, head: int) -> int:
        return head * self.k.shape[0] // self.q.shape[0]

    def tile(self, head: int, queries: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        """Scores and dout · Vᵀ, (queries, keys) in float64."""
        key_head = self.key_head(head)
        scores = self.scale * self.q[head, queries].double() @ self.k[key_head, keys].double().T
        at = torch.arange(self.k.shape[1], device=self.k.device)[keys]
        hidden = (at < self.begin[queries, None]) | (at >= self.end[queries, None])
        dweights = self.dout[head, queries].double() @ self.v[key_head, keys].double().T
        return scores.masked_fill_(hidden, -math.inf), dweights

    def blocks(self) -> Iterator[tuple[Tensor, slice]]:
        """All queries, a block at a time, and the keys that some of a block see."""
        tokens = torch.arange(self.q.shape[1], device=self.q.device)
        for queries in tokens.split(max(1, PAIRS // len(tokens))):
            yield queries, slice(int(self.begin[queries].min()), int(self.end[queries].max()))

    def lse_and_delta(self) -> tuple[Tensor, Tensor]:
        """(heads, tokens) in float64."""
        lse, delta = torch.empty(2, *self.q.shape[:2], dtype=torch.float64, device=self.q.device)
        for queries, keys in self.blocks():
            for head in range(self.q.shape[0]):
                scores, dweights = self.tile(head, queries, keys)
                lse[head, queries] = scores.logsumexp(-1)
                weights = scores.sub_(lse[head, queries, None]).exp_()
                delta[head, queries] = weights.mul_(dweights).sum(-1)
        return lse, delta


def base_and_lengths(problem: Case | PackedCase) -> tuple[Case, tuple[int, ...]]:
    return (problem.base, problem.lengths_q) if isinstance(problem, PackedCase) else (problem, (problem.sq,))


def heads_of(problem: Case | PackedCase, inputs: Inputs) -> Heads:
    case, lengths = base_and_lengths(problem)
    counts = torch.tensor(lengths, device=inputs.q.device)
    at, last = torch.arange(sum(lengths), device=inputs.q.device), counts.cumsum(0).repeat_interleave(counts)
    first = last - counts.repeat_interleave(counts)
    left, right = case.window or (None, None)
    begin = first if left is None else torch.maximum(first, at - left)
    end = last if right is None else torch.minimum(last, at + right + 1)
    if case.causal is not None:
        end = torch.minimum(end, at + 1)
    tensors = by_heads(problem, {name: getattr(inputs, name) for name in ("q", "k", "v", "dout")})
    return Heads(**tensors, begin=begin, end=end)


def by_heads(problem: Case | PackedCase, result: Result) -> Result:
    """A result as Heads has its tensors."""
    if not isinstance(problem, PackedCase):
        return {name: tensor[0] for name, tensor in result.items()}
    return {name: tensor if name == "lse" else tensor.transpose(0, 1) for name, tensor in result.items()}


def bands(tokens: int) -> list[Tensor]:
    """The first, some in the middle, the last, and some anywhere."""
    starts = (0, tokens // 4 - BAND // 2, tokens // 2, tokens - BAND)
    anywhere = torch.randint(tokens // 8, tokens, (2 * BAND,), generator=torch.Generator().manual_seed(0))
    return [*(torch.arange(start, start + BAND) for start in starts), anywhere.unique()]


def exact_at(heads: Heads, rows: Tensor, lse: Tensor, delta: Tensor) -> Result:
    """(heads, rows, head dim) in float64: out and dq of these queries, dk and dv of these keys."""
    num_heads, tokens = heads.q.shape[:2]
    everything, queries = slice(0, tokens), torch.arange(tokens, device=rows.device)
    out, dq, dk, dv = (
        torch.zeros(t.shape[0], len(rows), t.shape[2], dtype=torch.float64, device=rows.device)
        for t in (heads.dout, heads.q, heads.k, heads.v)
    )
    for head in range(num_heads):
        key_head = heads.key_head(head)
        scores, dweights = heads.tile(head, rows, everything)
        weights = (scores - lse[head, rows, None]).exp()
        out[head] = weights @ heads.v[key_head].double()
        dscores = weights * (dweights - delta[head, rows, None])
        dq[head] = heads.scale * dscores @ heads.k[key_head].double()
        scores, dweights = heads.tile(head, queries, rows)
        weights = (scores - lse[head, :, None]).exp()
        dv[key_head] += weights.T @ heads.dout[head].double()
        dscores = weights * (dweights - delta[head, :, None])
        dk[key_head] += heads.scale * dscores.T @ heads.q[head].double()
    return dict(out=out, dq=dq, dk=dk, dv=dv)


def theirs_of(problem: Case | PackedCase, inputs: Inputs) -> Result:
    """PyTorch's answer: on a GPU FlashAttention-2, which has windows there only for packed sequences."""
    heads = heads_of(problem, inputs)
    leaves = [t.detach().transpose(0, 1).contiguous().requires_grad_() for t in (heads.q, heads.k, heads.v)]
    group = heads.q.shape[0] // heads.k.shape[0]
    q, k, v = leaves[0], *(leaf.repeat_interleave(group, 1) for leaf in leaves[1:])
    if inputs.q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        case, lengths = base_and_lengths(problem)
        ends = cu_seqlens(lengths, "cuda")
        left, right = (-1 if side is None else side for side in case.window or (None, None))
        window = (left, right if case.causal is None else 0)
        out = varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths), window_size=window)
    else:
        at = torch.arange(heads.q.shape[1])
        seen = (at >= heads.begin[:, None]) & (at < heads.end[:, None])
        out = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=seen)
        out = out[0].transpose(0, 1)
    gradients = torch.autograd.grad(out, leaves, heads.dout.transpose(0, 1))
    named = zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True)
    return {name: tensor.transpose(0, 1) for name, tensor in named}


def run(problem: Case | PackedCase, inputs: Inputs, backend: Backend) -> Result:
    packed = isinstance(problem, PackedCase)
    return by_heads(problem, run_packed(problem, inputs, backend) if packed else run_ours(inputs, backend))


def make(problem: Case | PackedCase, dtype: torch.dtype, backend: Backend, seed: int = 0) -> Inputs:
    make_any = make_packed if isinstance(problem, PackedCase) else make_inputs
    return make_any(problem, dtype, backend.device, seed, draw_on=backend.device)


def check_sampled(problem: Case | PackedCase, dtype: torch.dtype, backend: Backend) -> None:
    """The LSE of all queries, and the error rule in each band of queries and keys."""

    def errors(inputs: Inputs, ours: Result) -> dict[str, Comparison]:
        heads = heads_of(problem, inputs)
        lse, delta = heads.lse_and_delta()
        torch.testing.assert_close(ours["lse"].double(), lse, rtol=1e-5, atol=1e-4)
        theirs = theirs_of(problem, inputs)
        found = {}
        for band in bands(heads.q.shape[1]):
            rows = band.to(lse.device)
            exact = exact_at(heads, rows, lse, delta)
            for name in SAMPLED:
                at = f"{name} from {int(band[0])}"
                found[at] = compare(ours[name][:, rows], theirs[name][:, rows], exact[name])
        return found

    check_draws(lambda seed: make(problem, dtype, backend, seed), backend, lambda i: run(problem, i, backend), errors)


def check_linear(problem: Case | PackedCase, dtype: torch.dtype, backend: Backend) -> None:
    """The gradients of a dout are the sums of those of its parts, which are 0 but for the first or the last queries."""
    inputs = make(problem, dtype, backend)
    tokens = inputs.dout.shape[0 if isinstance(problem, PackedCase) else 2]
    border = tokens * 5 // 8 + 3
    is_first = (torch.arange(tokens, device=inputs.dout.device) < border)[:, None]
    if isinstance(problem, PackedCase):
        is_first = is_first[..., None]
    whole = run(problem, inputs, backend)
    first, last = (
        run(problem, inputs.replace(dout=inputs.dout.masked_fill(hidden, 0)), backend)
        for hidden in (~is_first, is_first)
    )
    assert not bool(first["dq"][:, border:].any()) and not bool(last["dq"][:, :border].any())
    for name in ("dq", "dk", "dv"):
        parts, expected = [part[name].float() for part in (first, last)], whole[name].float()
        rounding = torch.finfo(whole[name].dtype).eps * sum(t.abs() for t in (*parts, expected))
        allowed = rounding + 1e-3 * expected.square().mean(-1, keepdim=True).sqrt()
        excess = ((sum(parts) - expected).abs() - allowed).amax()
        assert float(excess) <= 0, f"{name}: {float(excess):.3g} more than rounding"
