"""Which backward kernels each call takes, at each border between them. Plans need no GPU (test_plans.py)."""

import re

import pytest

from support.host_programs import CSRC
from support.plans import (
    F16,
    F32,
    F64,
    FROM_KEYS,
    KEY_STATIONARY,
    MATERIALISE_DS,
    MATERIALISE_P_DS,
    QUERY_STATIONARY,
    RECOMPUTE,
    SHORT_BIAS,
    TWO_PASS,
    Call,
    label,
    mismatches,
)

# Sequences so long that no portable kernel is faster.
LONG = 2048


def hopper(options: dict | None = None, sq: int = LONG, **more) -> Call:
    return Call(sq, options={"backend": "sm90"} | (options or {}), **more)


SQUARE = (1, 16, LONG, LONG)
MASK_AS_BIAS, KEYS_BEFORE_PADDING = "mask as a bias", "keys before padding"
FLOAT32_BIAS = "float32 copy of the bias"
WITH_BIAS = ("q", "k", "v", "bias")
WITH_SLOPES = ("q", "k", "v", "alibi_slopes")
SHARED = "within another kernel"
EXACT = "exact, by its own kernel"
THEN_EXACT = f"{SHARED}, then exact for sums of dS"
WITH_SINK = ("q", "k", "v", "sink")
UNWANTED = "unrequested gradient"
BACKWARD_SM90 = [
    # Kernels for all gradients where one is not asked for, unless that of q alone is as fast.
    (
        hopper(wanted=("k", "v"), key_heads=4, dv=32),
        dict(kernel=KEY_STATIONARY, workspace={UNWANTED: 8 * 16 * LONG * 64 * 2}),
    ),
    (hopper(wanted=("v",), sq=256), dict(portable=True, workspace={UNWANTED: 0})),
    (hopper(wanted=("v",), sq=257), dict(kernel=KEY_STATIONARY)),
    (hopper(wanted=("k",), sq=32, sk=4096), dict(portable=False)),
    (hopper(wanted=("q", "k")), dict(kernel=KEY_STATIONARY, workspace={UNWANTED: 0})),
    (hopper(wanted=("q",)), dict(portable=True, workspace={UNWANTED: 0})),
    (hopper(wanted=("q",), mask=SQUARE), dict(kernel=KEY_STATIONARY)),
    (
        hopper(wanted=("q",), d=128, key_heads=4, dv=96),
        dict(kernel=KEY_STATIONARY, workspace={UNWANTED: 8 * 4 * LONG * 96 * 2}),
    ),
    (hopper(wanted=("q",), d=128, sk=1023), dict(portable=True)),
    (hopper({"causal": "top_left"}, wanted=("q",), d=128), dict(kernel=KEY_STATIONARY)),
    (hopper({"causal": "top_left"}, wanted=("q",), d=128, sq=2047), dict(portable=True)),
    (hopper(wanted=("q",), d=128, sk=8 * LONG + 1), dict(portable=True)),
    (hopper(wanted=("q",), d=256, sq=256), dict(portable=True)),
    (hopper(wanted=("q",), d=256, sq=257), dict(kernel=TWO_PASS)),
    (hopper(wanted=("q", "bias"), bias=SQUARE, d=128), dict(kernel=TWO_PASS, dbias="from the materialised dS")),
    (hopper(), dict(kernel=KEY_STATIONARY, head_dims=(64, 64), tile=(64, 128))),
    (
        hopper(mask=SQUARE),
        dict(kernel=KEY_STATIONARY, score_mode="mask", head_dims=(64, 64), tile=(64, 128), cyclic=True),
    ),
    (hopper(mask=SQUARE, d=72), dict(kernel=KEY_STATIONARY, score_mode="mask", head_dims=(96, 96), tile=(64, 128))),
    (hopper(d=40, dv=104), dict(kernel=KEY_STATIONARY, head_dims=(128, 128), tile=(64, 128))),
    (hopper(bias=SQUARE), dict(kernel=KEY_STATIONARY, score_mode="bias and mask", head_dims=(64, 64), tile=(64, 128))),
    (
        hopper(mask=(1, 1, 1, LONG), d=128),
        dict(kernel=KEY_STATIONARY, score_mode="mask", head_dims=(128, 128), tile=(64, 128)),
    ),
    (
        hopper(mask=(1, 1, 1, 8 * LONG), sk=8 * LONG),
        dict(kernel=KEY_STATIONARY, score_mode="mask", head_dims=(64, 64), tile=(64, 128)),
    ),
    # Two-pass: a mask or bias with more keys for each query, one that has a gradient, what else changes scores.
    (
        hopper(mask=(1, 1, 1, 8 * LONG + 1), sk=8 * LONG + 1),
        dict(kernel=TWO_PASS, score_mode="mask", head_dims=(64, 64)),
    ),
    (
        hopper(mask=(1, 1, LONG, 1)),
        dict(score_mode="generic", head_dims=(64, 64)),
    ),  # its packed bits would be larger than it is
    (
        hopper(bias=SQUARE, wanted=WITH_BIAS, d=128),
        dict(kernel=TWO_PASS, score_mode="bias and mask", head_dims=(128, 128)),
    ),
    (
        hopper(bias=(1, 1, LONG, 8 * LONG + 8), sk=8 * LONG + 8),
        dict(kernel=TWO_PASS, score_mode="bias and mask", head_dims=(64, 64)),
    ),
    (hopper(bias=SQUARE, bias_dtype=F32), dict(kernel=TWO_PASS, score_mode="generic", head_dims=(64, 64))),
    *((hopper({"softcap": 9.0}, d=d), dict(kernel=KEY_STATIONARY, score_mode="softcap")) for d in (40, 64, 80, 128)),
    (hopper({"softcap": 9.0, "causal": "top_left", "scale": -1.0}), dict(kernel=KEY_STATIONARY, score_mode="softcap")),
    (hopper({"softcap": 9.0}, d=96), dict(kernel=KEY_STATIONARY, pre_signals_dq=True, head_dims=(96, 96))),
    (hopper({"softcap": 9.0}, d=136), dict(kernel=TWO_PASS)),
    (hopper({"softcap": 9.0, "dropout_p": 0.1}), dict(kernel=TWO_PASS, score_mode="generic")),
    *(
        (hopper({"softcap": 9.0}, d=d, mask=SQUARE), dict(kernel=KEY_STATIONARY, score_mode="softcap and mask"))
        for d in (40, 80, 128)
    ),
    (hopper({"softcap": 9.0}, mask=(1, 1, LONG, 1)), dict(kernel=TWO_PASS, score_mode="generic")),
    (hopper({"softcap": 9.0, "scale": -1.0}, mask=SQUARE), dict(kernel=TWO_PASS, score_mode="generic")),
    (hopper({"softcap": 9.0}, sk=8 * LONG + 8), dict(kernel=TWO_PASS, score_mode="generic")),  # few queries
    # Caps whose scores the kernel would not hide, or would round too much.
    *((hopper({"softcap": cap}), dict(kernel=TWO_PASS, score_mode="generic")) for cap in (2.0**-11, 2.0**9)),
    *((hopper({"softcap": cap}), dict(kernel=KEY_STATIONARY)) for cap in (2.0**-10, 2.0**8)),
    (hopper({"scale": -1.0}), dict(score_mode="generic")),
    (
        hopper(bias=(1, 16, LONG, 1), wanted=WITH_BIAS),
        dict(kernel=TWO_PASS, score_mode="generic", delta="within another kernel", dbias="from row sums"),
    ),
    (
        hopper({"softcap": 9.0}, bias=(8, 1, 1, 1), wanted=WITH_BIAS, d=128),
        dict(kernel=TWO_PASS, dbias="from row sums"),
    ),
    # The gradient of a sink changes no plan. The sink itself does: above head dim 64 the key-stationary kernel keeps
    # weights of bfloat16 calls in float16, in which they may vanish beside it.
    (hopper(sink=True, wanted=WITH_SINK), dict(kernel=KEY_STATIONARY, score_mode="scale only")),
    (hopper(sink=True, d=72), dict(kernel=TWO_PASS)),
    (hopper(sink=True, d=128), dict(kernel=TWO_PASS)),
    (hopper(sink=True, d=128, dtype=F16), dict(kernel=KEY_STATIONARY)),
    (hopper(sink=True, wanted=WITH_SINK, d=256), dict(kernel=TWO_PASS, score_mode="scale only")),
    (hopper({"softcap": 9.0}, sink=True, wanted=WITH_SINK), dict(kernel=KEY_STATIONARY, score_mode="softcap")),
    (hopper({"softcap": 9.0}, sink=True, d=128), dict(kernel=TWO_PASS, score_mode="generic")),
    (
        hopper(sink=True, wanted=WITH_SINK, sq=128, sk=LONG, heads=2, batch=1),
        dict(kernel=QUERY_STATIONARY, delta="by its own kernel"),
    ),
    (hopper(sink=True, wanted=WITH_SINK, sq=64, batch=256), dict(kernel="fused", delta="within another kernel")),
    (hopper(d=136), dict(kernel=TWO_PASS, score_mode="scale only", head_dims=(192, 192))),
    *(
        (hopper({"causal": "bottom_right"}, slopes=True, d=d), dict(kernel=KEY_STATIONARY, score_mode="ALiBi"))
        for d in (40, 64, 96, 128)
    ),
    (hopper({"window": (99, 0)}, slopes=True), dict(kernel=KEY_STATIONARY, score_mode="ALiBi")),
    (hopper({"window": (99, 1)}, slopes=True), dict(kernel=KEY_STATIONARY, score_mode="ALiBi")),
    *(
        (hopper(slopes=True, d=d, mask=SQUARE), dict(kernel=KEY_STATIONARY, score_mode="ALiBi and mask"))
        for d in (40, 80, 128)
    ),
    (hopper({"dropout_p": 0.1}, slopes=True, mask=SQUARE), dict(kernel=TWO_PASS, score_mode="generic")),
    (hopper({"causal": "top_left", "softcap": 9.0}, slopes=True), dict(kernel=TWO_PASS, score_mode="generic")),
    (hopper({"causal": "top_left"}, slopes=True, d=136), dict(kernel=TWO_PASS)),
    (hopper(slopes=True), dict(kernel=KEY_STATIONARY, score_mode="ALiBi")),
    (hopper({"scale": 1e-4}, slopes=True), dict(kernel=TWO_PASS, score_mode="generic")),  # kernels divide by it
    (hopper({"scale": 1e-4}, slopes=True, mask=SQUARE), dict(kernel=TWO_PASS, score_mode="generic")),
    (hopper(slopes=True, sk=8 * LONG + 8), dict(kernel=TWO_PASS, score_mode="generic")),  # few queries
    # The gradient of a bias that all batch entries share takes a kernel of its own up to head dim 64.
    (
        hopper(bias=SQUARE, wanted=WITH_BIAS),
        dict(kernel=KEY_STATIONARY, dbias="from dS recomputed over the batch", dbias_splits=None),
    ),
    (
        hopper(sq=128, batch=64, bias=(1, 1, 128, 128), wanted=WITH_BIAS),
        dict(dbias="from the materialised dS"),
    ),  # few queries
    (hopper(sq=136, batch=64, bias=(1, 1, 136, 136), wanted=WITH_BIAS), dict(kernel=KEY_STATIONARY)),
    (
        hopper(sq=136, batch=64, bias=(1, 1, 136, 136), wanted=WITH_BIAS),
        dict(dbias_splits=33, workspace={"partial dBias": 33 * 4 * 128 * 128 * 4}),
    ),
    (hopper(bias=(8, 16, LONG, LONG), wanted=WITH_BIAS), dict(kernel=TWO_PASS, dbias="from the materialised dS")),
    # What sums dS that is computed again.
    (
        hopper({"causal": "top_left"}, slopes=True, wanted=WITH_SLOPES),
        dict(kernel=KEY_STATIONARY, score_mode="ALiBi", slope_gradient=True, delta=SHARED, dbias=None),
    ),
    (hopper(slopes=True, wanted=WITH_SLOPES), dict(kernel=KEY_STATIONARY, slope_gradient=True, delta=SHARED)),
    # That of slopes comes from portable kernels beside anything else, or a scale that is not positive.
    (
        hopper({"scale": -1.0}, slopes=True, wanted=WITH_SLOPES),
        dict(kernel=TWO_PASS, slope_gradient=False, delta=THEN_EXACT),
    ),
    (
        hopper({"softcap": 9.0}, slopes=True, wanted=WITH_SLOPES),
        dict(kernel=TWO_PASS, slope_gradient=False, delta=THEN_EXACT),
    ),
    (
        hopper(bias=(1, 16, 1, LONG), wanted=WITH_BIAS),
        dict(
            kernel=KEY_STATIONARY,
            score_mode="key bias",
            delta=SHARED,
            dbias=FROM_KEYS,
            workspace={FLOAT32_BIAS: 16 * LONG * 4},
        ),
    ),
    (
        hopper({"causal": "top_left"}, bias=(8, 16, 1, LONG), bias_dtype=F32, d=128, wanted=WITH_BIAS),
        dict(kernel=KEY_STATIONARY, delta=EXACT, dbias=FROM_KEYS, slope_gradient=False, workspace={FLOAT32_BIAS: 0}),
    ),
    (
        hopper({"causal": "top_left"}, bias=(8, 16, 1, LONG), bias_dtype=F32),
        dict(kernel=KEY_STATIONARY, score_mode="key bias", delta=SHARED, dbias=None),
    ),
    # Each query head of a KV group has a work tile of its own.
    (
        hopper({"causal": "top_left"}, key_heads=4, bias=(8, 16, 1, LONG), wanted=WITH_BIAS),
        dict(kernel=KEY_STATIONARY, dbias=FROM_KEYS, group_shares=4),
    ),
    (hopper(key_heads=4, bias=(8, 1, 1, LONG), wanted=WITH_BIAS), dict(kernel=KEY_STATIONARY, dbias=FROM_KEYS)),
    (
        hopper(key_heads=4, bias=(8, 16, 1, LONG), wanted=WITH_BIAS),
        dict(kernel=KEY_STATIONARY, delta=THEN_EXACT, dbias="from recomputed dS"),
    ),
    # The last query of a tile would not see what others see.
    (
        hopper({"causal": "top_left", "window": (100, 0)}, bias=(8, 16, 1, LONG), wanted=WITH_BIAS),
        dict(kernel=TWO_PASS, delta=THEN_EXACT, dbias="from recomputed dS"),
    ),
    (
        hopper({"dropout_p": 0.1}, bias=(8, 16, 1, LONG), wanted=WITH_BIAS),
        dict(kernel=KEY_STATIONARY, delta=THEN_EXACT, dbias="from recomputed dS"),
    ),
    (
        hopper({"causal": "top_left"}, bias=(8, 16, 1, LONG), d=256, wanted=WITH_BIAS),
        dict(kernel="materialise P and dS with dQ", dbias="from recomputed dS"),
    ),
    # A mask of keys beside dropout is a key bias.
    (
        hopper({"dropout_p": 0.1}, mask=(8, 1, 1, LONG)),
        dict(
            kernel=KEY_STATIONARY,
            score_mode="key bias and dropout",
            workspace={MASK_AS_BIAS: 8 * LONG * 2, KEYS_BEFORE_PADDING: 8 * 4},
        ),
    ),
    # Where padding of a batch entry begins is looked up once for all heads, and not for few key tiles.
    (hopper(bias=(8, 1, 1, LONG)), dict(workspace={MASK_AS_BIAS: 0, KEYS_BEFORE_PADDING: 8 * 4})),
    (hopper(bias=(8, 16, 1, LONG)), dict(workspace={KEYS_BEFORE_PADDING: 0})),
    (hopper(sq=256, bias=(8, 1, 1, 256)), dict(score_mode="key bias", workspace={KEYS_BEFORE_PADDING: 0})),
    (
        hopper({"dropout_p": 0.1, "causal": "top_left"}, mask=(8, 1, 1, LONG)),
        dict(kernel=KEY_STATIONARY, score_mode="mask and dropout"),
    ),
    (
        hopper({"dropout_p": 0.1}, mask=(8, 1, LONG, LONG), d=128),
        dict(kernel=KEY_STATIONARY, score_mode="mask and dropout", pre_signals_dq=True),
    ),
    (
        hopper({"dropout_p": 0.1}, mask=(8, 1, LONG, LONG), d=192),
        dict(kernel=TWO_PASS, score_mode="generic without bias"),
    ),
    (
        hopper({"softcap": 9.0}, bias=SQUARE, wanted=WITH_BIAS),
        dict(kernel=TWO_PASS, delta="within another kernel", dbias="from recomputed dS"),
    ),
    (
        hopper(bias=SQUARE, mask=SQUARE, wanted=WITH_BIAS),
        dict(kernel=TWO_PASS, dbias="from the materialised dS", workspace={"mask bits": 8912896}),
    ),
    (hopper(bias=SQUARE, wanted=WITH_BIAS, d=128), dict(kernel=TWO_PASS, dbias="from the materialised dS")),
    # Short heads with a bias, and a mask of keys, up to head dim 32.
    *(
        (hopper(sq=256, d=d, bias=(1, 16, 256, 256), wanted=WITH_BIAS, **more), dict(kernel=kernel))
        for d, more, kernel in (
            (32, {}, SHORT_BIAS),
            (8, {"mask": (8, 1, 1, 256)}, SHORT_BIAS),
            (40, {}, KEY_STATIONARY),
            (32, {"mask": (8, 1, 256, 256)}, TWO_PASS),
            (32, {"key_heads": 4}, KEY_STATIONARY),
        )
    ),
    (hopper(sq=256, sk=264, d=32, bias=(1, 16, 256, 264), wanted=WITH_BIAS), dict(kernel=KEY_STATIONARY)),
    (
        hopper(sq=256, d=32, bias=(1, 16, 256, 256), mask=(8, 1, 1, 256), wanted=WITH_BIAS),
        dict(
            kernel=SHORT_BIAS,
            score_mode="bias and mask",
            head_dims=(32, 32),
            delta="within another kernel",
            dbias="from dS recomputed over the batch",
            dbias_splits=2,
            workspace={"partial dBias": 2 * 64 * 128 * 128 * 4, "dQ NaN flags": 8 * 16 * 8},
        ),
    ),
    (hopper(bias=SQUARE, wanted=WITH_BIAS, batch=8, d=128), dict(launches=1, key_heads_per_launch=128)),  # what fits
    (hopper(bias=SQUARE, wanted=WITH_BIAS, batch=16, d=128), dict(launches=2, key_heads_per_launch=128)),
]
PORTABLE_ON_HOPPER = [
    dict(bias=SQUARE, d=136),
    dict(mask=(1, 1, LONG, 1), options={"dropout_p": 0.1}, d=256),
    dict(bias=SQUARE, bias_dtype=F32, wanted=WITH_BIAS),
    dict(bias=SQUARE, bias_dtype=F32, d=136),
    dict(bias=(1, 16, LONG, 1), bias_dtype=F32, wanted=WITH_BIAS),
]

