"""The suites, each as a list of workloads to time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import torch

from flash_attn_ext.cli.bench.decode_suites import decode, decode_host, decode_on_cpu
from flash_attn_ext.cli.bench.feature_suites import alibi, alibi_on_cpu, sinks, softcap, softcap_on_cpu
from flash_attn_ext.cli.bench.mask_suites import blocks, masks
from flash_attn_ext.cli.bench.model_suites import long, workloads
from flash_attn_ext.cli.bench.table_suites import bias_table
from flash_attn_ext.cli.bench.workload import (
    DIRECT,
    HEAD_BIAS,
    OWN_VARLEN,
    PADDING_MASK,
    SQUARE_BIAS,
    SQUARE_MASK,
    Workload,
)

FUSED = ("flash", "efficient", "cudnn")
PACKAGES = ("fa3", "fa4", "fa4 deterministic")  # take part if they can be imported
SHORT_SHAPES = ((64, 256, 8), (128, 64, 12), (197, 8, 16), (577, 16, 12), (1000, 2, 16))  # tokens, batch, heads


def grid() -> Iterator[Workload]:
    """Every point has the same number of tokens and the same number of channels."""
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in (512, 2048, 8192, 16384):
                yield Workload(
                    "grid",
                    "causal" if causal else "full",
                    batch=16384 // seqlen,
                    num_heads=2048 // head_dim,
                    seqlen=seqlen,
                    head_dim=head_dim,
                    causal=causal,
                    peers=("flash", "cudnn", *PACKAGES),
                    against="flash",
                )


def mask() -> Iterator[Workload]:
    shape: dict[str, Any] = dict(batch=2, num_heads=16, seqlen=4096, head_dim=128)
    common: dict[str, Any] = dict(peers=("efficient", "cudnn"), own="plain", against="efficient", **shape)
    yield Workload("mask", "bool [S,S]", mask=SQUARE_MASK, **common)
    yield Workload("mask", "bias [1,H,S,S]", bias=HEAD_BIAS, **common)
    yield Workload("mask", "bias with grad", bias=HEAD_BIAS, extras_need_grad=True, **common)
    yield Workload("mask", "padding [B,1,1,S]", mask=PADDING_MASK, in_goal=False, **common)
    packed: dict[str, Any] = dict(own=OWN_VARLEN, against=OWN_VARLEN, in_goal=False, passes=("forward",))
    yield Workload("mask", "padding, packed", mask=PADDING_MASK, **packed, **shape)
    large: dict[str, Any] = common | dict(num_heads=8, head_dim=256, in_goal=False)
    yield Workload("mask", "bool [S,S]", mask=SQUARE_MASK, **large)
    yield Workload("mask", "padding [B,1,1,S]", mask=PADDING_MASK, **large)


def float32() -> Iterator[Workload]:
    for head_dim in (64, 128):
        yield Workload(
            "float32", "full", 2, 16, 4096, head_dim, dtype=torch.float32, peers=("efficient",), against="efficient"
        )


def dropout() -> Iterator[Workload]:
    """Our call is compared with our own call without dropout. The peers drop as many weights."""
    common: dict[str, Any] = dict(seqlen=4096, dropout_p=0.1, peers=FUSED, own="plain", against="plain")
    yield Workload("dropout", "0.1", 2, 16, head_dim=128, **common)
    yield Workload("dropout", "0.1", 2, 8, head_dim=256, in_goal=False, **common)


def head_dims() -> Iterator[Workload]:
    common: dict[str, Any] = dict(batch=2, num_heads=16, seqlen=4096)
    for head_dim in (40, 72, 80, 96, 160, 192):
        yield Workload(
            "head_dims", "causal", head_dim=head_dim, causal=True, peers=("flash", "cudnn"), against="flash", **common
        )
    unusual: dict[str, Any] = dict(against="best", in_goal=False, **common)
    yield Workload("head_dims", "causal", head_dim=512, causal=True, peers=FUSED, **unusual)
    peers = (*FUSED, *PACKAGES)
    yield Workload("head_dims", "causal", head_dim=192, head_dim_v=128, causal=True, peers=peers, **unusual)
    yield Workload("head_dims", "full", head_dim=128, head_dim_v=256, peers=FUSED, **unusual)
    for head_dim in (72, 88, 104, 120):  # whose rows are not a multiple of 32 bytes (a sector)
        yield Workload("head_dims", "full", head_dim=head_dim, peers=("flash", "cudnn"), **unusual)
    for head_dim, batch, seqlen in ((72, 1, 729), (72, 32, 729), (72, 32, 256), (88, 32, 257)):  # images
        images: dict[str, Any] = dict(head_dim=head_dim, batch=batch, num_heads=16, seqlen=seqlen)
        yield Workload("head_dims", "full", peers=("flash", "cudnn"), against="best", in_goal=False, **images)
    longer: dict[str, Any] = unusual | dict(seqlen=8192, head_dim=192, head_dim_v=128, peers=("cudnn", *PACKAGES))
    yield Workload("head_dims", "full", **longer)
    yield Workload("head_dims", "causal", causal=True, **longer)


def short() -> Iterator[Workload]:
    """The suite's mean is for sequences of a few tiles. The longer ones are here for their partial last tile."""
    for seqlen, batch, heads in SHORT_SHAPES:
        options: dict[str, Any] = dict(peers=(*FUSED, "math"), against="best", in_goal=seqlen < 512)
        yield Workload("short", "full", batch, heads, seqlen, 64, **options)


