"""Which backward kernels dropout takes on Hopper, and that it changes nothing else where one kernel does it all."""

import dataclasses

import pytest

from support.plans import KEY_STATIONARY, TWO_PASS, Call, label, mismatches

LONG = 2048
SQUARE = (1, 16, LONG, LONG)


def hopper(sq: int = LONG, dropout_p: float = 0.1, options: dict | None = None, **more) -> Call:
    return Call(sq, options=(options or {}) | {"backend": "sm90", "dropout_p": dropout_p}, **more)


BACKWARD = [
    (hopper(), dict(kernel=KEY_STATIONARY, score_mode="dropout", head_dims=(64, 64), tile=(64, 128), cyclic=True)),
    (hopper(d=72), dict(kernel=KEY_STATIONARY, score_mode="dropout", head_dims=(96, 96), tile=(64, 128))),
    (hopper(mask=SQUARE), dict(kernel=KEY_STATIONARY, score_mode="mask and dropout", head_dims=(64, 64))),
    (hopper(bias=SQUARE), dict(kernel=KEY_STATIONARY, score_mode="bias, mask and dropout", head_dims=(64, 64))),
    (hopper(bias=SQUARE, mask=SQUARE), dict(kernel=KEY_STATIONARY, score_mode="bias, mask and dropout")),
    # With something else that changes scores: two-pass.
    (hopper(bias=SQUARE, mask=SQUARE, d=72), dict(kernel=TWO_PASS, score_mode="generic", head_dims=(128, 128))),
    (hopper(bias=SQUARE, d=128), dict(kernel=TWO_PASS, score_mode="generic", head_dims=(128, 128))),
    (hopper(options={"softcap": 9.0}), dict(kernel=TWO_PASS, score_mode="generic", head_dims=(64, 64))),
]
SAME = [
    dict(),
    dict(d=128, key_heads=4, options={"causal": "top_left"}),
    dict(options={"window": (100, 9)}),
    dict(sq=300, sk=8192),
]


@pytest.mark.parametrize(("call", "expected"), BACKWARD, ids=label)
def test_backward(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


@pytest.mark.parametrize("call", SAME, ids=str)
def test_the_plan_is_that_without_dropout(call):
    """Neither the order of additions differs nor the workspace, in which nothing is drawn. The kernel's form may."""
    plain, dropped = (hopper(dropout_p=p, **call).plans()[1] for p in (0.0, 0.1))
    assert (plain.score_mode, dropped.score_mode) == ("scale only", "dropout")
    of_form = dict(words="", score_mode=None, pre_signals_dq=False, adds_statistics=False)
    assert dataclasses.replace(dropped, **of_form) == dataclasses.replace(plain, **of_form)
