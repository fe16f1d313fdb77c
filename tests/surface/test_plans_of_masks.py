"""What a boolean mask changes on Hopper: which kernels take batch entries whose mask leaves one key interval, and which
backward kernels run where its iterations are listed (csrc/kernels/schedule/mask_iterations.h).

Lists grow with queries times keys. Where the mask does not, they have a bound, beyond which other kernels run.
"""

import pytest
import torch

from flash_attn_ext._explanation import Plan
from support.plans import KEY_STATIONARY, SINGLE_TILE, TWO_PASS, WARP_SPECIALISED, Call, mismatches, packed_plans

LONG = 2048
LISTED = dict(kernel=KEY_STATIONARY, score_mode="mask")

# The mask, and the number of packed sequences or None; whether its lists have a bound.
MASKS = [
    ((1, 1, LONG, LONG), None, False),
    ((8, 16, LONG, LONG), None, False),
    ((1, 1, 1, LONG), None, True),
    ((8, 1, 1, LONG), None, True),
    ((2, 1, LONG, LONG), 2, False),
    ((1, 1, LONG, LONG), 2, True),  # each sequence has lists of its own
    ((2, 1, 1, LONG), 2, True),
]


def packed_plan(mask: tuple[int, ...], sequences: int) -> Plan:
    return packed_plans((LONG,) * sequences, d=64, heads=16, mask=torch.ones(mask, dtype=torch.bool))[1]


def backward_plan(mask: tuple[int, ...], sequences: int | None) -> Plan:
    if sequences is not None:
        return packed_plan(mask, sequences)
    return Call(LONG, mask=mask, options={"backend": "sm90"}).plans()[1]


@pytest.mark.parametrize("mebibytes", ["0", "64"])
@pytest.mark.parametrize(("mask", "sequences", "is_bounded"), MASKS, ids=str)
def test_lists_that_outgrow_the_mask_have_a_bound(mask, sequences, is_bounded, mebibytes, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    is_listed = mismatches(backward_plan(mask, sequences), LISTED) == {}
    assert is_listed == (mebibytes != "0" or not is_bounded)


def forward_plan(options: dict | None = None, sq: int = LONG, **more) -> Plan:
    return Call(sq, options={"backend": "sm90"} | (options or {}), **more).plans()[0]


PADDING = (8, 1, 1, LONG)
INTERVALS = [
    (dict(mask=PADDING), dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(64, 64))),
    (dict(mask=(1, 1, 1, LONG), d=128), dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(128, 128))),
    (dict(mask=PADDING, d=96), dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(96, 96))),
    (dict(mask=PADDING, d=192, dv=128), dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(192, 128))),
    (
        dict(mask=PADDING, options={"causal": "top_left"}),
        dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(64, 64)),
    ),
    (
        dict(mask=PADDING, options={"causal": "bottom_right"}),
        dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(64, 64)),
    ),
    (
        dict(mask=PADDING, options={"window": (100, 100)}),
        dict(kernel=WARP_SPECIALISED, ctas_per_sm=2, head_dims=(64, 64)),
    ),
    (
        dict(mask=PADDING, d=128, options={"dropout_p": 0.1}),
        dict(kernel=WARP_SPECIALISED, score_mode="dropout", head_dims=(128, 128)),
    ),
    (
        dict(mask=PADDING, d=96, options={"dropout_p": 0.1}),
        dict(kernel=WARP_SPECIALISED, score_mode="dropout", head_dims=(128, 128)),
    ),
    (
        dict(mask=PADDING, d=192, options={"dropout_p": 0.1}),
        dict(kernel=WARP_SPECIALISED, score_mode="dropout", head_dims=(192, 192)),
    ),
    (dict(mask=(8, 1, 1, 80), sq=80, d=192), dict(kernel=SINGLE_TILE, score_mode="scale only", head_dims=(192, 192))),
    (dict(mask=PADDING, options={"softcap": 9.0}), dict(kernel=WARP_SPECIALISED, score_mode="softcap")),
    (dict(mask=PADDING, slopes=True), dict(kernel=WARP_SPECIALISED, score_mode="ALiBi")),
    (
        dict(mask=(1, 1, 1, 400), sq=400, batch=1),
        dict(kernel=WARP_SPECIALISED, score_mode="scale only", tile=(128, 128), head_dims=(64, 64)),
    ),
    # Padding that is added to scores, as a bias that is broadcast along queries.
    (dict(bias=PADDING), dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(64, 64))),
    (dict(bias=(8, 16, 1, LONG), d=128), dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(128, 128))),
    (
        dict(bias=(1, 1, 1, LONG), d=96, options={"dropout_p": 0.1}),
        dict(kernel=WARP_SPECIALISED, score_mode="dropout", head_dims=(128, 128)),
    ),
    (dict(bias=(8, 1, 1, 200), sq=200, d=128), dict(kernel=WARP_SPECIALISED, score_mode="scale only")),
]
NO_INTERVALS = [
    dict(mask=PADDING, slopes=True, sk=LONG, sq=LONG - 1),  # ALiBi would have another diagonal
    dict(mask=(8, 16, 1, LONG)),  # of each head
    dict(mask=(8, 1, LONG, LONG)),
    dict(mask=(8, 1, LONG, 1)),
    dict(mask=(8, 1, 1, LONG), sq=LONG - 1, sk=LONG, options={"causal": "bottom_right"}),
    dict(mask=PADDING, options={"dropout_p": 0.1, "softcap": 9.0}, d=192),  # no kernel without a mask that is faster
    dict(mask=PADDING, bias=(1, 1, LONG, LONG)),
    dict(mask=(8, 1, 1, 64), sq=64),  # the portable kernels'
    dict(mask=(1, 1, 1, LONG), sq=256, sk=LONG, batch=1, heads=2),  # split-KV
    dict(bias=(8, 1, 1, 128), sq=128),
    dict(mask=(8, 1, 1, 200), sq=200),
    dict(bias=(8, 1, 1, 128), sq=128, options={"dropout_p": 0.1}),
    dict(bias=PADDING, options={"causal": "bottom_right"}),
    dict(bias=(8, 1, LONG, LONG)),
]