def in_a_row() -> Iterator[Workload]:
    """Short calls as a model makes them: behind other work of the stream, on data that was just written. A single call
    between two events, in contrast, includes a launch that nothing hides."""
    for seqlen, batch, heads in SHORT_SHAPES:
        yield Workload("in_a_row", "full", batch, heads, seqlen, 64, peers=FUSED, against="best", calls=12)


def encoders() -> Iterator[Workload]:
    """Many heads of few tokens, as encoders of text and images have in a batch, and images that attend to a text."""
    common: dict[str, Any] = dict(num_heads=12, head_dim=64, peers=FUSED, against="best")
    for seqlen in (128, 256):
        yield Workload("encoders", "padding", 64, seqlen=seqlen, mask=PADDING_MASK, **common)
    for seqlen in (197, 256):
        yield Workload("encoders", "full", 64, seqlen=seqlen, **common)
    yield Workload("encoders", "text of 77", 8, seqlen=4096, seqlen_k=77, **(common | dict(num_heads=10)))


def few_queries() -> Iterator[Workload]:
    """Cross-attention, latents and prefixes have few queries, which all see far more keys."""
    for batch, heads, seqlen, kilokeys, head_dim in (
        (1, 16, 128, 4, 128),
        (1, 16, 128, 32, 128),
        (4, 16, 64, 8, 128),
        (8, 16, 128, 8, 64),
        (2, 8, 16, 16, 64),
        (16, 16, 128, 2, 64),
    ):
        options: dict[str, Any] = dict(seqlen_k=1024 * kilokeys, peers=FUSED, against="best")
        yield Workload("few_queries", f"{kilokeys}k keys", batch, heads, seqlen, head_dim, **options)


def varlen() -> Iterator[Workload]:
    rng = random.Random(0)
    lengths = tuple(rng.randint(256, 8192) for _ in range(16))
    yield Workload(
        "varlen",
        "16 ragged causal",
        1,
        16,
        max(lengths),
        128,
        causal=True,
        lengths=lengths,
        peers=("varlen_attn", "flex"),
        against="varlen_attn",
    )


def window() -> Iterator[Workload]:
    """Our time is compared with our own without a window, to show how much of the masked work is saved."""
    for head_dim in (64, 128):
        common: dict[str, Any] = dict(
            batch=2, num_heads=2048 // head_dim, seqlen=8192, head_dim=head_dim, own="full", against="full"
        )
        yield Workload("window", "causal", causal=True, peers=("flash", "flex"), **common)
        common["peers"] = ("flex",)
        yield Workload("window", "window 512", window=(512, 512), **common)
        yield Workload("window", "causal window 512", causal=True, window=(512, 0), in_goal=False, **common)


def gqa() -> Iterator[Workload]:
    """All but the first materialise more P and dS than fit a launch of the backward pass."""
    options: dict[str, Any] = dict(causal=True, peers=("flash", "cudnn"), against="flash")
    yield Workload("gqa", "32/8 heads causal", 2, 32, 4096, 128, num_key_heads=8, **options)
    yield Workload("gqa", "16/2 heads causal", 1, 16, 8192, 256, num_key_heads=2, **options)
    yield Workload("gqa", "16/2 heads causal", 1, 16, 16384, 256, num_key_heads=2, **options)
    yield Workload("gqa", "8/8 heads causal", 1, 8, 32768, 256, **options)


def host() -> Iterator[Workload]:
    """A call that is so small that launching it takes longer than running it."""
    peers = ("torch sdpa", *FUSED, "math")
    passes = ("forward", "forward+backward")
    yield Workload("host", "small call", 1, 8, 128, 64, peers=peers, against="torch sdpa", passes=passes)


def switch() -> Iterator[Workload]:
    """PyTorch's function with our operators behind torch.nn.attention is compared with our direct call."""
    options: dict[str, Any] = dict(own=DIRECT, against=DIRECT, passes=("forward", "forward+backward"))
    yield Workload("switch", "small call", 1, 8, 128, 64, **options)


def switch_on_cpu() -> Iterator[Workload]:
    """There is also a call with one query and one key, which has almost nothing to compute."""
    for load in switch():
        for case, heads, seqlen in ((load.case, load.num_heads, load.seqlen), ("one key", 1, 1)):
            yield dataclasses.replace(load, case=case, num_heads=heads, seqlen=seqlen, dtype=torch.float32)