BACKWARD = [
    # The fused kernel: 16 bits, head dims up to 64, at most 256 queries and keys, heads enough to fill a GPU.
    (
        Call(64, batch=256, heads=8),
        dict(
            kernel="fused",
            tile=(32, 64),
            workspace_bytes=524288,
            workspace={"delta": 524288},
            delta="within another kernel",
        ),
    ),
    (Call(64, 65), dict(kernel="fused", tile=(32, 128))),
    (Call(128), dict(kernel="fused", tile=(32, 128))),
    (Call(129), dict(kernel="fused", tile=(32, 256))),
    (Call(256), dict(kernel="fused", tile=(32, 256))),
    (
        Call(257, 256),
        dict(
            kernel=RECOMPUTE, dq_score_mode="scale only", dkdv_score_mode="scale only", dq_head_dim=64, dkdv_head_dim=64
        ),
    ),
    (Call(256, 257), dict(kernel=RECOMPUTE, dq_score_mode="scale only")),
    (Call(128, d=65), dict(kernel=MATERIALISE_DS, dkdv_score_mode="scale only", dkdv_head_dim=96)),
    (Call(128, dtype=F32), dict(kernel=MATERIALISE_DS, dkdv_score_mode="scale only", dkdv_head_dim=64)),
    (Call(128, heads=16, key_heads=16), dict(kernel="fused")),
    (Call(128, heads=32, key_heads=16), dict(kernel="fused")),
    (Call(128, heads=32, key_heads=15 + 1, batch=7), dict(kernel=RECOMPUTE, dq_score_mode="scale only")),
    (Call(128, options={"dropout_p": 0.1}), dict(kernel=MATERIALISE_DS, dkdv_score_mode="generic", dkdv_head_dim=64)),
    (Call(128, wanted=("q",)), dict(kernel=RECOMPUTE, dq_score_mode="scale only")),
    (Call(128, wanted=("k", "v")), dict(kernel=RECOMPUTE, dq_score_mode="scale only")),
    # Few queries fill the smaller tiles of generic kernels.
    (Call(64, 300), dict(kernel=MATERIALISE_DS, dkdv_score_mode="generic", dkdv_head_dim=64)),
    (Call(65, 300), dict(kernel=RECOMPUTE, dq_score_mode="scale only", dq_head_dim=64)),
    # Few queries that see many keys: split-KV, as far as CTAs fit 132 SMs.
    (
        Call(128, 8192, batch=4),
        dict(
            kernel=RECOMPUTE,
            dq_score_mode="scale only",
            dkdv_score_mode="scale only",
            dq_head_dim=64,
            dkdv_head_dim=64,
            splits=4,
        ),
    ),
    (Call(128, 8192, batch=4), dict(workspace={"delta": 32768, "dK and dV NaN flags": 16384, "partial dQ": 8388608})),
    (
        Call(128, 8192, batch=4, d=128),
        dict(kernel=MATERIALISE_DS, splits=4, launches=1, key_heads_per_launch=64),
    ),
    (
        Call(64, 8192, batch=1),
        dict(kernel=MATERIALISE_DS, dkdv_score_mode="generic", dkdv_head_dim=64, splits=24, launches=1),
    ),
    (
        Call(64, 8192, batch=1, d=128),
        dict(kernel=MATERIALISE_DS, dkdv_score_mode="scale only", dkdv_head_dim=128, splits=16),
    ),
    (Call(128, 4096, batch=1, heads=1, d=128), dict(splits=16)),  # of at least 256 keys
    (Call(128, 1023, batch=1, heads=1, d=128), dict(kernel=MATERIALISE_DS, splits=None)),
    (Call(513, 8192, batch=1, d=128), dict(kernel=MATERIALISE_DS, splits=None)),
    (Call(128, 8192, batch=9, d=128), dict(kernel=MATERIALISE_DS, splits=None)),
    (
        Call(128, 8192, batch=1, wanted=("q",)),
        dict(kernel=RECOMPUTE, dq_score_mode="scale only", dq_head_dim=64, splits=16),
    ),
    (
        Call(128, 8192, batch=1, mask=(1, 1, 1, 8192)),
        dict(kernel=MATERIALISE_DS, dkdv_score_mode="generic", dkdv_head_dim=64, splits=24),
    ),
    (
        Call(128, 8192, batch=1, d=128, mask=(1, 1, 1, 8192)),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="bias and mask", dq_head_dim=128, splits=8),
    ),
    (
        Call(128, 8192, batch=1, dtype=F32, options={"allow_tf32": True}),
        dict(kernel=RECOMPUTE, dq_score_mode="scale only", dq_head_dim=64, tf32=True, splits=8),
    ),
    # One flag per warp of each kernel that computes scores.
    (Call(512, d=128), dict(workspace={"delta": 262144, "materialised scores": 67108864, "dK and dV NaN flags": 4096})),
    (Call(512, d=256), dict(workspace={"materialised scores": 134217728, "dQ NaN flags": 4096})),
    (Call(512, wanted=("q",)), dict(workspace={"delta": 262144, "dQ NaN flags": 2048})),
    # Which kernel materialises scores.
    (
        Call(512, d=128),
        dict(
            kernel=MATERIALISE_DS,
            dkdv_score_mode="scale only",
            dkdv_head_dim=128,
            splits=None,
            launches=1,
            key_heads_per_launch=128,
        ),
    ),
    (
        Call(512, d=129),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="scale only", dq_head_dim=192, splits=None, launches=1),
    ),
    (Call(512, d=256), dict(kernel=MATERIALISE_P_DS, dq_score_mode="scale only", dq_head_dim=256, splits=None)),
    (
        Call(512, d=257),
        dict(kernel=RECOMPUTE, dq_score_mode="generic", dkdv_score_mode="generic", dq_head_dim=512, dkdv_head_dim=512),
    ),
    (Call(4096, d=128), dict(launches=2, key_heads_per_launch=64)),
    (
        Call(512, mask=(1, 1, 512, 512)),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="bias and mask", dq_head_dim=64, splits=None),
    ),
    (
        Call(512, d=96, mask=(1, 1, 512, 512)),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="bias and mask", dq_head_dim=128, splits=None),
    ),
    (
        Call(512, d=192, mask=(1, 1, 512, 512)),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="generic", dq_head_dim=192, splits=None),
    ),
    (Call(512, options={"softcap": 9.0}), dict(kernel=MATERIALISE_DS, dkdv_score_mode="generic", dkdv_head_dim=64)),
    (
        Call(512, d=128, options={"softcap": 9.0}),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="generic", dq_head_dim=128, splits=None),
    ),
    (Call(512, d=128, dtype=F32), dict(kernel=MATERIALISE_DS, dkdv_score_mode="scale only", dkdv_head_dim=128)),
    (Call(512, d=256, dtype=F32), dict(kernel=RECOMPUTE, dq_score_mode="generic", dq_head_dim=256)),
    (
        Call(512, dtype=F32, options={"allow_tf32": True}),
        dict(kernel=RECOMPUTE, dq_score_mode="scale only", dkdv_score_mode="scale only", dq_head_dim=64, tf32=True),
    ),
    (Call(512, dtype=F64), dict(kernel="one warp per row, without tensor cores", delta="by its own kernel")),
    # Delta: in the kernel of dQ where that has all of a row, exact where rounding of out would add up.
    (Call(512, d=128), dict(delta="by its own kernel")),
    (Call(512, d=256), dict(delta="within another kernel")),
    (Call(512), dict(delta="within another kernel")),
    (Call(512, d=63), dict(delta="by its own kernel")),
    (Call(512, slopes=True, wanted=WITH_SLOPES), dict(delta="by its own kernel, then exact for sums of dS")),
    (Call(512, sink=True, wanted=("q", "sink")), dict(delta="within another kernel")),
    (Call(512, sink=True, wanted=("sink",)), dict(delta="by its own kernel")),
    # dBias: from materialised dS where it has a value for each query and key.
    (Call(512, bias=(1, 16, 512, 512), wanted=("q", "k", "v", "bias")), dict(dbias="from the materialised dS")),
    (
        Call(512, bias=(1, 16, 1, 512), wanted=("q", "k", "v", "bias")),
        dict(delta="exact, by its own kernel", dbias="from recomputed dS"),
    ),
    # The same kernel sums the gradient of slopes. Where dBias is row sums, its delta has no dlse, and it runs again.
    (
        Call(512, bias=(1, 16, 1, 512), slopes=True, wanted=(*WITH_SLOPES, "bias")),
        dict(delta="exact, by its own kernel", dbias="from recomputed dS"),
    ),
    (
        Call(512, bias=(1, 1), bias_dtype=F32, slopes=True, wanted=(*WITH_SLOPES, "bias")),
        dict(delta="exact, by its own kernel, then exact for sums of dS", dbias="from row sums"),
    ),
    (Call(512, bias=(1, 16, 512, 512), wanted=("bias",)), dict(dbias="from recomputed dS")),
    # Broadcast along keys, it is known without dS. That of float32 is more precise than delta of a rounded out.
    (Call(512, bias=(1, 16, 512, 1), wanted=("q", "bias")), dict(delta="by its own kernel", dbias="from row sums")),
    (Call(512, bias=(1, 1), sink=True, wanted=("bias",)), dict(delta="by its own kernel", dbias="from row sums")),
    (
        Call(512, bias=(1, 1), bias_dtype=F32, wanted=("q", "bias")),
        dict(delta="exact, by its own kernel", dbias="from row sums"),
    ),
    (
        Call(512, bias=(1, 16, 512, 512), bias_dtype=F32, wanted=("q", "k", "v", "bias")),
        dict(dbias="from recomputed dS"),
    ),
    (Call(512, slopes=True, wanted=("alibi_slopes",)), dict(workspace={"ALiBi partial sums": 4096})),
]