@pytest.mark.parametrize(("call", "expected"), INTERVALS, ids=str)
def test_padding_takes_kernels_without_a_mask(call, expected):
    assert mismatches(forward_plan(**call).intervals, expected) == {}


@pytest.mark.parametrize("call", NO_INTERVALS, ids=str)
def test_where_one_kernel_takes_all_entries(call):
    assert forward_plan(**call).intervals is None


# Where one tile has all keys, a kernel reads a mask or a bias of keys and needs no scan of it. Elsewhere, and beside
# anything else, other kernels run.
IN_ONE_TILE = [
    (dict(mask=(8, 1, 1, 128), sq=128), dict(tile=(128, 128))),
    (dict(mask=(8, 16, 1, 77), sq=197, sk=77), dict(tile=(256, 80))),
    (dict(bias=(8, 1, 1, 161), sq=300, sk=161, d=40), dict(tile=(320, 208))),
    (dict(bias=(1, 1, 1, 256), sq=256), dict(tile=(256, 256))),
    (dict(mask=(8, 1, 1, 64), sq=64, d=128), dict(tile=(64, 80), head_dims=(128, 128))),
    (dict(mask=(8, 1, 1, 160), sq=160, options={"causal": "top_left"}), dict(tile=(192, 160))),
]
NOT_IN_ONE_TILE = [
    dict(mask=(8, 1, 1, 161), sq=161, options={"causal": "top_left"}),
    dict(mask=(8, 1, 1, 257), sq=257),
    dict(mask=(8, 1, 1, 129), sq=129, d=128),
    dict(mask=(8, 1, 1, 80), sq=80, d=192),
    dict(mask=(8, 1, 80, 80), sq=80),
    dict(mask=(8, 1, 1, 80), sq=80, options={"dropout_p": 0.1}),
    dict(mask=(8, 1, 1, 80), bias=(8, 1, 1, 80), sq=80),
    dict(bias=(8, 1, 1, 80), sq=80, options={"causal": "top_left"}),
    dict(mask=(8, 1, 1, 80), sq=80, options={"scale": -0.1}),
    dict(bias=(8, 1, 1, 80), sq=80, options={"scale": 1e-4}),
]


@pytest.mark.parametrize(("call", "expected"), IN_ONE_TILE, ids=str)
def test_keys_in_one_tile(call, expected):
    plan = forward_plan(**call)
    assert mismatches(plan, dict(kernel=SINGLE_TILE, score_mode="key bias") | expected) == {}
    assert plan.intervals is None


@pytest.mark.parametrize("call", NOT_IN_ONE_TILE, ids=str)
def test_keys_not_in_one_tile(call):
    assert forward_plan(**call).score_mode != "key bias" or forward_plan(**call).kernel != SINGLE_TILE


