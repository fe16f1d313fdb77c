"""Text generation by a whole model with random weights: the workloads of suite `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flash_attn_ext.cli.bench.workload import Workload

PREFILL, DECODE = "prefill", "decode"  # passes: the first token, and each later one
DYNAMIC, STATIC, COMPILED = "dynamic cache", "static cache", "static cache, compiled"


@dataclass(frozen=True)
class GenerateWorkload(Workload):
    """`batch` prompts of `seqlen` random tokens through a Llama, by generate() of transformers."""

    causal: bool = True
    peers: tuple[str, ...] = ("torch sdpa",)
    against: str = "torch sdpa"
    passes: tuple[str, ...] = (PREFILL, DECODE)
    cache: str = DYNAMIC
    num_layers: int = 16
    hidden_size: int = 2048
    intermediate_size: int = 8192
    vocab_size: int = 32000
    new_tokens: int = 32  # after the first

    @property
    def in_microseconds(self) -> bool:
        return True

    def amounts(self, pass_: str) -> dict[str, float]:
        """The work of one step: the whole prompt, or a token for each sequence."""
        return {"tokens_per_s": self.batch * (self.seqlen if pass_ == PREFILL else 1)}


def generate_on_gpu() -> Iterator[GenerateWorkload]:
    """The model has the size of Llama 3.2 1B, except for its vocabulary."""
    for kilokeys in (1, 8, 32):
        for cache in (DYNAMIC, STATIC):
            yield _workload(kilokeys, cache)
    yield _workload(8, COMPILED, in_goal=False)


def generate_on_cpu() -> Iterator[GenerateWorkload]:
    small: dict[str, Any] = dict(num_layers=2, hidden_size=128, intermediate_size=256, vocab_size=1000, new_tokens=8)
    for cache in (DYNAMIC, STATIC):
        shape: dict[str, Any] = dict(
            batch=1, num_heads=8, num_key_heads=2, seqlen=1024, head_dim=16, dtype=torch.float32
        )
        yield GenerateWorkload("generate", cache, cache=cache, **shape, **small)


def _workload(kilokeys: int, cache: str, **options) -> GenerateWorkload:
    shape: dict[str, Any] = dict(batch=1, num_heads=32, num_key_heads=8, seqlen=1024 * kilokeys, head_dim=64)
    return GenerateWorkload("generate", cache, cache=cache, **shape, **options)
