"""Structured masks as intervals of keys, and lists of blocks: suites `masks` and `blocks`.

FLOPs count visible pairs, so a row also shows its TFLOP/s as a share of our causal, or of our dense call's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flash_attn_ext.cli.bench.block_patterns import BlockPattern
from flash_attn_ext.cli.bench.workload import OWN_CAUSAL, OWN_DENSE, OWN_VARLEN, Workload

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
        options: dict[str, Any] = dict(peers=("flex", "cudnn flex"), own=OWN_CAUSAL, against="best")
        yield Workload("masks", case, seqlen=seqlen, structure=structure, **options, **_SHAPE)
    for case, structure, seqlen, own in (
        ("documents, packed", "documents", 32768, OWN_VARLEN),
        ("secretly causal", "causal", 8192, OWN_CAUSAL),
    ):
        yield Workload("masks", case, seqlen=seqlen, structure=structure, own=own, against=own, **_SHAPE)


def blocks() -> Iterator[Workload]:
    """A 64th of the keys is 512 of them: a block as routers pick it, listed as four blocks of 128."""
    for head_dim in (64, 128):
        shape: dict[str, Any] = dict(batch=1, num_heads=16, head_dim=head_dim, seqlen=32768)
        for case, share, size, run in (
            ("8 of 64, runs of 512", 8 / 64, 128, 512),
            ("16 of 64, runs of 512", 16 / 64, 128, 512),
            ("64 of 64", 1.0, 128, 512),
            ("8 of 64, blocks of 128", 8 / 64, 128, 128),
            ("8 of 64, blocks of 64", 8 / 64, 64, 64),
        ):
            options: dict[str, Any] = dict(peers=("flex",), own=OWN_DENSE, against="best")
            yield Workload("blocks", case, blocks=BlockPattern(share, size, run), **options, **shape)
