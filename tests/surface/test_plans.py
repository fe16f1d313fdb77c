"""Which kernels each call takes, at each border between them. Few queries: test_plans_of_few_queries.py.

Plans need no GPU: tensors lie in CPU memory here, and are never read."""

import re

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import _C
from support.plans import F16, F32, F64, Call, label


def causal(**more) -> dict:
    return {"causal": "top_left"} | more


FORWARD = [
    # Head dims of 64 and few queries: Short up to 64 queries, or 448 in causal calls.
    (Call(64), "streaming (short, head dim 64), 64 queries x 64 keys per tile; no workspace"),
    (Call(65, 80), "streaming (plain, head dim 64), 128 queries x 64 keys per tile; no workspace"),
    (Call(448, options=causal()), "streaming (short, head dim 64)"),
    (Call(449, options=causal()), "streaming (plain, head dim 64)"),
    # Whole heads: 65 to 128 queries, 81 to 128 keys, all visible, head dim 64.
    (Call(64, 128), "streaming (short"),
    (Call(65, 81), "whole heads"),
    (Call(128, 128), "whole heads"),
    (Call(128, 80), "streaming (plain"),
    (Call(128, 129), "streaming (plain"),
    (Call(129, 128), "streaming (plain"),
    (Call(128, d=63), "streaming (plain"),
    (Call(128, d=64, dv=63), "streaming (plain"),
    (Call(128, options={"window": (9, 9)}), "streaming (plain"),
    (Call(128, options={"dropout_p": 0.1}), "streaming (dropout"),
    # Head dims: 64, 96, 128, 192, 256, 512; kernels that change scores skip 96.
    (Call(500, d=65), "plain, head dim 96"),
    (Call(500, d=64, dv=96), "plain, head dim 96"),
    (Call(500, d=97), "plain, head dim 128"),
    (Call(500, d=129), "plain, head dim 192"),
    (Call(500, d=193), "plain, head dim 256"),
    (Call(500, d=257), "plain, head dim 512"),
    (Call(500, d=96, options={"softcap": 9.0}), "extended, head dim 128"),
    (Call(500, d=96, options={"dropout_p": 0.1}), "dropout, head dim 128"),
    # What changes a score.
    (Call(500, d=128, bias=(1, 1, 500, 500)), "bias and mask, head dim 128"),
    (Call(500, d=128, mask=(1, 1, 1, 500)), "bias and mask, head dim 128"),
    (Call(500, d=128, mask=(8, 1, 1, 500)), "workspace 2304 bytes (mask tiles 64, NaN flags 2048)"),
    (Call(500, d=128, mask=(1, 1, 1, 500), options={"dropout_p": 0.1}), "extended, head dim 128"),
    (Call(500, d=128, bias=(1, 1, 500, 500), bias_dtype=F32), "extended, head dim 128"),
    (Call(500, d=192, mask=(1, 1, 1, 500)), "extended, head dim 192"),
    (Call(500, slopes=True), "extended, head dim 64"),
    (Call(500, options={"scale": -1.0}), "extended, head dim 64"),
    (Call(500, sink=True), "plain, head dim 64"),
    # float32 has fewer head dims, and smaller Extended tiles for few queries.
    (Call(64, dtype=F32), "extended, head dim 64"),
    (Call(65, dtype=F32), "plain, head dim 64"),
    (Call(500, d=65, dtype=F32), "plain, head dim 128"),
    (Call(500, d=129, dtype=F32), "plain, head dim 256"),
    (Call(500, dtype=F32, options={"allow_tf32": True}), "plain TF32, head dim 64"),
    (Call(500, d=129, dtype=F32, options={"allow_tf32": True}), "plain, head dim 256"),
    (Call(500, dtype=F32, options={"allow_tf32": True, "softcap": 9.0}), "extended, head dim 64"),
    (Call(500, dtype=F64), "one warp per row, without tensor cores; no workspace"),
    # Calls that short ones take repair NaN by themselves; others have a flag per warp.
    (Call(500), "head dim 64), 128 queries x 64 keys per tile; no workspace"),
    (Call(500, d=128), "workspace 2048 bytes (NaN flags 2048)"),
]

