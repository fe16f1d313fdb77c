"""What ``explain`` answers."""

from __future__ import annotations

from dataclasses import dataclass

from flash_attn_ext import _C
from flash_attn_ext._problem import DIFFERENTIABLE, Problem
from flash_attn_ext.types import Backend


@dataclass(frozen=True)
class Explanation:
    """Which backend a call runs on, and why the others do not. ``str()`` of it is a table to read."""

    backend: Backend | None
    """The backend that runs; None when there is none."""
    reasons: dict[Backend, tuple[str, ...]]
    """Why each backend cannot run, in the order in which they are tried; empty where it can."""
    forward: str | None = None
    """What the forward pass runs, in words, and the workspace that it takes; None when no backend can run."""
    backward: str | None = None
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


def plans_of(problem: Problem) -> tuple[str, str]:
    """The plans of the forward and the backward pass, in words, of the backend that runs a problem or that it names."""
    wanted = [getattr(problem, name) is not None and getattr(problem, name).requires_grad for name in DIFFERENTIABLE]
    if not any(wanted):
        wanted = [name in ("q", "k", "v") for name in DIFFERENTIABLE]
    return _C.attention_plan(wanted, problem)
