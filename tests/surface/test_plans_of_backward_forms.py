"""Which form of the backward kernel calls on Hopper take, and which loop order: the faster ones.

The form says whether dQ is pre-signalled to the reducer warps, and whether GEMMs add the LSE and delta.
"""

import pytest

from support.plans import F16, KEY_STATIONARY, Call, label


def hopper(seqlen: int, options: dict | None = None, **more) -> Call:
    return Call(seqlen, options={"backend": "sm90"} | (options or {}), **more)


CAUSAL = {"causal": "top_left"}
# Pre-signalled, added.
FORMS = [
    (hopper(512, d=128), True, False),
    (hopper(513, d=128), True, True),  # 9 tiles of queries
    (hopper(512, CAUSAL, d=128), True, False),
    (hopper(16384, CAUSAL, d=128), True, True),
    (hopper(16384, CAUSAL, d=128, dtype=F16), True, True),
    (hopper(16384, {"window": (512, 512)}, d=128), True, True),
    (hopper(16384, CAUSAL, d=128, mask=(1, 1, 1, 16384)), True, True),
    (hopper(64, CAUSAL, sk=8192, d=128), True, False),
    (hopper(1024, CAUSAL | {"dropout_p": 0.1}, d=128), False, False),
    (hopper(1024, CAUSAL, d=128, mask=(1, 1, 1, 1024)), True, True),
    (hopper(1024, CAUSAL, d=128, bias=(1, 1, 1024, 1024)), False, False),
    (hopper(512, CAUSAL, d=96), True, True),
    (hopper(512, d=96), False, True),
    (hopper(64, sk=512, d=64), False, False),
    (hopper(136, sk=513, d=64), False, True),  # 5 tiles of keys
    (hopper(512, d=64), False, False),
    (hopper(513, d=64), False, True),
    (hopper(512, CAUSAL, d=64), False, False),
    (hopper(513, CAUSAL, d=64, dtype=F16), False, True),
    (hopper(512, CAUSAL, d=64, mask=(1, 1, 1, 512)), False, True),
    (hopper(1024, CAUSAL | {"dropout_p": 0.1}, d=64), False, False),
    (hopper(1024, CAUSAL, d=64, bias=(1, 1, 1024, 1024)), False, False),
]


@pytest.mark.parametrize(("call", "pre_signalled", "added"), FORMS, ids=label)
def test_form(call, pre_signalled, added):
    plan = call.plans()[1]
    assert (plan.kernel, plan.pre_signals_dq, plan.adds_statistics) == (KEY_STATIONARY, pre_signalled, added)


# Cyclic order: groups of eight key tiles do not divide the CTAs of 132 SMs, and groups of four do.
CYCLIC = [
    (hopper(1024, d=64, batch=2, heads=16), 2),
    (hopper(1024, d=64, batch=1, heads=16), 1),  # all tiles at once
    (hopper(1024, d=64, batch=8, heads=16), 2),
    (hopper(1024, d=64, batch=9, heads=16), 1),  # more than eight waves
    (hopper(768, d=64, batch=2, heads=16), 1),
    (hopper(2048, d=64, batch=2, heads=16), 1),
    (hopper(1024, d=128, batch=2, heads=16), 1),
    (hopper(512, sk=1024, d=128, batch=2, heads=16), 2),  # more keys than queries
]


@pytest.mark.parametrize(("call", "phases"), CYCLIC, ids=label)
def test_phases_in_cyclic_order(call, phases):
    plan = call.plans()[1]
    assert (plan.cyclic, plan.phases) == (True, phases)


def test_other_calls_have_no_phases():
    plan = hopper(1024, CAUSAL, d=64, batch=2, heads=16).plans()[1]
    assert (plan.kernel, plan.cyclic, plan.phases) == (KEY_STATIONARY, False, 1)
