"""Structured masks as intervals of keys: suite `masks`.

FLOPs count visible pairs, so a row also shows its TFLOP/s as a share of our causal call's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flash_attn_ext.cli.bench.workload import OWN_CAUSAL, OWN_VARLEN, Workload

_SHAPE: dict[str, Any] = dict(batch=1, num_heads=16, head_dim=128)


def masks() -> Iterator[Workload]:
    for case, structure, seqlen in (
        ("documents of 4k", "documents", 32768),
        ("image blocks", "images", 8192),
        ("prefix of 2k", "prefix", 8192),
        ("chunks of 8k", "chunks", 32768),
        ("global and window", "global and window", 32768),
        ("shared prefix", "shared prefix", 32768),
    ):
        options: dict[str, Any] = dict(peers=("flex",), own=OWN_CAUSAL, against="best")
        yield Workload("masks", case, seqlen=seqlen, structure=structure, **options, **_SHAPE)
    for case, structure, seqlen, own in (
        ("documents, packed", "documents", 32768, OWN_VARLEN),
        ("secretly causal", "causal", 8192, OWN_CAUSAL),
    ):
        yield Workload("masks", case, seqlen=seqlen, structure=structure, own=own, against=own, **_SHAPE)