def cpu() -> Iterator[Workload]:
    options: dict[str, Any] = dict(peers=("torch sdpa",), against="torch sdpa", passes=("forward", "forward+backward"))
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in (64, 128):
            common: dict[str, Any] = dict(batch=1, num_heads=8, seqlen=2048, head_dim=head_dim, dtype=dtype, **options)
            yield Workload("cpu", "full", **common)
            yield Workload("cpu", "causal", causal=True, own="full", **common)
            yield Workload("cpu", "window 256", window=(256, 256), own="full", **common)
            yield Workload("cpu", "bool mask", mask=SQUARE_MASK, **common)
            yield Workload("cpu", "float bias", bias=SQUARE_BIAS, **common)


def few_keys() -> Iterator[Workload]:
    """Images that attend to a text, a few latents or one key, and batches of small sets."""
    options: dict[str, Any] = dict(peers=("torch sdpa",), against="torch sdpa")
    for dtype in (torch.float32, torch.bfloat16):
        for batch, heads, seqlen, num_keys, head_dim in (
            (1, 8, 256, 1, 64),
            (64, 8, 256, 1, 32),
            (1, 8, 256, 2, 64),
            (8, 12, 256, 4, 64),
            (8, 20, 256, 16, 128),
            (8, 8, 256, 77, 128),
            (2, 10, 4096, 77, 64),
            (2, 20, 1024, 77, 64),
            (512, 8, 3, 3, 64),
            (64, 8, 16, 16, 64),
            (64, 8, 50, 50, 64),
            (64, 12, 80, 80, 64),
        ):
            case = f"{num_keys} key" + "s" * (num_keys > 1)
            # dQ and dK of one key are 0: exactly in ours, but for rounding in PyTorch's.
            passes = ("forward",) if num_keys == 1 else ("forward", "forward+backward")
            shape: dict[str, Any] = dict(seqlen_k=num_keys, dtype=dtype, passes=passes)
            yield Workload("few_keys", case, batch, heads, seqlen, head_dim, **shape, **options)


def _named(*suites) -> dict[str, tuple[Workload, ...]]:
    return {suite.__name__: tuple(suite()) for suite in suites}


SUITES: dict[str, dict[str, tuple[Workload, ...]]] = {
    "cuda": _named(
        grid,
        mask,
        masks,
        blocks,
        float32,
        dropout,
        head_dims,
        short,
        in_a_row,
        encoders,
        few_queries,
        varlen,
        window,
        gqa,
        host,
        switch,
        decode,
        decode_host,
        softcap,
        alibi,
        sinks,
        bias_table,
        workloads,
        long,
    ),
    "cpu": {
        **_named(cpu, few_keys, decode_host),
        "switch": tuple(switch_on_cpu()),
        "decode": tuple(decode_on_cpu()),
        "softcap": tuple(softcap_on_cpu()),
        "alibi": tuple(alibi_on_cpu()),
    },
}
ABOUT = {
    "grid": "long sequences at head dims 64, 128 and 256, full and causal, in TFLOP/s",
    "mask": "boolean masks, padding masks and biases, with and without a gradient",
    "blocks": "lists of blocks at 32768 tokens, of 8 of 64 blocks of keys and more; FLOPs count listed pairs, and rows "
    "say which share of the TFLOP/s of our dense call that is",
    "masks": "documents, images, prefixes, chunks and the like, as intervals of keys; FLOPs count visible pairs, and "
    "TFLOP/s compare with those of our own causal call",
    "float32": "float32 inputs, with GEMMs in float32 precision",
    "dropout": "dropout of 0.1",
    "head_dims": "head dims from 40 to 512, and different ones of q and v",
    "short": "64 to 1000 tokens, each call on its own",
    "in_a_row": "the calls of short, twelve behind each other as in a model",
    "encoders": "many heads of few tokens, as encoders of text and images have them",
    "few_queries": "64 to 128 queries that see far more keys",
    "varlen": "packed sequences of different lengths",
    "window": "sliding windows and causality, beside our own call without them",
    "gqa": "grouped query heads, and sequences of up to 32768 tokens",
    "host": "host time of small calls",
    "switch": "host time through PyTorch's own switch, beside our direct call",
    "decode": "few queries at the end of a key-value cache, contiguous and paged",
    "decode_host": "host time of such calls",
    "softcap": "scores capped by tanh, causal",
    "alibi": "ALiBi, causal, also with a gradient of the slopes",
    "sinks": "attention sinks, causal and with a window, also with a gradient of the sinks",
    "bias_table": "relative biases of T5 and Swin from a trained table",
    "workloads": "workloads as models have them",
    "long": "one sequence of 16384 to 131072 tokens",
    "cpu": "2048 tokens in float32 and bfloat16, with masks, a bias and a window",
    "few_keys": "many queries that see 1 to 80 keys",
}


def quick(workloads: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """The workloads of the suite's first head dimension."""
    return tuple(workload for workload in workloads if workload.head_dim == workloads[0].head_dim)
