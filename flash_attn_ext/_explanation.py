"""What ``explain`` answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flash_attn_ext import _C
from flash_attn_ext._problem import DIFFERENTIABLE, Problem
from flash_attn_ext.types import Backend


@dataclass(frozen=True)
class Plan:
    """What one pass of a call runs, as csrc/kernels/plan/report.h has it. ``str()`` of it says it in words.

    A field is None, or False, where it does not apply."""

    words: str = field(repr=False)
    kernel: str
    """The name of the kernel, or of the kernels that a backward pass runs together."""
    workspace: dict[str, int]
    """Bytes of each part of the one allocation that the pass makes beside its results."""
    workspace_bytes: int
    """Of all parts together, each of which begins at a multiple of 256 bytes."""
    variant: str | None = None
    """What the kernel can do to a score: "plain", "mask", "extended" and others."""
    head_dims: tuple[int, int] | None = None
    """What the kernel is compiled for: the head dim of q and k, and that of v."""
    tile: tuple[int, int] | None = None
    """Queries and keys of a block's tile of scores."""
    stages: int | None = None
    """How many tiles of K and V a block has in flight."""
    tf32: bool = False
    """Whether products of float32 are rounded to TF32."""
    blocks: int | None = None
    """How many blocks share all keys out among themselves."""
    splits: int | None = None
    """How many blocks share the keys of one tile of queries."""
    keys_per_split: int | None = None
    """On the CPU: how many keys each of the threads takes that share a tile of queries."""
    appends_keys: bool = False
    """Whether the kernel itself writes new keys and values into the cache."""
    dq_variant: str | None = None
    """Backward, where dQ has a kernel of its own: its variant."""
    dq_head_dim: int | None = None
    """The head dim that this kernel is compiled for."""
    dkdv_variant: str | None = None
    """Backward, where dK and dV have a kernel of their own: its variant."""
    dkdv_head_dim: int | None = None
    """The head dim that this kernel is compiled for."""
    launches: int | None = None
    """Backward, where one kernel stores scores for another: in how many launches, so that they fit the workspace."""
    key_heads_per_launch: int | None = None
    """Pairs of a batch entry and a key head that such a launch works on."""
    query_chunks: int | None = None
    """In how many launches the queries of such a pair are worked on, where it is more than one."""
    cyclic: bool = False
    """Backward, warp-specialised: whether tiles of keys start at different tiles of queries and go round."""
    phases: int | None = None
    """In how many groups tiles of keys come."""
    sums_of_dq: int | None = None
    """How many sums of dQ a tile of queries has, where it is more than one."""
    claims_per_key_tile: int | None = None
    """How many blocks share the query heads of a tile of keys, where it is more than one."""
    announces_visits: bool = False
    """Whether dQ of a tile is announced to who adds it up before it is computed."""
    adds_statistics: bool = False
    """Whether products add the LSE and delta."""
    delta: str | None = None
    """Backward: how rowsum(dout * out) is computed."""
    dbias: str | None = None
    """Backward: what the gradient of the bias is computed from."""
    intervals: Plan | None = None
    """Forward: what runs for batch entries of which a mask leaves one interval of keys, by another kernel."""

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
    """What the forward pass runs, and the workspace that it takes; None when no backend can run."""
    backward: Plan | None = None
    """The same of the backward pass, for the inputs that require grad (q, k and v when none does)."""

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
    return _plan(**forward), _plan(**backward)


def _plan(intervals: dict[str, Any] | None = None, **fields: Any) -> Plan:
    return Plan(**fields, intervals=None if intervals is None else _plan(**intervals))