# Sequences so long that no portable kernel is faster.
LONG = 2048


def hopper(options: dict | None = None, sq: int = LONG, **more) -> Call:
    return Call(sq, options={"backend": "sm90"} | (options or {}), **more)


FORWARD_SM90 = [
    # What changes a score: Dropout, Mask and BiasMask have kernels of few head dims, the next of which a call takes.
    (hopper(), "warp-specialised (plain, head dims 64 and 64)"),
    (hopper(dtype=F16), "warp-specialised (plain, head dims 64 and 64)"),
    (hopper(causal()), "(plain,"),
    (hopper({"window": (100, 9)}), "(small,"),
    (hopper(sink=True), "(plain,"),
    (hopper(key_heads=4), "(plain,"),
    (hopper({"dropout_p": 0.1}), "(dropout, head dims 64 and 64)"),
    (hopper({"dropout_p": 0.1}, d=128), "(dropout, head dims 128 and 128)"),
    (hopper({"dropout_p": 0.1}, d=96), "(dropout, head dims 128 and 128)"),
    (hopper({"dropout_p": 0.1}, d=192), "(dropout, head dims 192 and 192), 128 queries x 64 keys"),
    (hopper(d=64, bias=(1, 1, LONG, LONG)), "(bias and mask, head dims 64 and 64)"),
    (hopper(d=128, mask=(1, 1, 1, LONG)), "(mask, head dims 128 and 128)"),
    (hopper(d=128, mask=(1, 1, LONG, LONG)), "(mask tiles 1024, mask bits 557056, NaN flags"),
    (hopper(d=128, mask=(1, 1, LONG, 1)), "(extended,"),  # its bits would be many more than its elements
    (hopper(d=128, bias=(1, 1, 1, LONG)), "(extended,"),  # no rows for the copy engine
    (hopper(d=128, bias=(1, 1, LONG, LONG), mask=(1, 1, 1, LONG)), "(bias and mask,"),
    (hopper(d=192, dv=128, mask=(1, 1, 1, LONG)), "(mask, head dims 192 and 128), 128 queries x 64 keys"),
    (hopper({"dropout_p": 0.1}, mask=(1, 1, 1, LONG)), "(extended,"),
    (hopper(bias=(1, 1, LONG, LONG), bias_dtype=F32), "streaming (extended"),  # sm80's, as in the backward pass
    (hopper(slopes=True), "(extended,"),
    (hopper({"softcap": 9.0}), "(extended,"),
    (hopper({"scale": -1.0}), "(extended,"),
    # Head dims of q and of v.
    (hopper(d=1), "head dims 64 and 64)"),
    (hopper(d=65), "head dims 96 and 96)"),
    (hopper(d=64, dv=65), "head dims 96 and 96)"),
    (hopper(d=97), "head dims 128 and 128)"),
    (hopper(d=96, dv=128), "head dims 128 and 128)"),
    (hopper(d=129, dv=1), "head dims 192 and 128)"),
    (hopper(d=192, dv=128), "head dims 192 and 128)"),
    (hopper(d=129), "head dims 192 and 192)"),
    (hopper(d=128, dv=192), "head dims 192 and 192)"),
    (hopper(d=128, dv=193), "head dims 128 and 256)"),
    (hopper(d=64, dv=512), "head dims 128 and 256)"),
    (hopper(d=193), "head dims 256 and 256)"),
    (hopper(d=129, dv=193), "head dims 256 and 256)"),
    (hopper(d=256, dv=512), "head dims 256 and 256)"),
    # So are short sequences of small head dims, in kernels of their own; the shortest ones are portable kernels'.
    (Call(224, options={"backend": "sm90"}), "(all keys, head dims 64 and 64)"),
    (Call(64, options={"backend": "sm90"}), "streaming (short, head dim 64)"),
    (Call(64, d=65, options={"backend": "sm90"}), "warp-specialised"),
    (Call(64, dv=65, options={"backend": "sm90"}), "warp-specialised"),
]

