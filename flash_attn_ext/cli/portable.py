"""Which calls take the portable kernels on the GPU of this machine, by the plans that ``explain`` shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flash_attn_ext._explanation import Explanation, Plan

HOPPER = "sm90"
SPLIT_KV = "split-KV"  # on Hopper too the fast kernel for few queries: no call need avoid it
_BATCH, _HEADS, _LENGTH = 2, 16, 1024


@dataclass(frozen=True)
class Call:
    """A call of `attention` with what may decide its kernels. Tensors besides q, k and v are given by their shape."""

    name: str
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    needs_grad: bool = False  # of those tensors
    tensor_dtype: torch.dtype | None = None  # of a bias, if it is not that of q
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, device: str) -> dict[str, Any]:
        """For attention() and explain()."""
        shape = (_BATCH, _HEADS, _LENGTH, self.head_dim)
        found: dict[str, Any] = {
            name: torch.empty(shape, dtype=self.dtype, device=device, requires_grad=True) for name in ("q", "k", "v")
        }
        for name, of_tensor in self.tensors.items():
            found[name] = torch.empty(of_tensor, dtype=self._dtype_of(name), device=device)
            found[name].requires_grad_(self.needs_grad)
        return {**found, **self.options}

    def _dtype_of(self, name: str) -> torch.dtype:
        return {"mask": torch.bool, "bias": self.tensor_dtype or self.dtype}.get(name, torch.float32)


_FULL_MASK = {"mask": (_BATCH, 1, _LENGTH, _LENGTH)}
_FULL_BIAS = {"bias": (1, _HEADS, _LENGTH, _LENGTH)}
CALLS = (
    Call("bfloat16"),
    Call("float16", dtype=torch.float16),
    Call("head dim 256", 256),
    Call("head dim 512", 512),
    Call("a softcap at head dim 512", 512, options=dict(softcap=30.0)),
    Call("float32", dtype=torch.float32),
    Call("float64", dtype=torch.float64),
    Call("a boolean mask", tensors=_FULL_MASK),
    Call("a boolean mask that broadcasts over keys at head dim 256", 256, tensors={"mask": (_BATCH, 1, _LENGTH, 1)}),
    Call("a bias", tensors=_FULL_BIAS),
    Call("a bias at head dim 256", 256, tensors=_FULL_BIAS),
    Call("a float32 bias beside bfloat16", tensors=_FULL_BIAS, tensor_dtype=torch.float32),
    Call("a bias with a gradient", tensors=_FULL_BIAS, needs_grad=True),
    Call(
        "a bias with a gradient that broadcasts over queries",
        tensors={"bias": (_BATCH, 1, 1, _LENGTH)},
        needs_grad=True,
    ),
    Call("ALiBi slopes", tensors={"alibi_slopes": (_HEADS,)}),
    Call("ALiBi slopes with a gradient", tensors={"alibi_slopes": (_HEADS,)}, needs_grad=True),
    Call("a sink", tensors={"sink": (_HEADS,)}),
    Call("a sink with a gradient", tensors={"sink": (_HEADS,)}, needs_grad=True),
    Call("a softcap", options=dict(softcap=30.0)),
    Call("dropout", options=dict(dropout_p=0.1)),
)


def passes_on_portable_kernels(explain: Callable[[Call], Explanation]) -> dict[str, list[str]]:
    """The names of calls by what of them takes the portable kernels: "both passes" or one of them.

    `explain`: the explanation of a call on the GPU in question.
    """
    found: dict[str, list[str]] = {"both passes": [], "the forward pass": [], "the backward pass": []}
    for call in CALLS:
        answer = explain(call)
        if answer.backend is None or answer.forward is None or answer.backward is None:
            continue
        forward, backward = (
            answer.backend != HOPPER or _is_portable(plan) for plan in (answer.forward, answer.backward)
        )
        if forward or backward:
            passes = "both passes" if forward and backward else "the forward pass" if forward else "the backward pass"
            found[passes].append(call.name)
    return found


def _is_portable(plan: Plan) -> bool:
    return plan.portable and plan.kernel != SPLIT_KV
