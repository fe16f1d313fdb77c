"""Which forward kernels each call takes, at each border between them, and what all plans share.

Plans need no GPU: tensors lie in CPU memory here, and are never read."""

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import _C
from support.plans import F16, F32, F64, SHORT_BIAS, SINGLE_TILE, WARP_SPECIALISED, Call, label, mismatches


def causal(**more) -> dict:
    return {"causal": "top_left"} | more


FORWARD = [
    # Head dims of 64 and few queries: the kernel for few queries up to 64, or 448 in causal calls.
    (Call(64), dict(kernel="streaming", score_mode="scale only", head_dims=(64, 64), tile=(64, 64), workspace_bytes=0)),
    (
        Call(65, 80),
        dict(kernel="streaming", score_mode="scale only", head_dims=(64, 64), tile=(128, 64), workspace_bytes=0),
    ),
    (Call(448, options=causal()), dict(kernel="streaming", score_mode="scale only", tile=(64, 64), head_dims=(64, 64))),
    (
        Call(449, options=causal()),
        dict(kernel="streaming", score_mode="scale only", tile=(128, 64), head_dims=(64, 64)),
    ),
    # Whole heads: 65 to 128 queries, 81 to 128 keys, all visible, head dim 64.
    (Call(64, 128), dict(kernel="streaming", score_mode="scale only", tile=(64, 64))),
    (Call(65, 81), dict(kernel="whole heads")),
    (Call(128, 128), dict(kernel="whole heads")),
    (Call(128, 80), dict(kernel="streaming", score_mode="scale only", tile=(128, 64))),
    (Call(128, 129), dict(kernel="streaming", score_mode="scale only", tile=(128, 64))),
    (Call(129, 128), dict(kernel="streaming", score_mode="scale only", tile=(128, 64))),
    (Call(128, d=63), dict(kernel="streaming", score_mode="scale only", tile=(128, 64))),
    (Call(128, d=64, dv=63), dict(kernel="streaming", score_mode="scale only", tile=(128, 64))),
    (Call(128, options={"window": (9, 9)}), dict(kernel="streaming", score_mode="scale only", tile=(128, 64))),
    (Call(128, options={"dropout_p": 0.1}), dict(kernel="streaming", score_mode="dropout")),
    # Bias-stationary: up to 64 queries and keys, head dims up to 160 with a bias or a mask, else up to 32 and from 65
    # to 128.
    (
        Call(49, d=32, bias=(1, 16, 49, 49), mask=(8, 1, 49, 49)),
        dict(
            kernel="bias-stationary",
            head_dims=(32, 32),
            workspace={"mask bits": 8 * 49 * 32, "NaN flags": 8 * 16 * 4},
        ),
    ),
    (Call(64, mask=(8, 1, 1, 64)), dict(kernel="bias-stationary", head_dims=(64, 64))),
    (Call(64, d=33, bias=(8, 1, 64, 64)), dict(kernel="bias-stationary", head_dims=(64, 64))),
    (Call(1, 64, key_heads=4, bias=(1, 16, 1, 64)), dict(kernel="bias-stationary")),
    (Call(65, 64, bias=(1, 16, 65, 64)), dict(kernel="streaming", score_mode="bias and mask")),
    (Call(64, 65, bias=(1, 16, 64, 65)), dict(kernel="streaming", score_mode="bias and mask")),
    *(
        (Call(64, d=d, bias=(1, 16, 64, 64)), dict(kernel="bias-stationary", head_dims=(compiled, compiled)))
        for d, compiled in ((65, 96), (97, 128), (160, 160))
    ),
    (Call(64, d=161, bias=(1, 16, 64, 64)), dict(kernel="streaming")),
    *((Call(64, d=d), dict(kernel="bias-stationary")) for d in (32, 65, 128)),
    *((Call(64, d=d), dict(kernel="streaming")) for d in (33, 129)),
    (Call(64, bias=(1, 16, 64, 64), bias_dtype=F32), dict(kernel="streaming", score_mode="generic")),
    (Call(64, bias=(1, 16, 64, 64), options={"dropout_p": 0.1}), dict(kernel="streaming", score_mode="generic")),
    # Head dims: 64, 96, 128, 192, 256, 512, 576; kernels that change scores skip 96, and 576 has a generic kernel only.
    (Call(500, d=65), dict(score_mode="scale only", head_dims=(96, 96))),
    (Call(500, d=64, dv=96), dict(score_mode="scale only", head_dims=(96, 96))),
    (Call(500, d=97), dict(score_mode="scale only", head_dims=(128, 128))),
    (Call(500, d=129), dict(score_mode="scale only", head_dims=(192, 192))),
    (Call(500, d=193), dict(score_mode="scale only", head_dims=(256, 256))),
    (Call(500, d=257), dict(score_mode="scale only", head_dims=(512, 512))),
    (Call(500, d=513, dv=64), dict(score_mode="generic", head_dims=(576, 576), tile=(32, 32))),
    (Call(500, d=576, dv=512), dict(score_mode="generic", head_dims=(576, 576))),
    (Call(500, d=96, options={"softcap": 9.0}), dict(score_mode="generic", head_dims=(128, 128))),
    (Call(500, d=96, options={"dropout_p": 0.1}), dict(score_mode="dropout", head_dims=(128, 128))),
    # What changes a score.
    (Call(500, d=128, bias=(1, 1, 500, 500)), dict(score_mode="bias and mask", head_dims=(128, 128))),
    (Call(500, d=128, mask=(1, 1, 1, 500)), dict(score_mode="bias and mask", head_dims=(128, 128))),
    (
        Call(500, d=128, mask=(8, 1, 1, 500)),
        dict(score_mode="bias and mask", workspace_bytes=2304, workspace={"mask tiles": 64, "NaN flags": 2048}),
    ),
    (
        Call(500, d=128, mask=(1, 1, 1, 500), options={"dropout_p": 0.1}),
        dict(score_mode="generic", head_dims=(128, 128)),
    ),
    (Call(500, d=128, bias=(1, 1, 500, 500), bias_dtype=F32), dict(score_mode="generic", head_dims=(128, 128))),
    (Call(500, d=192, mask=(1, 1, 1, 500)), dict(score_mode="generic", head_dims=(192, 192))),
    (Call(500, slopes=True), dict(score_mode="generic", head_dims=(64, 64))),
    (Call(500, options={"scale": -1.0}), dict(score_mode="generic", head_dims=(64, 64))),
    (Call(500, sink=True), dict(score_mode="scale only", head_dims=(64, 64))),
    # float32 has fewer head dims, and smaller generic tiles for few queries.
    (Call(64, dtype=F32), dict(score_mode="generic", head_dims=(64, 64))),
    (Call(65, dtype=F32), dict(score_mode="scale only", head_dims=(64, 64))),
    (Call(500, d=65, dtype=F32), dict(score_mode="scale only", head_dims=(128, 128))),
    (Call(500, d=129, dtype=F32), dict(score_mode="scale only", head_dims=(256, 256))),
    (Call(500, dtype=F32, options={"allow_tf32": True}), dict(score_mode="scale only", head_dims=(64, 64), tf32=True)),
    (
        Call(500, d=129, dtype=F32, options={"allow_tf32": True}),
        dict(score_mode="scale only", head_dims=(256, 256), tf32=False),
    ),
    (
        Call(500, dtype=F32, options={"allow_tf32": True, "softcap": 9.0}),
        dict(score_mode="generic", head_dims=(64, 64), tf32=False),
    ),
    (Call(500, dtype=F64), dict(kernel="one warp per row, without tensor cores", workspace_bytes=0)),
    # Calls that short ones take repair NaN by themselves; others have a flag per warp.
    (Call(500), dict(head_dims=(64, 64), tile=(128, 64), workspace_bytes=0)),
    (Call(500, d=128), dict(workspace_bytes=2048, workspace={"NaN flags": 2048})),
]