SQUARE = (1, 16, LONG, LONG)
WITH_BIAS = ("q", "k", "v", "bias")
BACKWARD_SM90 = [
    (hopper(), "warp-specialised, head dim 64, 128 keys per block, dQ added in order"),
    (hopper(mask=SQUARE), "warp-specialised (mask), head dim 64, 128 keys per block, dQ added in order, going round"),
    (hopper(mask=SQUARE, d=72), "warp-specialised (mask), head dim 96, 128 keys per block"),
    (hopper(d=40, dv=104), "warp-specialised, head dim 128, 128 keys per block"),
    (hopper(bias=SQUARE), "warp-specialised (bias and mask), head dim 64, 128 keys per block, dQ added in order"),
    (hopper(mask=(1, 1, 1, LONG), d=128), "warp-specialised (mask), head dim 128, 128 keys per block"),
    (hopper(mask=(1, 1, 1, 8 * LONG), sk=8 * LONG), "warp-specialised (mask), head dim 64, 128 keys per block"),
    # A mask or bias with more keys for each query, one that has a gradient, what else changes scores: dQ first.
    (hopper(mask=(1, 1, 1, 8 * LONG + 1), sk=8 * LONG + 1), "(mask, head dims 64 and 64), dQ storing P and dS, then"),
    (hopper(mask=(1, 1, LONG, 1)), "(extended, head dims 64 and 64)"),  # packing it would take more than it is
    (hopper(bias=SQUARE, wanted=WITH_BIAS, d=128), "(bias and mask, head dims 128 and 128), dQ storing P and dS"),
    (hopper(bias=(1, 1, LONG, 8 * LONG + 8), sk=8 * LONG + 8), "(bias and mask, head dims 64 and 64), dQ storing"),
    (hopper(bias=(1, 1, LONG, LONG + 1), sk=LONG + 1), "(extended,"),  # which the copy engine does not address
    (hopper({"softcap": 9.0}, d=128), "(extended, head dims 128 and 128)"),
    (hopper({"scale": -1.0}), "(extended,"),
    (hopper(slopes=True), "(extended,"),
    (hopper(d=136), "warp-specialised (plain, head dims 192 and 192), dQ storing P and dS"),
    (hopper(bias=SQUARE, mask=SQUARE), "mask tiles 16384, mask bits"),
    (hopper(bias=SQUARE, wanted=WITH_BIAS), "dBias from the stored dS"),
    (hopper(bias=SQUARE, wanted=WITH_BIAS, batch=8, d=128), "in 1 launch of up to 128 key heads"),  # what fits
    (hopper(bias=SQUARE, wanted=WITH_BIAS, batch=16, d=128), "in 2 launches of up to 128 key heads"),
]
PORTABLE_ON_HOPPER = [
    dict(bias=SQUARE, d=136),
    dict(mask=SQUARE, options={"dropout_p": 0.1}, d=256),
    dict(bias=SQUARE, bias_dtype=F32),
    dict(bias=(1, 16, 1, LONG), wanted=("q", "k", "v", "bias")),
    dict(bias=SQUARE, options={"softcap": 9.0}, wanted=("q", "k", "v", "bias")),
    dict(slopes=True, wanted=("q", "k", "v", "alibi_slopes")),
    dict(sink=True, wanted=("q", "k", "v", "sink")),
    dict(mask=SQUARE, wanted=("q",)),
]