# Kernels that know a mask or a bias are compiled for head dims 64 and 128, those of masks for larger ones, too: calls
# between take the next.
BETWEEN = [
    (dict(mask=(1, 1, LONG, LONG), d=80), dict(score_mode="mask", head_dims=(128, 128))),
    (dict(mask=(1, 1, LONG, LONG), d=64, dv=72), dict(score_mode="mask", head_dims=(128, 128))),
    (
        dict(mask=(1, 1, LONG, LONG), bias=(1, 1, LONG, LONG), d=96),
        dict(score_mode="bias and mask", head_dims=(128, 128)),
    ),
    (
        dict(mask=(1, 1, LONG, LONG), d=96, options={"softcap": 9.0}),
        dict(score_mode="softcap and mask", head_dims=(128, 128)),
    ),
    (dict(mask=(1, 1, LONG, LONG), d=129), dict(score_mode="mask", head_dims=(192, 192))),
    (dict(mask=(1, 1, LONG, LONG), d=64, dv=256), dict(score_mode="mask", head_dims=(128, 256))),
    (dict(mask=(1, 1, LONG, LONG), bias=(1, 1, LONG, LONG), d=129), dict(score_mode="generic", head_dims=(192, 192))),
]


@pytest.mark.parametrize(("call", "expected"), BETWEEN, ids=str)
def test_head_dims_between_those_of_kernels_with_masks(call, expected):
    assert mismatches(forward_plan(**call), expected) == {}


def test_the_workspace_of_intervals():
    """Two numbers for each row of the mask, and the workspace of the other kernel's plan."""
    plan = forward_plan(mask=PADDING)
    alone = Call(LONG, options={"backend": "sm90"}).plans()[0]
    assert plan.workspace["key intervals"] == 64
    assert plan.workspace["plan of key intervals"] == alone.workspace_bytes
    assert plan.intervals == alone


SQUARE, WITH_BIAS = (1, 16, LONG, LONG), ("q", "k", "v", "bias")
MANY = 8 * LONG + 8
# The gradient of a bias sums dS that is recomputed, where the mask hides the same keys from all queries.
BESIDE_BIAS = [
    *(
        (dict(mask=mask, d=d), dict(kernel=KEY_STATIONARY, score_mode="bias and mask", dbias=None))
        for mask in (SQUARE, PADDING, (8, 16, 1, LONG))
        for d in (40, 80, 128)
    ),
    (dict(mask=SQUARE, d=128), dict(pre_signals_dq=True, head_dims=(128, 128))),
    (dict(mask=SQUARE, d=136), dict(portable=True)),
    (dict(mask=(8, 1, 1, MANY), sk=MANY), dict(kernel=TWO_PASS, score_mode="bias and mask")),  # few queries
    (dict(mask=(1, 1, 1, 256), sk=256, batch=1), dict(kernel=TWO_PASS)),  # few keys, whose queries would be divided
    (dict(mask=(8, 1, 1, 256), sk=256), dict(kernel=KEY_STATIONARY)),
    (dict(mask=(1, 1, LONG, 1)), dict(kernel=TWO_PASS, score_mode="generic")),
    (dict(mask=PADDING, wanted=WITH_BIAS), dict(kernel=KEY_STATIONARY, dbias="from dS recomputed over the batch")),
    (dict(mask=SQUARE, wanted=WITH_BIAS), dict(kernel=TWO_PASS, dbias="from the materialised dS")),
    (dict(mask=PADDING, wanted=WITH_BIAS, d=128), dict(kernel=TWO_PASS, dbias="from the materialised dS")),
]


@pytest.mark.parametrize(("call", "expected"), BESIDE_BIAS, ids=str)
def test_backward_kernels_of_a_bias_beside_a_mask(call, expected):
    bias = (1, 16, LONG, call.get("sk", LONG))
    assert mismatches(Call(LONG, bias=bias, options={"backend": "sm90"}, **call).plans()[1], expected) == {}


@pytest.mark.parametrize("tokens", [128, LONG])
def test_lists_beside_a_bias_have_a_bound(tokens, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "0")
    call = Call(tokens, bias=(1, 16, tokens, tokens), mask=(8, 1, 1, tokens), options={"backend": "sm90"})
    assert mismatches(call.plans()[1], dict(portable=True)) == {}