@pytest.mark.parametrize(("call", "expected"), BACKWARD_SM90, ids=label)
def test_backward_on_hopper(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


@pytest.mark.parametrize("changed", PORTABLE_ON_HOPPER, ids=str)
def test_what_hopper_leaves_to_the_portable_backward_kernels(changed):
    assert hopper(**changed).plans()[1] == Call(LONG, **changed).plans()[1]


@pytest.mark.parametrize(("call", "expected"), BACKWARD, ids=label)
def test_backward(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


@pytest.mark.parametrize(
    ("mebibytes", "kernel", "launches"), [("0", RECOMPUTE, None), ("1", RECOMPUTE, None), ("64", MATERIALISE_DS, 1)]
)
def test_the_workspace_has_a_switch(mebibytes, kernel, launches, monkeypatch):
    """A head of 1024 tokens takes 2 MiB of materialised scores."""
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    plan = Call(1024, d=128, batch=1, heads=8).plans()[1]
    assert (plan.kernel, plan.launches) == (kernel, launches)


@pytest.mark.parametrize(("call", "expected"), [*BACKWARD_SM90, *BACKWARD], ids=label)
def test_small_head_dims_have_kernels_in_a_fast_build(call, expected):
    """It has none for larger head dims, whatever else a call has."""
    header = (CSRC / "kernels" / "config" / "fast_build.h").read_text(encoding="utf-8")
    largest = int(re.search(r"kFastBuildHeadDim = (\d+);", header).group(1))
    if max(call.d, call.dv or 0) > largest:
        pytest.skip("a fast build has no kernel for it")
    for plan in call.plans():
        assert max(*(plan.head_dims or (0,)), plan.dq_head_dim or 0, plan.dkdv_head_dim or 0) <= largest