BACKWARD = [
    # The fused kernel: 16 bits, head dims up to 64, at most 256 queries and keys, heads enough to fill a GPU.
    (
        Call(64, batch=256, heads=8),
        "fused, 64 keys per block; delta by the first kernel; workspace 524288 bytes (delta 524288)",
    ),
    (Call(64, 65), "fused, 128 keys per block"),
    (Call(128), "fused, 128 keys per block"),
    (Call(129), "fused, 256 keys per block"),
    (Call(256), "fused, 256 keys per block"),
    (Call(257, 256), "dQ (plain, head dim 64), then dK and dV (plain, head dim 64), each computing the scores"),
    (Call(256, 257), "dQ (plain"),
    (Call(128, d=65), "dK and dV (plain, head dim 96) storing dS"),
    (Call(128, dtype=F32), "dK and dV (plain, head dim 64) storing dS"),
    (Call(128, heads=16, key_heads=16), "fused"),
    (Call(128, heads=32, key_heads=16), "fused"),
    (Call(128, heads=32, key_heads=15 + 1, batch=7), "dQ (plain"),
    (Call(128, options={"dropout_p": 0.1}), "dK and dV (extended, head dim 64) storing dS"),
    (Call(128, wanted=("q",)), "dQ (plain"),
    (Call(128, wanted=("k", "v")), "dQ (plain"),
    # Few queries fill the smaller tiles of Extended kernels.
    (Call(64, 300), "dK and dV (extended, head dim 64) storing dS"),
    (Call(65, 300), "dQ (plain, head dim 64)"),
    # Few queries that see many keys: these are divided, as far as blocks fit 132 multiprocessors.
    (Call(128, 8192, batch=4), "dQ (plain, head dim 64, keys in 4 parts), then dK and dV (plain, head dim 64), each"),
    (Call(128, 8192, batch=4), "(delta 32768, dK and dV NaN flags 16384, parts of dQ 8388608)"),
    (
        Call(128, 8192, batch=4, d=128),
        "storing dS, then dQ from dS, keys in 4 parts, in 1 launch of up to 64 key heads",
    ),
    (Call(64, 8192, batch=1), "dV (extended, head dim 64) storing dS, then dQ from dS, keys in 24 parts, in 1 launch"),
    (Call(64, 8192, batch=1, d=128), "dV (plain, head dim 128) storing dS, then dQ from dS, keys in 16 parts"),
    (Call(128, 4096, batch=1, heads=1, d=128), "keys in 16 parts"),  # of at least 256 keys
    (Call(128, 1023, batch=1, heads=1, d=128), "dQ from dS, in"),
    (Call(513, 8192, batch=1, d=128), "dQ from dS, in"),
    (Call(128, 8192, batch=9, d=128), "dQ from dS, in"),
    (Call(128, 8192, batch=1, wanted=("q",)), "dQ (plain, head dim 64, keys in 16 parts), then"),
    (Call(128, 8192, batch=1, mask=(1, 1, 1, 8192)), "(extended, head dim 64) storing dS, then dQ from dS, keys in 24"),
    (
        Call(128, 8192, batch=1, d=128, mask=(1, 1, 1, 8192)),
        "dQ (bias and mask, head dim 128, keys in 8 parts) storing",
    ),
    (
        Call(128, 8192, batch=1, dtype=F32, options={"allow_tf32": True}),
        "dQ (plain TF32, head dim 64, keys in 8 parts)",
    ),
    # One flag per warp of each kernel that meets scores.
    (Call(512, d=128), "(delta 262144, stored scores 67108864, dK and dV NaN flags 4096)"),
    (Call(512, d=256), "stored scores 134217728, dQ NaN flags 4096)"),
    (Call(512, wanted=("q",)), "(delta 262144, dQ NaN flags 2048)"),
    # Which kernel stores scores.
    (
        Call(512, d=128),
        "dV (plain, head dim 128) storing dS, then dQ from dS, in 1 launch of up to 128 key heads",
    ),
    (Call(512, d=129), "dQ (plain, head dim 192) storing P and dS, then dK and dV from them, in 1 launch"),
    (Call(512, d=256), "dQ (plain, head dim 256) storing P and dS"),
    (Call(512, d=257), "dQ (extended, head dim 512), then dK and dV (extended, head dim 512), each computing"),
    (Call(4096, d=128), "in 2 launches of up to 64 key heads"),
    (Call(512, mask=(1, 1, 512, 512)), "dQ (bias and mask, head dim 64) storing P and dS"),
    (Call(512, d=96, mask=(1, 1, 512, 512)), "dQ (bias and mask, head dim 128) storing P and dS"),
    (Call(512, d=192, mask=(1, 1, 512, 512)), "dQ (extended, head dim 192) storing P and dS"),
    (Call(512, options={"softcap": 9.0}), "dK and dV (extended, head dim 64) storing dS"),
    (Call(512, d=128, options={"softcap": 9.0}), "dQ (extended, head dim 128) storing P and dS"),
    (Call(512, d=128, dtype=F32), "dK and dV (plain, head dim 128) storing dS"),
    (Call(512, d=256, dtype=F32), "dQ (extended, head dim 256), then"),
    (Call(512, dtype=F32, options={"allow_tf32": True}), "dQ (plain TF32, head dim 64), then dK and dV (plain TF32"),
    (Call(512, dtype=F64), "one warp per row, without tensor cores; delta by its own kernel"),
    # Delta: in the first kernel where that has all of a row, exact where rounding of out would add up.
    (Call(512, d=128), "delta by its own kernel"),
    (Call(512, d=256), "delta by the first kernel"),
    (Call(512), "delta by the first kernel"),
    (Call(512, d=63), "delta by its own kernel"),
    (Call(512, slopes=True, wanted=("q", "k", "v", "alibi_slopes")), "exact delta by its own kernel"),
    (Call(512, sink=True, wanted=("q", "sink")), "exact delta by its own kernel"),
    (Call(512, dtype=F32, sink=True, wanted=("q", "sink")), "delta by the first kernel"),
    # dBias: from stored dS where it has a value for each query and key.
    (Call(512, bias=(1, 16, 512, 512), wanted=("q", "k", "v", "bias")), "dBias from the stored dS"),
    (Call(512, bias=(1, 16, 1, 512), wanted=("q", "k", "v", "bias")), "exact delta by its own kernel; dBias computing"),
    (Call(512, bias=(1, 16, 512, 512), wanted=("bias",)), "dBias computing the scores again"),
    # Broadcast along keys, it is known without dS; beside a sink from delta, exact in 16 bits.
    (Call(512, bias=(1, 16, 512, 1), wanted=("q", "bias")), "; delta by its own kernel; dBias from sums of rows"),
    (Call(512, bias=(1, 1), sink=True, wanted=("bias",)), "; exact delta by its own kernel; dBias from sums of rows"),
    (Call(512, bias=(1, 1), bias_dtype=F32, wanted=("q", "bias")), "; exact delta by its own kernel; dBias from sums"),
    (Call(512, bias=(1, 16, 512, 512), bias_dtype=F32, wanted=("q", "k", "v", "bias")), "dBias computing the scores"),
    (Call(512, slopes=True, wanted=("alibi_slopes",)), "ALiBi partial sums 4096"),
]