# Sequences so long that no portable kernel is faster.
LONG = 2048


def hopper(options: dict | None = None, sq: int = LONG, **more) -> Call:
    return Call(sq, options={"backend": "sm90"} | (options or {}), **more)


FORWARD_SM90 = [
    # What changes scores: dropout, masks and biases have kernels of few head dims. A call takes the next larger one.
    (hopper(), dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(64, 64))),
    (hopper(dtype=F16), dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(64, 64))),
    (hopper(causal()), dict(score_mode="scale only")),
    (hopper({"window": (100, 9)}), dict(ctas_per_sm=2)),
    (hopper(sink=True), dict(score_mode="scale only")),
    (hopper(key_heads=4), dict(score_mode="scale only")),
    (hopper({"dropout_p": 0.1}), dict(score_mode="dropout", head_dims=(64, 64))),
    (hopper({"dropout_p": 0.1}, d=128), dict(score_mode="dropout", head_dims=(128, 128))),
    (hopper({"dropout_p": 0.1}, d=96), dict(score_mode="dropout", head_dims=(128, 128))),
    (hopper({"dropout_p": 0.1}, d=192), dict(score_mode="dropout", head_dims=(192, 192), tile=(128, 64))),
    (hopper(d=64, bias=(1, 1, LONG, LONG)), dict(score_mode="bias and mask", head_dims=(64, 64))),
    # Short heads with a bias, and a mask of keys, up to head dim 32.
    *(
        (hopper(sq=sq, sk=sk, d=d, bias=(1, 16, sq, sk), mask=mask), dict(kernel=kernel))
        for sq, sk, d, mask, kernel in (
            (256, 256, 32, None, SHORT_BIAS),
            (65, 136, 8, (8, 1, 1, 136), SHORT_BIAS),
            (64, 136, 32, None, WARP_SPECIALISED),
            (256, 128, 32, None, WARP_SPECIALISED),
            (256, 264, 32, None, WARP_SPECIALISED),
            (257, 256, 32, None, WARP_SPECIALISED),
            (256, 256, 33, None, WARP_SPECIALISED),
            (256, 256, 32, (8, 1, 256, 256), WARP_SPECIALISED),
        )
    ),
    (
        hopper(sq=200, sk=136, d=24, bias=(1, 16, 200, 136)),
        dict(
            kernel=SHORT_BIAS,
            score_mode="bias and mask",
            head_dims=(32, 32),
            tile=(256, 32),
            workspace={"NaN flags": 8 * 16 * 8},
        ),
    ),
    (hopper(d=128, mask=(1, 1, 1, LONG)), dict(score_mode="mask", head_dims=(128, 128))),
    (
        hopper(d=128, mask=(1, 1, LONG, LONG)),
        dict(score_mode="mask", workspace={"mask tiles": 1024, "mask bits": 557056}),
    ),
    (hopper(d=128, mask=(1, 1, LONG, 1)), dict(score_mode="generic")),  # its bits would be many more than its elements
    # TMA reads no rows of a bias that is broadcast along queries.
    (hopper(d=128, bias=(1, 1, 1, LONG)), dict(score_mode="key bias")),
    (hopper({"dropout_p": 0.1}, bias=(8, 16, 1, LONG)), dict(score_mode="key bias and dropout")),
    (hopper({"causal": "top_left"}, d=128, bias=(1, 1, 1, LONG)), dict(score_mode="key bias")),
    # Larger tiles of queries, unless the diagonal lies within a tile of keys.
    (hopper({"causal": "top_left"}, bias=(1, 1, 1, LONG)), dict(score_mode="key bias", tile=(192, 128))),
    (
        hopper({"causal": "bottom_right"}, sk=LONG + 64, bias=(1, 1, 1, LONG + 64)),
        dict(score_mode="key bias", tile=(128, 128)),
    ),
    (hopper({"causal": "top_left"}, sq=512, bias=(1, 1, 1, 512)), dict(score_mode="key bias", tile=(128, 128))),
    (
        hopper({"causal": "top_left"}, d=128, bias=(8, 16, 1, LONG), bias_dtype=F32),
        dict(score_mode="key bias", workspace={"maxima of the bias": 8 * 16 * LONG // 128 * 4}),
    ),
    # No kernel of Hopper's computes the gradient of these.
    (hopper({"window": (100, 0)}, d=128, bias=(8, 16, 1, LONG), bias_dtype=F32), dict(kernel="streaming")),
    (hopper({"dropout_p": 0.1}, d=128, bias=(8, 16, 1, LONG), bias_dtype=F32), dict(kernel="streaming")),
    (hopper(d=192, bias=(1, 1, 1, LONG)), dict(score_mode="generic")),
    (hopper(d=128, bias=(1, 1, LONG, LONG), mask=(1, 1, 1, LONG)), dict(score_mode="bias and mask")),
    (hopper(d=192, dv=128, mask=(1, 1, 1, LONG)), dict(score_mode="mask", head_dims=(192, 128), tile=(128, 64))),
    (hopper({"dropout_p": 0.1}, mask=(1, 1, 1, LONG)), dict(score_mode="mask and dropout", head_dims=(64, 64))),
    (hopper({"dropout_p": 0.1}, mask=(8, 1, LONG, LONG), d=96), dict(score_mode="mask and dropout")),
    (hopper({"dropout_p": 0.1}, mask=(8, 1, LONG, LONG), d=192), dict(score_mode="generic")),
    (hopper({"dropout_p": 0.1}, bias=(1, 16, LONG, LONG)), dict(score_mode="bias, mask and dropout")),
    (
        hopper(bias=(1, 1, LONG, LONG), bias_dtype=F32),
        dict(kernel="streaming", score_mode="generic"),
    ),  # sm80's, as in the backward pass
    (hopper(slopes=True), dict(score_mode="ALiBi", head_dims=(64, 64), tile=(192, 128))),
    (hopper({"causal": "top_left"}, slopes=True), dict(score_mode="ALiBi", tile=(192, 128))),
    (hopper(slopes=True, batch=1, heads=8), dict(score_mode="ALiBi", tile=(128, 128))),  # fills the SMs more evenly
    (hopper({"causal": "top_left"}, slopes=True), dict(score_mode="ALiBi", head_dims=(64, 64))),
    (hopper({"window": (99, 0)}, slopes=True, d=65), dict(score_mode="ALiBi", head_dims=(128, 128))),
    (hopper({"window": (99, 1)}, slopes=True), dict(score_mode="ALiBi")),
    (hopper({"causal": "top_left", "scale": -1.0}, slopes=True), dict(score_mode="generic")),
    (hopper({"causal": "top_left"}, slopes=True, d=129), dict(score_mode="generic")),
    (hopper({"causal": "top_left"}, slopes=True, mask=(1, 1, LONG, LONG)), dict(score_mode="ALiBi and mask")),
    (hopper(slopes=True, mask=(1, 1, LONG, LONG), d=129), dict(score_mode="generic", head_dims=(192, 192))),
    (hopper({"softcap": 9.0}), dict(score_mode="softcap", head_dims=(64, 64))),
    (hopper({"softcap": 9.0}, d=65), dict(score_mode="softcap", head_dims=(128, 128))),
    (hopper({"softcap": 9.0, "scale": -1.0}, d=256), dict(score_mode="softcap", head_dims=(256, 256))),
    (hopper({"softcap": 9.0, "dropout_p": 0.1}), dict(score_mode="generic")),
    (hopper({"softcap": 9.0}, slopes=True), dict(score_mode="generic")),
    (hopper({"softcap": 9.0}, mask=(1, 1, LONG, LONG)), dict(score_mode="softcap and mask")),
    (hopper({"softcap": 9.0}, mask=(1, 1, LONG, LONG), d=129), dict(score_mode="generic", head_dims=(192, 192))),
    (hopper({"softcap": 9.0, "scale": -1.0}, mask=(1, 1, LONG, LONG)), dict(score_mode="generic")),
    (hopper({"softcap": 9.0}, mask=(8, 1, 1, 4096), sq=16, sk=4096, d=256), dict(kernel="split-KV")),
    (hopper({"scale": -1.0}), dict(score_mode="generic")),
    # Head dims of q and of v.
    (hopper(d=1), dict(head_dims=(64, 64))),
    (hopper(d=65), dict(head_dims=(80, 80))),
    (hopper(d=64, dv=65), dict(head_dims=(80, 80))),
    (hopper(d=80), dict(head_dims=(80, 80))),
    (hopper(d=81), dict(head_dims=(96, 96))),
    (hopper(d=97), dict(head_dims=(128, 128))),
    (hopper(d=96, dv=128), dict(head_dims=(128, 128))),
    (hopper(d=129, dv=1), dict(head_dims=(192, 128))),
    (hopper(d=192, dv=128), dict(head_dims=(192, 128))),
    (hopper(d=129), dict(head_dims=(192, 192))),
    (hopper(d=128, dv=192), dict(head_dims=(192, 192))),
    (hopper(d=128, dv=193), dict(head_dims=(128, 256))),
    (hopper(d=64, dv=512), dict(head_dims=(128, 256))),
    (hopper(d=193), dict(head_dims=(256, 256))),
    (hopper(d=129, dv=193), dict(head_dims=(256, 256))),
    (hopper(d=256, dv=512), dict(head_dims=(256, 256))),
    (hopper(d=257), dict(kernel=WARP_SPECIALISED, head_dims=(512, 256))),
    (hopper(d=512, dv=64), dict(kernel=WARP_SPECIALISED, head_dims=(512, 256))),
    (hopper(d=576, dv=512), dict(kernel=WARP_SPECIALISED, head_dims=(576, 256), tile=(128, 48))),
    (hopper(d=513, dv=8), dict(kernel=WARP_SPECIALISED, head_dims=(576, 256))),
    (hopper({"softcap": 9.0}, d=576, dv=512), dict(kernel="streaming", head_dims=(576, 576))),
    (hopper({"dropout_p": 0.1}, d=257), dict(kernel="streaming", head_dims=(512, 512))),
    # So are short sequences of small head dims, in kernels of their own; the shortest ones are portable kernels'.
    (Call(224, options={"backend": "sm90"}), dict(kernel=SINGLE_TILE, head_dims=(64, 64))),
    (
        Call(64, options={"backend": "sm90"}),
        dict(kernel="streaming", score_mode="scale only", tile=(64, 64), head_dims=(64, 64)),
    ),
    (Call(64, d=129, options={"backend": "sm90"}), dict(kernel="streaming", head_dims=(192, 192))),
    (Call(65, d=65, options={"backend": "sm90"}), dict(kernel=SINGLE_TILE, head_dims=(128, 128))),
    (Call(65, dv=65, options={"backend": "sm90"}), dict(kernel=SINGLE_TILE, head_dims=(128, 128))),
    (Call(129, dv=65, options={"backend": "sm90"}), dict(kernel=WARP_SPECIALISED)),
]


@pytest.mark.parametrize(("call", "expected"), FORWARD, ids=label)
def test_forward(call, expected):
    assert mismatches(call.plans()[0], expected) == {}


@pytest.mark.parametrize(("call", "expected"), FORWARD_SM90, ids=label)
def test_forward_on_hopper(call, expected):
    assert mismatches(call.plans()[0], expected) == {}


@pytest.mark.parametrize("name", ["mask tiles", "NaN flags", "tile list"])
@pytest.mark.parametrize(
    ("d", "dv", "slices"), [(64, 64, 1), (128, 128, 1), (256, 256, 1), (64, 257, 2), (256, 512, 2)]
)
def test_the_workspace_on_hopper(d, dv, slices, name):
    """A flag for each warp that computes and a number for each tile of queries; of a mask, a byte for 64 x 64."""
    call = hopper(d=d, dv=dv, mask=(1, 16, LONG, LONG))
    plan = call.plans()[0]
    queries = plan.tile[0]
    tiles = call.batch * call.heads * -(-LONG // queries) * slices
    expected = {"mask tiles": 16 * (LONG // 64) ** 2, "NaN flags": tiles * queries // 16, "tile list": tiles * 4}[name]
    assert plan.workspace[name] == expected
    assert "mask tiles" not in hopper(d=d, dv=dv).plans()[0].workspace


SWITCHES = {
    "FLASH_ATTN_EXT_WORKSPACE_MIB": (r"of MiB from 0 \(.*\) to 2048", ["-1", "2049"]),
    "FLASH_ATTN_EXT_MULTIPROCESSORS": (r"of SMs from 1 to 1024", ["0", "-5", "1025"]),
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


def test_explain_has_the_plans():
    q = torch.zeros(1, 1, 8, 8)
    explanation = flash_attn_ext.explain(q, q, q)
    assert mismatches(explanation.forward, dict(kernel="tiled on the CPU", workspace_bytes=0)) == {}
    backward = dict(kernel="tiled on the CPU", delta="by its own kernel", workspace={"delta": 32})
    assert mismatches(explanation.backward, backward) == {}
    assert str(explanation.forward) in str(explanation) and str(explanation.backward) in str(explanation)


@pytest.mark.parametrize(
    ("sq", "sk", "divided"), [(1, 2048, False), (1, 2049, True), (64, 4096, True), (65, 4096, False)]
)
def test_the_cpu_divides_the_keys_of_few_queries(sq, sk, divided):
    q, k = torch.zeros(1, 2, sq, 8), torch.zeros(1, 2, sk, 8)
    assert flash_attn_ext.explain(q, k, k).forward.keys_per_split == (2048 if divided else None)


def test_the_cpu_forms_dbias_on_its_way():
    q = torch.zeros(1, 1, 8, 8)
    for shape, source in (((8, 8), "from the same dS"), ((8, 1), "from row sums")):
        bias = torch.zeros(shape, requires_grad=True)
        assert flash_attn_ext.explain(q, q, q, bias=bias).backward.dbias == source


@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_a_call_that_nothing_runs_has_no_plan(backend):
    q = torch.zeros(1, 1, 8, 8)
    if backend not in _C.build_info()["backends"]:
        pytest.skip("not in this build")
    explanation = flash_attn_ext.explain(q, q, q, backend=backend)
    assert (explanation.backend, explanation.forward, explanation.backward) == (None, None, None)
