"""Options that PyTorch's attention function lacks: suites `softcap`, `alibi` and `sinks`.

The forward pass is the same with and without the gradient of slopes and sinks, so rows with it have a backward pass
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from flash_attn_ext.cli.bench.workload import Workload

SOFTCAP = 50.0  # of Gemma 2
SHORT = 2048  # tokens


def softcap() -> Iterator[Workload]:
    for shape in _shapes():
        yield Workload("softcap", "causal", softcap=SOFTCAP, peers=("flex", "fa3", "fa4"), against="best", **shape)


def alibi() -> Iterator[Workload]:
    """PyTorch's kernels get ALiBi as a bias of each head, so they take no part where slopes have a gradient."""
    for shape in _shapes():
        common: dict[str, Any] = dict(has_alibi=True, against="best", **shape)
        yield Workload("alibi", "causal", peers=("flex", "efficient", "cudnn"), **common)
        if shape["seqlen"] == SHORT:  # FlexAttention takes seconds for each of the longer calls
            yield Workload("alibi", "slopes with grad", peers=("flex",), **_trained(common))


def sinks() -> Iterator[Workload]:
    options: dict[str, Any] = dict(has_sink=True, peers=("flex",), against="best")
    for shape in _shapes():
        yield Workload("sinks", "causal", **options, **shape)
        yield Workload("sinks", "sink with grad", **_trained(options | shape))
    yield from gpt_oss("sinks")


def gpt_oss(suite: str) -> Iterator[Workload]:
    """Every other layer of the model has a window of 128 keys, the query's own among them."""
    shape: dict[str, Any] = dict(batch=1, num_heads=64, num_key_heads=8, seqlen=8192, head_dim=64, causal=True)
    options: dict[str, Any] = dict(has_sink=True, extras_need_grad=True, peers=("flex",), against="best")
    yield Workload(suite, "gpt-oss", **options, **shape)
    yield Workload(suite, "gpt-oss, window 128", window=(127, 0), **options, **shape)


def softcap_on_cpu() -> Iterator[Workload]:
    """Forward alone, since the only peer has no backward pass on the CPU."""
    yield from _on_cpu(Workload("softcap", "causal", softcap=SOFTCAP, peers=("flex",), **_CPU), ("forward",))


def alibi_on_cpu() -> Iterator[Workload]:
    load = Workload("alibi", "causal", has_alibi=True, peers=("flex", "torch sdpa"), **_CPU)
    yield from _on_cpu(load, ("forward", "forward+backward"))


_CPU: dict[str, Any] = dict(
    batch=1, num_heads=8, seqlen=2048, head_dim=64, dtype=torch.float32, causal=True, against="best"
)


def _on_cpu(load: Workload, passes: tuple[str, ...]) -> Iterator[Workload]:
    for head_dim in (64, 128):
        yield dataclasses.replace(load, head_dim=head_dim, passes=passes)


def _shapes() -> Iterator[dict[str, Any]]:
    """Of the grid, with as many tokens and channels at every point."""
    for head_dim in (64, 128):
        for seqlen in (SHORT, 8192):
            heads = 2048 // head_dim
            yield dict(batch=16384 // seqlen, num_heads=heads, seqlen=seqlen, head_dim=head_dim, causal=True)


def _trained(options: dict[str, Any]) -> dict[str, Any]:
    return options | dict(extras_need_grad=True, passes=("backward",))
