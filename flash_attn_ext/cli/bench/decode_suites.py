"""Few queries at the end of many keys, as text generation has them: suites `decode` and `decode_host`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flash_attn_ext.cli.bench.workload import PADDING_MASK, Workload

FUSED = ("cudnn", "flash", "efficient")
ONE_QUERY, CONTIGUOUS, ATTENTION = "1 query", "contiguous", "attention"  # names of our own other calls
CACHE, APPEND = "cache", "append"  # attention_with_kvcache, without and with new keys; else attention()
NO_BOTTOM_RIGHT = ("cudnn",)  # peers that have no such causality: they attend to all keys


@dataclass(frozen=True)
class DecodeWorkload(Workload):
    """`seqlen` queries of each sequence, the last of which sees all `seqlen_k` keys."""

    causal: bool = True
    passes: tuple[str, ...] = ("forward",)
    entry: str | None = None  # CACHE or APPEND
    page_size: int | None = None  # of a paged cache, its pages in random order

    @property
    def is_host_time(self) -> bool:
        return self.suite == "decode_host"

    @property
    def in_microseconds(self) -> bool:
        return True

    @property
    def cache_bytes(self) -> int:
        """The bytes of all keys and values, each of which has to be read once."""
        return self.batch * self.key_heads * self.num_keys * (self.head_dim + self.dim_v) * self.dtype.itemsize

    @property
    def non_causal_peers(self) -> tuple[str, ...]:
        """The peers without such causality. They also attend to the keys after all queries but the last."""
        return tuple(name for name in self.peers if name in NO_BOTTOM_RIGHT) if self.seqlen > 1 else ()

    def amounts(self, pass_: str) -> dict[str, float]:
        return {} if self.is_host_time else {"tbs": self.cache_bytes * 1e-12}


def decode() -> Iterator[DecodeWorkload]:
    plain: dict[str, Any] = dict(num_heads=32, head_dim=128, peers=(*FUSED, "fa3"), against="best")
    base: dict[str, Any] = dict(num_key_heads=8, **plain)
    shapes = [(1, 4), (1, 32), (1, 128), (16, 8), (64, 8)]  # sequences, keys / 1024
    for queries in (1, 8):
        own: dict[str, Any] = dict(own=ONE_QUERY) if queries > 1 else {}
        for batch, kilokeys in shapes:
            yield _workload(batch, kilokeys, seqlen=queries, **own, **base)
    yield _workload(1, 32, seqlen=256, own=ONE_QUERY, **base)
    yield _workload(16, 8, "MHA", num_key_heads=32, **plain)
    yield _workload(16, 8, "MQA", num_key_heads=1, **plain)
    absorbed: dict[str, Any] = dict(plain, num_key_heads=1, head_dim=576, head_dim_v=512, peers=("efficient",))
    for heads in (16, 128):
        yield _workload(4, 8, f"MLA {heads} heads", **(absorbed | dict(num_heads=heads)), in_goal=False)
    others: tuple[dict[str, Any], ...] = (dict(head_dim=64), dict(head_dim=256), dict(dtype=torch.float16))
    for other in others:
        yield _workload(16, 8, **(base | other))
    # Static caches of transformers, which repeats key heads where it has a mask.
    for batch, head_dim in ((1, 64), (16, 128)):
        masked: dict[str, Any] = dict(plain, num_key_heads=32, head_dim=head_dim, peers=FUSED, mask=PADDING_MASK)
        yield _workload(batch, 8, "masked", **masked)
    for batch, kilokeys in ((1, 32), (16, 8), (64, 8)):
        yield from _caches(batch, kilokeys, dict(base, peers=("fa3",)))
    # Drafts of speculative decoding, and chunks of a prompt.
    for batch, kilokeys, queries in ((8, 4, 16), (8, 4, 64), (1, 8, 512), (1, 32, 2048)):
        yield from _caches(batch, kilokeys, dict(base, peers=("fa3",), seqlen=queries))


def decode_host() -> Iterator[DecodeWorkload]:
    """Calls so small that launching them takes longer than running them."""
    common: dict[str, Any] = dict(
        batch=1, num_heads=32, num_key_heads=8, seqlen=1, seqlen_k=128, head_dim=128, against="torch sdpa"
    )
    for entry in (None, CACHE, APPEND):
        case = "attention" if entry is None else f"with_kvcache, {entry}"
        yield DecodeWorkload("decode_host", case, entry=entry, peers=("torch sdpa",), **common)


def decode_on_cpu() -> Iterator[DecodeWorkload]:
    common: dict[str, Any] = dict(num_heads=8, num_key_heads=2, head_dim=64, dtype=torch.float32)
    options: dict[str, Any] = dict(peers=("torch sdpa",), against="torch sdpa")
    yield _workload(1, 4, **options, **common)
    yield _workload(1, 4, seqlen=8, own=ONE_QUERY, **options, **common)
    yield _workload(4, 4, **options, **common)
    yield from _caches(4, 4, common)


def _workload(batch: int, kilokeys: int, what: str = "", seqlen: int = 1, **options) -> DecodeWorkload:
    case = f"B{batch} {kilokeys}k {what}".rstrip()
    return DecodeWorkload("decode", case, batch, seqlen=seqlen, seqlen_k=1024 * kilokeys, **options)


def _caches(batch: int, kilokeys: int, common: dict) -> Iterator[DecodeWorkload]:
    """Paged caches are compared with a contiguous one of the same keys, and that with attention() on its tensors."""
    options: dict[str, Any] = common | dict(own=ATTENTION, against=ATTENTION, entry=CACHE, in_goal=False)
    queries = f"{common['seqlen']} queries " if "seqlen" in common else ""
    contiguous = _workload(batch, kilokeys, queries + CACHE, **options)
    yield contiguous
    for page in (16, 64, 256):
        case = f"B{batch} {kilokeys}k {queries}page {page}"
        yield dataclasses.replace(contiguous, case=case, page_size=page, own=CONTIGUOUS, against=CONTIGUOUS)
