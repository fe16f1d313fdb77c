"""A call for each path through the GPU backends: for each kernel of the plans, and for what their columns decide.

The plans need no GPU, so surface/test_plans_of_paths.py compares them with this table, and the table with the names of
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from support.cases import DIFFERENTIABLE, Case
from support.plans import (
    BF16,
    F32,
    F64,
    FROM_KEYS,
    KEY_STATIONARY,
    MATERIALISE_DS,
    MATERIALISE_P_DS,
    QUERY_STATIONARY,
    RECOMPUTE,
    SHORT_BIAS,
    SINGLE_TILE,
    TWO_PASS,
    WARP_SPECIALISED,
    Call,
)

STREAMING, WHOLE_HEADS, SPLIT_KV, BIAS_STATIONARY = "streaming", "whole heads", "split-KV", "bias-stationary"
FUSED, ROWS = "fused", "one warp per row, without tensor cores"
WITHOUT_EXTRAS = ("q", "k", "v")  # as the gradients that are wanted


@dataclass(frozen=True)
class Path:
    backend: str
    case: Case
    forward: dict  # fields of its plan
    backward: dict
    dtype: torch.dtype = BF16
    wanted: tuple[str, ...] = DIFFERENTIABLE  # of those that there are, which get gradients

    def __str__(self) -> str:
        wanted = "" if self.wanted == DIFFERENTIABLE else f"-d{'d'.join(self.wanted)}"
        return f"{self.backend}-{self.case}-{str(self.dtype).removeprefix('torch.')}{wanted}"

    def call(self) -> Call:
        """The same for plans. A GPU's are those of an H200 there."""
        case = self.case

        def shape(pattern: str | None) -> tuple[int, ...] | None:
            return None if pattern is None else case.pattern_shape(pattern)

        optional = {"bias": case.bias, "alibi_slopes": case.alibi, "sink": case.sink}
        intervals = blocks = None
        if case.intervals is not None:
            intervals = (*shape(f"{case.intervals}q1")[:3], 2 * case.num_intervals)
        if case.blocks is not None:
            blocks = (*shape(f"{case.blocks}11")[:2], -(-case.sq // case.block_sizes[0]))
        return Call(
            case.sq,
            case.sk,
            case.d,
            case.dv,
            case.batch,
            case.heads,
            case.kv_heads,
            self.dtype,
            bias=shape(case.bias),
            bias_dtype=F32 if case.bias_float32 else None,
            mask=shape(case.mask),
            intervals=intervals,
            block_lists=blocks,
            block_sizes=case.block_sizes,
            slopes=case.alibi is not None,
            sink=case.sink,
            wanted=tuple(name for name in self.wanted if optional.get(name, True)),
            options=case.options() | {"dropout_p": case.dropout_p, "backend": self.backend},
        )


def case(sq: int, sk: int | None = None, **more) -> Case:
    return Case(**{"sq": sq, "sk": sk or sq, "d": 64, "batch": 3, "heads": 8} | more)


def portable(of: Case, forward: str, backward: dict, **more) -> Path:
    return Path("sm80", of, dict(kernel=forward), backward, **more)


def hopper(of: Case, forward: dict, backward: dict, **more) -> Path:
    return Path("sm90", of, {"kernel": WARP_SPECIALISED} | forward, backward, **more)


def key_stationary(score_mode: str = "scale only", **more) -> dict:
    return dict(kernel=KEY_STATIONARY, score_mode=score_mode, **more)


def two_pass(score_mode: str = "scale only", **more) -> dict:
    return dict(kernel=TWO_PASS, score_mode=score_mode, **more)


TINY = dict(d=32, batch=512, heads=4)
WINDOWS = case(49, **TINY, bias="1hqk", mask="b1qk")  # of Swin
ROW_PAIRS = dict(d=32, batch=16, bias="1hqk", mask="b11k")  # of Evoformer
INTERVALS = dict(intervals="11", num_intervals=2, interval_rows=50)
CHUNKED = dict(d=128, batch=1, heads=2)
PORTABLE = [
    portable(case(700, 900, causal="bottom_right"), STREAMING, dict(kernel=RECOMPUTE, delta="within another kernel")),
    portable(case(100, batch=64), WHOLE_HEADS, dict(kernel=FUSED, tile=(32, 128))),
    portable(case(33, batch=256), STREAMING, dict(kernel=FUSED, tile=(32, 64))),
    portable(case(200, batch=64), STREAMING, dict(kernel=FUSED, tile=(32, 256))),
    portable(WINDOWS, BIAS_STATIONARY, dict(kernel=BIAS_STATIONARY, dbias="from the same dS")),
    portable(case(49, **TINY, bias="bhqk"), BIAS_STATIONARY, dict(kernel=BIAS_STATIONARY, dbias="from the same dS")),
    portable(case(49, **TINY), BIAS_STATIONARY, dict(kernel=BIAS_STATIONARY)),
    portable(case(16, d=128, batch=300, bias="1hqk"), BIAS_STATIONARY, dict(kernel=BIAS_STATIONARY)),
    portable(case(64, d=160), STREAMING, dict(kernel=BIAS_STATIONARY)),
    portable(case(1, 9000, d=128, kv_heads=2), SPLIT_KV, dict(kernel=MATERIALISE_DS, splits=11)),
    portable(case(100, 9000, batch=1), SPLIT_KV, dict(kernel=RECOMPUTE, splits=33)),
    portable(case(100, 9000, d=128, batch=1, mask="111k"), SPLIT_KV, dict(kernel=MATERIALISE_P_DS, splits=16)),
    portable(case(700, d=128), STREAMING, dict(kernel=MATERIALISE_DS, delta="by its own kernel")),
    portable(case(700, d=256), STREAMING, dict(kernel=MATERIALISE_P_DS, dq_score_mode="scale only")),
    portable(case(300, d=512), STREAMING, dict(kernel=RECOMPUTE, dq_score_mode="generic")),
    portable(case(300, d=576, dv=512), STREAMING, dict(kernel=RECOMPUTE, dq_score_mode="generic")),
    portable(case(700, mask="b1qk"), STREAMING, dict(kernel=MATERIALISE_P_DS, dq_score_mode="bias and mask")),
    portable(case(700, **INTERVALS), STREAMING, dict(kernel=MATERIALISE_P_DS, dq_score_mode="bias and mask")),
    portable(case(700, blocks="1h"), STREAMING, dict(kernel=MATERIALISE_P_DS, dq_score_mode="bias and mask")),
    portable(case(700, dropout_p=0.2, softcap=9.0), STREAMING, dict(kernel=MATERIALISE_DS, dkdv_score_mode="generic")),
    portable(
        case(700, alibi="h", sink=True),
        STREAMING,
        dict(kernel=MATERIALISE_DS, delta="by its own kernel, then exact for sums of dS"),
    ),
    portable(
        case(700, bias="1hqk"), STREAMING, dict(kernel=MATERIALISE_P_DS, dbias="from the materialised dS", launches=1)
    ),
    portable(case(700, bias="1h1k"), STREAMING, dict(kernel=MATERIALISE_P_DS, dbias="from recomputed dS")),
    portable(case(700, bias="bhq1"), STREAMING, dict(kernel=MATERIALISE_P_DS, dbias="from row sums")),
    portable(case(700, bias="1hqk"), STREAMING, dict(kernel=RECOMPUTE, dbias="from recomputed dS"), wanted=("bias",)),
    portable(case(4096, d=128, batch=8, heads=16), STREAMING, dict(kernel=MATERIALISE_DS, launches=2)),
    portable(case(700, kv_heads=2), STREAMING, dict(kernel=MATERIALISE_DS), dtype=F32),
    portable(case(300, d=256), STREAMING, dict(kernel=RECOMPUTE), dtype=F32),
    portable(case(200), ROWS, dict(kernel=ROWS), dtype=F64),
]
HOPPER = [
    hopper(case(2048), dict(score_mode="scale only", ping_pong=True), key_stationary(cyclic=True)),
    hopper(case(2048, d=96), dict(head_dims=(96, 96)), key_stationary(head_dims=(96, 96))),
    hopper(case(2048, d=128, causal="bottom_right"), {}, key_stationary(cyclic=False, pre_signals_dq=True)),
    hopper(
        case(2048, batch=1, heads=16, kv_heads=2, causal="bottom_right"), {}, key_stationary(group_shares=4, phases=1)
    ),
    hopper(case(3000, 77), dict(kernel=SINGLE_TILE), key_stationary(cyclic=True, group_shares=5)),
    hopper(case(1100, d=128, kv_heads=2, window=(100, 30)), dict(ping_pong=False), key_stationary()),
    hopper(case(197, batch=40, heads=12), dict(kernel=SINGLE_TILE), key_stationary(adds_statistics=False)),
    hopper(case(16, d=80, batch=300), dict(kernel=SINGLE_TILE), dict(kernel=BIAS_STATIONARY)),
    hopper(case(70, d=160), dict(kernel=SINGLE_TILE), two_pass()),
    hopper(case(2048, sink=True), {}, key_stationary()),
    hopper(case(1, 8192, d=128, kv_heads=2), dict(kernel=SPLIT_KV), key_stationary(phases=8, dq_accumulators=8)),
    hopper(case(41019, **CHUNKED), {}, key_stationary(query_chunks=2, phases=4)),
    hopper(case(41019, **CHUNKED, causal="top_left"), {}, key_stationary(query_chunks=2, cyclic=False)),
    hopper(
        case(41019, **CHUNKED | dict(heads=4), kv_heads=1, causal="top_left"),
        {},
        key_stationary(query_chunks=2, group_shares=4),
    ),
    hopper(case(2048, mask="b1qk"), dict(score_mode="mask"), key_stationary("mask", cyclic=True)),
    hopper(case(2048, mask="b11k", padding=True), dict(score_mode="mask"), key_stationary("mask")),
    hopper(case(2048, **INTERVALS), dict(score_mode="mask"), key_stationary("mask", cyclic=False)),
    hopper(case(2048, d=128, blocks="1h", block_sizes=(128, 128)), dict(score_mode="mask"), key_stationary("mask")),
    hopper(case(2048, softcap=9.0), dict(score_mode="softcap"), key_stationary("softcap")),
    hopper(case(2048, dropout_p=0.2), dict(score_mode="dropout"), key_stationary("dropout")),
    hopper(
        case(2048, alibi="h", causal="bottom_right"),
        dict(score_mode="ALiBi"),
        key_stationary("ALiBi"),
        wanted=WITHOUT_EXTRAS,
    ),
    hopper(
        case(2048, alibi="h", causal="bottom_right"),
        dict(score_mode="ALiBi"),
        key_stationary("ALiBi", slope_gradient=True),
    ),
    hopper(case(2048, alibi="h"), dict(score_mode="ALiBi"), key_stationary("ALiBi", cyclic=True)),
    hopper(case(300, 2500, d=128, alibi="h"), {}, two_pass("generic", slope_gradient=True)),
    hopper(
        case(2048, mask="b1qk", alibi="h"),
        dict(score_mode="ALiBi and mask"),
        key_stationary("ALiBi and mask"),
        wanted=WITHOUT_EXTRAS,
    ),
    hopper(
        case(2048, d=128, mask="b1qk", softcap=9.0),
        dict(score_mode="softcap and mask"),
        key_stationary("softcap and mask"),
    ),
    hopper(case(700, d=256, alibi="h"), {}, two_pass("generic without bias and mask", slope_gradient=True)),
    hopper(case(2048, bias="b11k"), dict(score_mode="key bias"), key_stationary("key bias"), wanted=WITHOUT_EXTRAS),
    hopper(case(2048, bias="1h1k"), dict(score_mode="key bias"), key_stationary("key bias", dbias=FROM_KEYS)),
    hopper(
        case(2048, d=128, bias="bh1k", bias_float32=True, causal="top_left"),
        dict(score_mode="key bias"),
        key_stationary("key bias", dbias=FROM_KEYS, delta="exact, by its own kernel"),
    ),
    hopper(
        case(2048, d=128, bias="bh1k", dropout_p=0.2),
        dict(score_mode="key bias and dropout"),
        key_stationary("key bias and dropout"),
        wanted=WITHOUT_EXTRAS,
    ),
    hopper(
        case(2048, mask="b11k", padding=True, dropout_p=0.2),
        dict(score_mode="mask and dropout"),
        key_stationary("key bias and dropout"),
    ),
    hopper(
        case(2048, d=128, mask="b1qk", dropout_p=0.2),
        dict(score_mode="mask and dropout"),
        key_stationary("mask and dropout"),
    ),
    hopper(
        case(700, bias="1hqk", dropout_p=0.2),
        dict(score_mode="bias, mask and dropout"),
        key_stationary("bias, mask and dropout", dbias="from dS recomputed over the batch"),
    ),
    hopper(
        case(2048, bias="1hqk"),
        dict(score_mode="bias and mask"),
        key_stationary("bias and mask"),
        wanted=WITHOUT_EXTRAS,
    ),
    hopper(
        case(2048, bias="1hqk", mask="b1qk"),
        dict(score_mode="bias and mask"),
        key_stationary("bias and mask"),
        wanted=WITHOUT_EXTRAS,
    ),
    hopper(
        case(1000, bias="1hqk", mask="b11k", dropout_p=0.2),
        dict(score_mode="bias, mask and dropout"),
        key_stationary("bias, mask and dropout", dbias="from dS recomputed over the batch"),
    ),
    hopper(
        case(136, batch=64, heads=16, bias="11qk"),
        {},
        key_stationary("bias and mask", dbias="from dS recomputed over the batch", dbias_splits=33),
    ),
    hopper(case(2048, d=256), dict(head_dims=(256, 256)), two_pass(launches=1)),
    hopper(case(2048, d=192, dv=128, causal="bottom_right"), dict(head_dims=(192, 128)), two_pass()),
    hopper(case(2048, d=512, batch=1, heads=4, kv_heads=1), dict(head_dims=(512, 256)), two_pass(head_dims=(576, 512))),
    hopper(
        case(2048, d=576, dv=512, batch=1, heads=4, kv_heads=1),
        dict(head_dims=(576, 256)),
        two_pass(head_dims=(576, 512)),
    ),
    hopper(case(16384, d=256, batch=1, kv_heads=1), {}, two_pass(query_chunks=4, key_chunks=False)),
    hopper(case(65536, d=256, batch=1, heads=1), {}, two_pass(query_chunks=4, key_chunks=True)),
    hopper(case(2048, d=256, mask="b1qk"), dict(score_mode="mask"), two_pass("mask")),
    hopper(case(2048, d=256, mask="b11k", softcap=9.0), dict(score_mode="generic"), two_pass("generic without bias")),
    hopper(case(2048, d=128, bias="1hqk"), {}, two_pass("bias and mask", dbias="from the materialised dS")),
    hopper(case(2048, bias="bhq1"), dict(score_mode="generic"), two_pass("generic", dbias="from row sums")),
    hopper(case(2048, d=128, sink=True), {}, two_pass("generic")),
    hopper(case(128, 4096, batch=1), dict(splits=8), dict(kernel=QUERY_STATIONARY, head_dims=(64, 64))),
    hopper(case(16, 16384, d=128, batch=1), dict(kernel=SPLIT_KV), dict(kernel=QUERY_STATIONARY, head_dims=(128, 128))),
    hopper(
        case(100, 1000, batch=20, mask="bhqk"),
        dict(score_mode="mask"),
        dict(kernel=QUERY_STATIONARY, score_mode="mask", head_dims=(64, 64)),
    ),
    hopper(
        case(32, 700, d=128, batch=20, mask="b11k"),
        dict(score_mode="mask"),
        dict(kernel=QUERY_STATIONARY, score_mode="mask", head_dims=(128, 128)),
    ),
    hopper(case(32, 1000, batch=20), dict(kernel=WARP_SPECIALISED), dict(kernel=QUERY_STATIONARY)),
    hopper(case(729, d=72, batch=1, heads=16), dict(tile=(128, 112)), key_stationary(head_dims=(96, 96))),
    hopper(case(256, **ROW_PAIRS), dict(kernel=SHORT_BIAS), dict(kernel=SHORT_BIAS, dbias_splits=4)),
]
PATHS = [*PORTABLE, *HOPPER]
