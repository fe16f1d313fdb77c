"""Which backward kernels dropout takes on Hopper, and that it changes nothing else where one kernel does it all."""

import pytest

from support.plans import Call, label

LONG = 2048
SQUARE = (1, 16, LONG, LONG)


def hopper(sq: int = LONG, dropout_p: float = 0.1, options: dict | None = None, **more) -> Call:
    return Call(sq, options=(options or {}) | {"backend": "sm90", "dropout_p": dropout_p}, **more)


BACKWARD = [
    (hopper(), "warp-specialised (dropout), head dim 64, 128 keys per block, dQ added in order, going round"),
    (hopper(d=72), "warp-specialised (dropout), head dim 96, 128 keys per block"),
    # Beside what else changes scores: dQ first, which stores P and dS.
    (hopper(mask=SQUARE), "(extended, head dims 64 and 64), dQ storing P and dS"),
    (hopper(bias=SQUARE, d=128), "(extended, head dims 128 and 128), dQ storing P and dS"),
    (hopper(options={"softcap": 9.0}), "(extended, head dims 64 and 64), dQ storing P and dS"),
]
ALIKE = [
    dict(),
    dict(d=128, key_heads=4, options={"causal": "top_left"}),
    dict(options={"window": (100, 9)}),
    dict(sq=300, sk=8192),
]


@pytest.mark.parametrize(("call", "words"), BACKWARD, ids=label)
def test_backward(call, words):
    assert words in call.plans()[1]


@pytest.mark.parametrize("call", ALIKE, ids=str)
def test_the_plan_is_that_without_dropout(call):
    """Neither the order of additions differs nor the workspace, in which nothing is drawn. The kernel's form may."""
    plain, dropped = (hopper(dropout_p=p, **call).plans()[1] for p in (0.0, 0.1))
    for of_form in (", visits announced", ", statistics added by products"):
        plain = plain.replace(of_form, "")
    assert dropped == plain.replace("warp-specialised,", "warp-specialised (dropout),")
    assert dropped != plain
