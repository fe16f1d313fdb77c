"""The answer of ``explain``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from flash_attn_ext import _C
from flash_attn_ext._call.problem import DIFFERENTIABLE, Problem
from flash_attn_ext.types import Backend


@dataclass(frozen=True)
class Plan:
    """The plan of one pass of a call, as csrc/kernels/plan/report.h has it. ``str()`` formats it as text.

    A field that does not apply is None, or False."""

    words: str = field(repr=False)
    kernel: str
    """The name of the kernel, or of the kernels that compute a backward pass."""
    workspace: dict[str, int]
    """The bytes of each part of the workspace, the one allocation that the pass makes besides its results."""
    workspace_bytes: int
    """The bytes of all parts together. Each part begins at a multiple of 256 bytes."""
    portable: bool = False
    """Whether it is one of the portable kernels, for GPUs of compute capability 8.0 and later."""
    row_max: bool = False
    """Whether the kernel also writes the largest score of each row, for ``return_max_logit``."""
    score_mode: str | None = None
    """What the kernel can do to scores, such as "scale only", "mask" or "generic"."""
    head_dims: tuple[int, int] | None = None
    """The head dim of q and k, and that of v, that the kernel is compiled for."""
    tile: tuple[int, int] | None = None
    """The queries of a CTA's work tile, and the keys of a tile of K."""
    stages: int | None = None
    """The stages of the pipeline of K and V tiles."""
    ctas_per_sm: int | None = None
    """How many CTAs share an SM by design, if more than one."""
    ping_pong: bool = False
    """Whether named barriers order the GEMMs of the warpgroups (ping-pong scheduling)."""
    tf32: bool = False
    """Whether the operands of float32 GEMMs are rounded to TF32."""
    persistent_ctas: int | None = None
    """Persistent CTAs, among which the keys of all heads are divided."""
    splits: int | None = None
    """How many CTAs share the keys of a query tile (split-KV)."""
    keys_per_split: int | None = None
    """The keys of each split, where threads of the CPU share a query tile (split-KV)."""
    appends_keys: bool = False
    """Whether the kernel itself appends new keys and values to the cache."""
    dq_score_mode: str | None = None
    """What the backward kernel of dQ can do to scores, if dQ has one of its own."""
    dq_head_dim: int | None = None
    """The head dim that this kernel is compiled for."""
    dkdv_score_mode: str | None = None
    """What the backward kernel of dK and dV can do to scores, if they have one of their own."""
    dkdv_head_dim: int | None = None
    """The head dim that this kernel is compiled for."""
    launches: int | None = None
    """Into how many launches a backward pass is divided, so that materialised scores fit the workspace, or sums of dQ
    fit L2."""
    key_heads_per_launch: int | None = None
    """Pairs of a batch entry and a key head that such a launch computes, at most."""
    query_chunks: int | None = None
    """Into how many query chunks such a pair is divided, if more than one. Each chunk has launches of its own."""
    key_chunks: bool = False
    """Whether query chunks are divided into key chunks. Each key chunk then has a launch of its own."""
    cyclic: bool = False
    """Whether the loop order of the key-stationary backward kernel is cyclic. Key tiles then start at different query
    tiles, and wrap around."""
    phases: int | None = None
    """The phases into which the key tiles of a head are divided."""
    dq_accumulators: int | None = None
    """How many accumulators of dQ a query tile has under split-KV, if more than one."""
    group_shares: int | None = None
    """Into how many shares a KV group is divided, if more than one. A share has some of its query heads, or in cyclic
    order some query tiles of each. It has its own work tiles."""
    pre_signals_dq: bool = False
    """Whether a reducer warp is signalled before the dQ that it will add is computed."""
    adds_statistics: bool = False
    """Whether GEMMs add the LSE and delta, as augmented columns."""
    slope_gradient: bool = False
    """Whether the gradient of ALiBi slopes comes from Hopper's own kernel, after the others."""
    delta: str | None = None
    """How the backward pass computes rowsum(dout * out) - dlse. "exact" stands for rowsum(P * dP) - dlse."""
    dbias: str | None = None
    """What the backward pass computes the bias gradient from."""
    dbias_splits: int | None = None
    """How many CTAs share the batch entries, and heads of one bias, that an element of dBias sums, if more than one."""
    intervals: Plan | None = None
    """The forward plan for batch entries to which padding leaves one key interval, if another kernel computes them."""

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Explanation:
    """Which backend a call runs on, and why the others do not. ``str()`` of it is a table to read."""

    backend: Backend | None
    """The backend that runs; None when there is none."""
    reasons: dict[Backend, tuple[str, ...]]
    """Why each backend cannot run, in the order in which they are tried; empty where it can."""
    forward: Plan | None = None
    """The kernel of the forward pass, and its workspace; None when no backend can run."""
    backward: Plan | None = None
    """The same for the backward pass, for the inputs that require grad (q, k and v when none does)."""

    def __str__(self) -> str:
        lines = [f"backend: {self.backend or 'none can run this call'}"]
        if self.backend is not None:
            lines += [f"  forward:  {self.forward}", f"  backward: {self.backward}"]
        width = max(map(len, self.reasons), default=0)
        for name, reasons in self.reasons.items():
            verdict = "; ".join(reasons) or ("runs" if name == self.backend else "could run, but comes later in order")
            lines.append(f"  {name:<{width}}  {verdict}")
        return "\n".join(lines)


def plans_of(problem: Problem) -> tuple[Plan, Plan]:
    """The plans of the forward and the backward pass, of the backend that runs a problem or that it names."""
    wanted = [getattr(problem, name) is not None and getattr(problem, name).requires_grad for name in DIFFERENTIABLE]
    if not any(wanted):
        wanted = [name in ("q", "k", "v") for name in DIFFERENTIABLE]
    forward, backward = _C.attention_plan(wanted, problem)
    return _plan(**json.loads(forward)), _plan(**json.loads(backward))


def _plan(intervals: dict[str, Any] | None = None, **fields: Any) -> Plan:
    sizes = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Plan(**fields | sizes, intervals=None if intervals is None else _plan(**intervals))
