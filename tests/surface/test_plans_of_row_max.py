"""Which forward kernels write the largest score of each row. Plans need no GPU."""

import dataclasses

import pytest

from flash_attn_ext._explanation import Plan
from support.plans import F16, F32, F64, SINGLE_TILE, WARP_SPECIALISED, Call, label, mismatches


def forward_plan(call: Call, backend: str, wants_row_max: bool) -> Plan:
    options = call.options | dict(backend=backend, wants_row_max=wants_row_max)
    return dataclasses.replace(call, options=options).plans()[0]


CAUSAL, WINDOW = {"causal": "top_left"}, {"window": (700, 0)}

SAME = [  # on Hopper, the same tiles and workspace as without it
    Call(4096),
    Call(4096, heads=2),
    Call(4096, dtype=F16),
    Call(1024, options=CAUSAL),
    Call(4096, options=WINDOW),
    Call(4096, d=96),
    Call(4096, d=128),
    Call(4096, d=128, dtype=F16),
    Call(4096, d=128, options=CAUSAL),
    Call(8192, d=128, options=CAUSAL),
    Call(4096, d=128, batch=1, heads=2, options=WINDOW),
    Call(4096, d=192, dv=128),
    Call(4096, d=256),
    Call(4096, d=256, dv=512),
    Call(4096, mask=(8, 1, 4096, 4096)),
    Call(4096, d=128, mask=(8, 1, 1, 4096)),
    Call(4096, d=128, intervals=(8, 1, 4096, 4)),
    Call(4096, d=192, dv=128, mask=(8, 1, 4096, 4096)),
    Call(4096, d=256, intervals=(8, 1, 4096, 4)),
    Call(4096, bias=(1, 16, 4096, 4096)),
    Call(4096, d=128, slopes=True, options={"softcap": 9.0}),
    Call(200),
    Call(64),
    Call(4096, dtype=F32, options={"backend": "sm80"}),
]


@pytest.mark.parametrize("call", SAME, ids=str)
def test_hopper_keeps_its_tiles(call):
    backend = call.options.get("backend", "sm90")
    plan, without = (forward_plan(call, backend, wants) for wants in (True, False))
    assert plan.row_max and not without.row_max
    assert "row max" in str(plan) and "row max" not in str(without)
    names = {field.name for field in dataclasses.fields(Plan)} - {"row_max", "words", "intervals"}
    assert {name: getattr(plan, name) for name in names} == {name: getattr(without, name) for name in names}


def hopper(**expected) -> dict:
    return dict(kernel=WARP_SPECIALISED, row_max=True) | expected


OTHERS = [  # on Hopper, the kernels of calls that have more
    (Call(4096, options={"dropout_p": 0.1}), hopper(score_mode="generic", head_dims=(64, 64))),
    (Call(4096, d=128, options={"softcap": 9.0}), hopper(score_mode="generic", head_dims=(128, 128))),
    (Call(4096, d=192, mask=(1, 1, 1, 4096)), hopper(score_mode="mask", head_dims=(256, 256))),
    (Call(4096, d=128, mask=(8, 1, 4096, 1)), hopper(score_mode="generic", head_dims=(128, 128))),
    (Call(4096, d=96, mask=(8, 1, 4096, 4096)), hopper(score_mode="mask", head_dims=(128, 128))),
    (Call(4096, d=192), hopper(score_mode="scale only", head_dims=(256, 256))),
    (Call(4096, d=128, dv=256), hopper(score_mode="scale only", head_dims=(256, 256))),
    (Call(4096, d=72), hopper(score_mode="scale only", head_dims=(96, 96), tile=(128, 128))),
    # Split-KV only has it in the portable kernels.
    (Call(256, 16384, batch=1, heads=2), dict(kernel="split-KV", portable=True, row_max=True)),
    (Call(256, 16384, d=128, batch=1, heads=2), dict(kernel="split-KV", portable=True, row_max=True)),
    (Call(1, 16384, d=128, batch=1), dict(kernel="split-KV", portable=True, row_max=True)),
    (Call(200), dict(kernel=SINGLE_TILE, row_max=True)),
]


@pytest.mark.parametrize(("call", "expected"), OTHERS, ids=label)
def test_hopper_takes_another_kernel(call, expected):
    assert not mismatches(forward_plan(call, "sm90", True), expected)


def test_padding_keeps_the_plan_without_a_mask():
    plan = forward_plan(Call(4096, d=128, mask=(8, 1, 1, 4096)), "sm90", True)
    assert plan.intervals.row_max and plan.intervals.score_mode == "scale only"


@pytest.mark.parametrize("backend", ["sm80", "cpu"])
@pytest.mark.parametrize(
    "call",
    [
        Call(100),
        Call(500, options=CAUSAL),
        Call(500, d=128, mask=(1, 1, 1, 500)),
        Call(49, d=32, bias=(1, 16, 49, 49)),
        Call(1, 5000),
        Call(500, dtype=F64),
    ],
    ids=str,
)
def test_others_take_the_same_kernel(call, backend):
    plan, without = (forward_plan(call, backend, wants) for wants in (True, False))
    assert plan.row_max and (plan.kernel, plan.workspace) == (without.kernel, without.workspace)