@pytest.mark.parametrize(("call", "words"), FORWARD, ids=label)
def test_forward(call, words):
    assert words in call.plans()[0]


@pytest.mark.parametrize(("call", "words"), FORWARD_SM90, ids=label)
def test_forward_on_hopper(call, words):
    assert words in call.plans()[0]


@pytest.mark.parametrize("name", ["mask tiles", "NaN flags", "tile list"])
@pytest.mark.parametrize(
    ("d", "dv", "slices"), [(64, 64, 1), (128, 128, 1), (256, 256, 1), (64, 257, 2), (256, 512, 2)]
)
def test_the_workspace_on_hopper(d, dv, slices, name):
    """A flag for each warp that computes and a number for each tile of queries; of a mask, a byte for 64 x 64."""
    call = hopper(d=d, dv=dv, mask=(1, 16, LONG, LONG))
    words = call.plans()[0]
    queries = int(re.search(r"(\d+) queries x", words)[1])
    tiles = call.batch * call.heads * -(-LONG // queries) * slices
    expected = {"mask tiles": 16 * (LONG // 64) ** 2, "NaN flags": tiles * queries // 16, "tile list": tiles * 4}[name]
    assert f"{name} {expected}" in words
    assert "mask tiles" not in hopper(d=d, dv=dv).plans()[0]


@pytest.mark.parametrize(("call", "words"), BACKWARD_SM90, ids=label)
def test_backward_on_hopper(call, words):
    assert words in call.plans()[1]


@pytest.mark.parametrize("changed", PORTABLE_ON_HOPPER, ids=str)
def test_what_hopper_leaves_to_the_portable_backward_kernels(changed):
    assert hopper(**changed).plans()[1] == Call(LONG, **changed).plans()[1]


@pytest.mark.parametrize(("call", "words"), BACKWARD, ids=label)
def test_backward(call, words):
    assert words in call.plans()[1]


@pytest.mark.parametrize(
    ("mebibytes", "words"), [("0", "each computing"), ("1", "each computing"), ("64", "in 1 launch")]
)
def test_the_workspace_has_a_switch(mebibytes, words, monkeypatch):
    """A head of 1024 tokens stores 2 MiB."""
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    assert words in Call(1024, d=128, batch=1, heads=8).plans()[1]


SWITCHES = {
    "FLASH_ATTN_EXT_WORKSPACE_MIB": (r"of MiB from 0 \(.*\) to 2048", ["-1", "2049"]),
    "FLASH_ATTN_EXT_MULTIPROCESSORS": (r"of multiprocessors from 1 to 1024", ["0", "-5", "1025"]),
}


@pytest.mark.parametrize(
    ("name", "expected", "value"),
    [
        (name, expected, value)
        for name, (expected, values) in SWITCHES.items()
        for value in [*values, "all", "1.5", "2 ", "9" * 30]
    ],
)
def test_a_wrong_switch_is_named(name, expected, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name} is '{value}', expected a whole number {expected}; unset it"):
        Call(64).plans()
    q = torch.zeros(1, 1, 8, 8)
    with pytest.raises(ValueError, match=name):
        flash_attn_ext.attention(q, q, q)


def test_explain_says_the_plan():
    q = torch.zeros(1, 1, 8, 8)
    explanation = flash_attn_ext.explain(q, q, q)
    assert explanation.forward == "tiled on the CPU; no workspace"
    assert explanation.backward.startswith("tiled on the CPU; delta by its own kernel; workspace")
    assert explanation.forward in str(explanation) and explanation.backward in str(explanation)


@pytest.mark.parametrize(
    ("sq", "sk", "divided"), [(1, 2048, False), (1, 2049, True), (64, 4096, True), (65, 4096, False)]
)
def test_the_cpu_divides_the_keys_of_few_queries(sq, sk, divided):
    q, k = torch.zeros(1, 2, sq, 8), torch.zeros(1, 2, sk, 8)
    words = "tiled on the CPU, keys in parts of 2048; no workspace" if divided else "tiled on the CPU; no workspace"
    assert flash_attn_ext.explain(q, k, k).forward == words


def test_the_cpu_forms_dbias_on_its_way():
    q = torch.zeros(1, 1, 8, 8)
    for shape, words in (((8, 8), "dBias from the same dS"), ((8, 1), "dBias from sums of rows")):
        bias = torch.zeros(shape, requires_grad=True)
        assert words in flash_attn_ext.explain(q, q, q, bias=bias).backward


@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_a_call_that_nothing_runs_has_no_plan(backend):
    q = torch.zeros(1, 1, 8, 8)
    if backend not in _C.build_info()["backends"]:
        pytest.skip("not in this build")
    explanation = flash_attn_ext.explain(q, q, q, backend=backend)
    assert (explanation.backend, explanation.forward, explanation.backward) == (None, None, None)
