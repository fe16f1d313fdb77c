"""Workloads as models have them, and one long sequence: suites `workloads` and `long`.

No row holds a mask or a bias of all queries and keys of a long sequence, and FlexAttention takes part where others take
no part or need such a mask. Batches are so large that a call fills a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flash_attn_ext.cli.bench.feature_suites import SOFTCAP, gpt_oss
from flash_attn_ext.cli.bench.workload import (
    BATCH_MASK,
    EXPANDED_PADDING,
    FORGET_BIAS,
    FULL_BIAS,
    HEAD_BIAS,
    LOW_PADDING_BIAS,
    PADDING_BIAS,
    PADDING_MASK,
    Workload,
)

FUSED = ("flash", "efficient", "cudnn")
OF_LONG = ("flash", "cudnn", "fa3", "fa4")
OF_BIASES = ("efficient", "cudnn", "math", "flex")  # the unfused one too, since it is what such models run
LLAMA: dict[str, Any] = dict(batch=1, num_heads=32, num_key_heads=8, head_dim=128)
CAUSAL: dict[str, Any] = dict(causal=True)


def workloads() -> Iterator[Workload]:
    """Head dim 64 comes first, as `--quick` takes that of the first row."""
    yield from _encoders()
    yield from _with_biases()
    yield from _images()
    yield from _few_queries()
    yield from _decoders()
    yield from gpt_oss("workloads")


def _with_biases() -> Iterator[Workload]:
    """A relative position bias that is trained, and a mask. Swin has 49 tokens in a window, and Evoformer's rows have
    256 residues."""
    trained: dict[str, Any] = dict(bias=HEAD_BIAS, extras_need_grad=True)
    yield _row("Swin windows", (4096, 6, 49, 32), OF_BIASES, mask=BATCH_MASK, **trained)
    # timm adds the mask of shifted windows to the bias, so that each window has its own. A Graphormer's bias is of the
    # pairs of a graph's nodes.
    own: dict[str, Any] = trained | dict(bias=FULL_BIAS)
    yield _row("Swin, shifted windows", (4096, 6, 49, 32), ("efficient", "math"), **own)
    yield _row("Graphormer", (64, 32, 64, 24), ("efficient", "math"), **own)
    yield _row("Evoformer rows", (256, 4, 256, 32), OF_BIASES, mask=PADDING_MASK, **trained)
    yield _row("T5-XL", (8, 32, 512, 64), OF_BIASES, **trained)
    yield _row("T5, dropout", (8, 12, 512, 64), ("efficient", "math"), dropout_p=0.1, **trained)


def _encoders() -> Iterator[Workload]:
    yield _row("BERT, padding", (32, 12, 512, 64), ("efficient", "cudnn", "flex"), mask=PADDING_MASK)
    # What transformers' BERT passes in training.
    expanded: dict[str, Any] = dict(mask=EXPANDED_PADDING, dropout_p=0.1)
    yield _row("BERT, padding, dropout", (32, 12, 512, 64), ("efficient", "cudnn"), **expanded)
    # Padding as nn.MultiheadAttention adds it to scores, and as older models do.
    added: dict[str, Any] = dict(bias=PADDING_BIAS)
    yield _row("BERT, added padding", (32, 12, 512, 64), ("efficient", "cudnn"), **added)
    yield _row("BERT, added padding, dropout", (32, 12, 512, 64), ("efficient", "cudnn"), dropout_p=0.1, **added)
    yield _row("BERT, low padding", (32, 12, 512, 64), ("efficient", "cudnn"), bias=LOW_PADDING_BIAS)
    yield _row("Encoder, added padding", (8, 16, 2048, 128), ("efficient", "cudnn"), **added)
    yield _row("BERT, short", (64, 12, 128, 64), FUSED)
    slopes: dict[str, Any] = dict(has_alibi=True)
    yield _row("Jina embeddings", (4, 12, 2048, 64), ("flex", "efficient", "cudnn"), **slopes)
    yield _row("Jina, padding", (16, 12, 512, 64), ("flex", "efficient", "cudnn"), mask=PADDING_MASK, **slopes)
    yield _row("Whisper", (8, 20, 1500, 64), FUSED)


def _images() -> Iterator[Workload]:
    yield _row("ViT-B", (64, 12, 197, 64), FUSED)
    yield _row("SigLIP", (32, 16, 729, 72), FUSED)
    yield _row("ViT-H", (32, 16, 257, 80), FUSED)
    yield _row("SD 1.5, outer", (8, 8, 4096, 40), FUSED)
    yield _row("SD 1.5, middle", (8, 8, 64, 160), FUSED)
    yield _row("SD 1.5, text of 77", (8, 8, 1024, 80), FUSED, seqlen_k=77)
    yield _row("AnimateDiff", (2048, 8, 16, 80), FUSED)  # the 16 frames at each of 2 x 32 x 32 places
    yield _row("SDXL", (4, 10, 4096, 64), FUSED)
    yield _row("SDXL, text of 77", (4, 10, 4096, 64), FUSED, seqlen_k=77)
    # The padding of a prompt is hidden.
    padded: dict[str, Any] = dict(seqlen_k=300, mask=PADDING_MASK)
    yield _row("PixArt, text of 300", (4, 16, 4096, 72), ("efficient", "cudnn"), **padded)
    yield _row("Flux", (1, 24, 4608, 128), (*FUSED, "fa3", "fa4"))
    yield _row("Wan 2.1", (1, 12, 32760, 128), OF_LONG)
    yield _row("Wan 2.1, text of 512", (1, 12, 32760, 128), OF_LONG, seqlen_k=512)
    yield _row("SegFormer", (8, 1, 16384, 64), FUSED, seqlen_k=256)  # its first stage, whose keys are pooled


def _few_queries() -> Iterator[Workload]:
    yield _row("Q-Former", (64, 12, 32, 64), FUSED, seqlen_k=257)
    yield _row("Perceiver", (4, 8, 256, 64), FUSED, seqlen_k=16384)
    yield _row("Whisper, text", (1, 20, 448, 64), FUSED, seqlen_k=1500)
    padded: dict[str, Any] = dict(mask=PADDING_MASK)
    yield _row("Resampler, padding", (64, 8, 32, 64), ("efficient", "cudnn"), seqlen_k=1500, **padded)
    yield _row("DETR, padding", (8, 8, 100, 32), ("efficient", "cudnn"), seqlen_k=850, **padded)
    options: dict[str, Any] = dict(seqlen=1, seqlen_k=8192, peers=("flash", "cudnn", "flex"), passes=("forward",))
    yield Workload("workloads", "decode, 16 x 8k", against="best", **LLAMA | dict(batch=16), **options)


def _decoders() -> Iterator[Workload]:
    yield _row("GPT-2", (8, 12, 1024, 64), (*FUSED, "fa3", "fa4"), **CAUSAL)
    yield _row("GPT-2, dropout", (8, 12, 1024, 64), FUSED, dropout_p=0.1, **CAUSAL)
    yield _row("DeepSeek", (1, 16, 8192, 192), OF_LONG, head_dim_v=128, **CAUSAL)
    absorbed: dict[str, Any] = dict(num_key_heads=1, head_dim_v=512)
    yield _row("DeepSeek MLA absorbed", (1, 128, 4096, 576), ("efficient",), **absorbed, **CAUSAL)
    yield _row("Gemma 2", (1, 16, 4096, 256), ("flex", "fa3", "fa4"), num_key_heads=8, softcap=SOFTCAP, **CAUSAL)
    capped: dict[str, Any] = dict(num_key_heads=8, softcap=SOFTCAP, mask=PADDING_MASK)
    yield _row("Gemma 2, padding", (2, 16, 4096, 256), ("flex",), **capped, **CAUSAL)
    yield _row("Gemma 4", (1, 16, 4096, 512), ("efficient", "flex"), num_key_heads=4, **CAUSAL)
    yield _row("MPT", (4, 32, 2048, 128), ("flex", "efficient", "cudnn"), has_alibi=True, **CAUSAL)
    trained: dict[str, Any] = dict(has_alibi=True, extras_need_grad=True, passes=("backward",))
    yield _row("MPT, slopes", (4, 32, 2048, 128), ("flex",), **trained, **CAUSAL)
    gates: dict[str, Any] = dict(bias=FORGET_BIAS, extras_need_grad=True)
    yield _row("Forgetting Transformer", (1, 16, 8192, 128), ("flex",), **gates, **CAUSAL)
    common: dict[str, Any] = dict(against="best", **LLAMA, **CAUSAL)
    for seqlen in (8192, 32768, 131072):
        yield Workload("workloads", "Llama 8B", seqlen=seqlen, peers=OF_LONG, **common)
    # Mistral's window has 4096 keys, the query's own among them.
    yield Workload("workloads", "Mistral", seqlen=32768, window=(4095, 0), peers=("flex", "fa3", "fa4"), **common)
    packed: dict[str, Any] = dict(seqlen=4096, lengths=(4096,) * 8, peers=("varlen_attn", "flex"))
    yield Workload("workloads", "8 documents", **packed, **common)


def long() -> Iterator[Workload]:
    """One sequence, with 1024 channels at every head dim. Time should grow as its square."""
    for head_dim in (64, 128, 256):
        for case, options in (("full", {}), ("causal", CAUSAL)):
            for seqlen in (16384, 65536, 131072):
                shape: dict[str, Any] = dict(num_heads=1024 // head_dim, seqlen=seqlen, head_dim=head_dim)
                yield Workload("long", case, batch=1, peers=OF_LONG, against="best", **shape, **options)


def _row(case: str, shape: tuple[int, int, int, int], peers: tuple[str, ...], **options) -> Workload:
    """`shape`: batch, heads, queries and head dim."""
    return Workload("workloads", case, *shape, peers=peers, against="best", **options)
