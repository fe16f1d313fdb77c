"""Attention problems as data, for ``verify`` and the self-test of ``info``: every feature alone, then together."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext._call.problem import accumulate_dtype
from flash_attn_ext.types import Causal


@dataclass(frozen=True)
class Case:
    name: str
    num_queries: int = 150
    num_keys: int = 270
    head_dim: int = 64
    head_dim_v: int = 64
    batch: int = 2
    num_heads: int = 4
    num_key_heads: int = 4
    causal: Causal | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    bias: str | None = None  # the dimensions it has in full, the others are 1: "1h1k" is (1, Hq, 1, Sk)
    mask: str | None = None
    alibi: bool = False
    sink: bool = False
    dropout_p: float = 0.0
    hidden: float | None = None  # a score that hides a third of the keys in the bias, instead of random numbers

    @property
    def options(self) -> dict:
        return dict(causal=self.causal, window=self.window, softcap=self.softcap, dropout_p=self.dropout_p)

    def shape_of(self, pattern: str) -> tuple[int, ...]:
        full = {"b": self.batch, "h": self.num_heads, "q": self.num_queries, "k": self.num_keys, "1": 1}
        return tuple(full[letter] for letter in pattern)


CASES = (
    Case("full"),
    Case("causal top_left", causal="top_left"),
    Case("causal bottom_right", causal="bottom_right"),
    Case("window 32 + 16", window=(32, 16)),
    Case("causal, window 40", causal="bottom_right", window=(40, None)),
    Case("bool mask", mask="bhqk"),
    Case("padding mask", mask="b11k"),
    Case("float bias", bias="1hqk"),
    Case("float bias per key", bias="bh1k"),
    Case("bias of -1e4", bias="b11k", hidden=-1e4),
    Case("bias of finfo.min", bias="b11k", hidden=float(torch.finfo(torch.float16).min)),
    Case("ALiBi", causal="bottom_right", alibi=True),
    Case("softcap 5", softcap=5.0),
    Case("sink", sink=True),
    Case("dropout 0.2", dropout_p=0.2),
    Case("grouped heads 4 / 2", num_key_heads=2, causal="top_left"),
    Case("one key head", num_key_heads=1),
    Case("head dim 128", head_dim=128, head_dim_v=128),
    Case("head dim 40", head_dim=40, head_dim_v=40),
    Case("head dim 256", head_dim=256, head_dim_v=256),
    Case("head dims 72, 24", head_dim=72, head_dim_v=24),
    Case("1 query", num_queries=1, causal="bottom_right"),
    Case("1000 keys", num_queries=40, num_keys=1000, batch=1),
    Case(
        "everything",
        causal="bottom_right",
        window=(100, None),
        softcap=8.0,
        bias="1hqk",
        mask="b11k",
        alibi=True,
        sink=True,
        dropout_p=0.1,
        num_key_heads=2,
        head_dim=48,
        head_dim_v=80,
    ),
)


@dataclass
class Inputs:
    """The tensors of a case, (B, H, S, D), and the gradients that come back into out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Inputs:
        """Every floating tensor in one dtype: float64 for the exact answer to the same, rounded, inputs."""

        def convert(tensor: Tensor | None) -> Tensor | None:
            return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor

        fields: dict[str, Any] = {field.name: convert(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return Inputs(**fields)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get gradients, as fresh leaves."""
        names = ("q", "k", "v", "bias", "alibi_slopes", "sink")
        return {
            name: getattr(self, name).detach().requires_grad_() for name in names if getattr(self, name) is not None
        }


def make_inputs(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """Draws inputs from one seeded CPU generator in float64, so that every dtype and device rounds the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(device)

    accumulate = accumulate_dtype(dtype)
    inputs = Inputs(
        q=normal(case.batch, case.num_heads, case.num_queries, case.head_dim),
        k=normal(case.batch, case.num_key_heads, case.num_keys, case.head_dim),
        v=normal(case.batch, case.num_key_heads, case.num_keys, case.head_dim_v),
        dout=normal(case.batch, case.num_heads, case.num_queries, case.head_dim_v),
        dlse=normal(case.batch, case.num_heads, case.num_queries, dtype=accumulate),
    )
    if case.bias is not None:
        shape = case.shape_of(case.bias)
        inputs.bias = normal(*shape)
        if case.hidden is not None:
            inputs.bias = torch.where(uniform(*shape) < 1 / 3, case.hidden, 0.0).to(dtype)
    if case.mask is not None:
        inputs.mask = uniform(*case.shape_of(case.mask)) < 0.7
    if case.alibi:
        inputs.alibi_slopes = (uniform(case.num_heads) * 0.3 + 0.01).to(accumulate)
    if case.sink:
        inputs.sink = normal(case.num_heads, dtype=accumulate) + math.log(case.num_keys)
    return inputs
