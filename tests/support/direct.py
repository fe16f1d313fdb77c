"""Plain calls, and whether C++ takes them directly (csrc/host/call/direct_calls.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import flash_attn_ext
from flash_attn_ext import _C

SDPA = "scaled_dot_product_attention"
ATTENTION = "attention"
KVCACHE = "attention_with_kvcache"
DIRECT = {SDPA: "direct_sdpa", ATTENTION: "direct_attention", KVCACHE: "direct_attention_with_kvcache"}
Q, K, V = (2, 4, 5, 16), (2, 2, 9, 16), (2, 2, 9, 8)  # shapes


@dataclass(frozen=True)
class Call:
    """`options`: keywords, made for a device and q's dtype."""

    function: str
    name: str
    options: Callable[[str, torch.dtype], dict] = lambda device, dtype: {}
    shapes: tuple[tuple[int, ...], ...] = (Q, K, V)
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{self.function}-{self.name}"

    def make(self, device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict]:
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in self.shapes]
        if self.requires_grad:
            tensors = [tensor.requires_grad_() for tensor in tensors]
        return tensors, self.options(device, dtype)


def of(function: str, name: str, **options) -> Call:
    """Tensors among the options are moved to the device."""

    def on_device(device, dtype):
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}

    return Call(function, name, on_device)


def tables(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


GQA = dict(enable_gqa=True)
FIRST = ((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))  # sequence first
CACHE = ((2, 4, 1, 16), (2, 2, 32, 16), (2, 2, 32, 8))
LENGTHS = torch.tensor([7, 20], dtype=torch.int32)
NEW = dict(k_new=tables(2, 2, 3, 16), v_new=tables(2, 2, 3, 8))
PAGES = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def of_cache(name: str, shapes=CACHE, **options) -> Call:
    call = of(KVCACHE, name, **(dict(cache_seqlens=LENGTHS) | options))
    return Call(KVCACHE, name, call.options, shapes)


PLAIN = {SDPA: of(SDPA, "plain", **GQA), ATTENTION: of(ATTENTION, "plain"), KVCACHE: of_cache("plain")}


def directly(function: str, tensors, options: dict):
    """What the direct way answers: None where it does not take the call."""
    answers = []

    class Asked(Exception):
        pass

    def ask(*arguments):
        answers.append(original(*arguments))
        raise Asked

    original = getattr(_C, DIRECT[function])
    setattr(_C, DIRECT[function], ask)
    try:
        with pytest.raises(Asked):
            getattr(flash_attn_ext, function)(*tensors, **options)
    finally:
        setattr(_C, DIRECT[function], original)
    return answers[0]
