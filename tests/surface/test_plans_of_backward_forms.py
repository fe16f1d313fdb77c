"""Which form of the backward kernel calls on Hopper take, where there are several: the faster one.

Whether dQ of a visit is announced to who adds it up, and whether products add the LSE and delta.
"""

import pytest

from support.plans import F16, Call, label


def hopper(seqlen: int, options: dict | None = None, **more) -> Call:
    return Call(seqlen, options={"backend": "sm90"} | (options or {}), **more)


CAUSAL = {"causal": "top_left"}
ANNOUNCED = [
    (hopper(8128, d=128), True),
    (hopper(16384, d=128), True),
    (hopper(16384, CAUSAL, d=128), True),
    (hopper(16384, {"window": (512, 512)}, d=128), True),
    (hopper(16384, CAUSAL, d=96), True),
    (hopper(1024, d=96), False),
    (hopper(64, sk=8192, d=128), True),
    (hopper(1024, CAUSAL, d=128, dtype=F16), True),
    (hopper(1024, CAUSAL, d=64), False),
    (hopper(1024, CAUSAL | {"dropout_p": 0.1}, d=128), False),
    (hopper(1024, CAUSAL, d=128, mask=(1, 1, 1, 1024)), False),
    (hopper(1024, CAUSAL, d=128, bias=(1, 1, 1024, 1024)), False),
]


@pytest.mark.parametrize(("call", "announced"), ANNOUNCED, ids=label)
def test_announced_visits(call, announced):
    plan = call.plans()[1]
    assert "dQ added in order" in plan
    assert ("visits announced" in plan) == announced


ADDED = [
    (hopper(64, sk=512, d=64), True),
    (hopper(1024, CAUSAL, d=64, mask=(1, 1, 1, 1024)), True),
    (hopper(1024, d=96), True),
    (hopper(1024, CAUSAL, d=96), True),
    (hopper(8128, d=128), False),
    (hopper(8129, d=128), True),  # 128 tiles of queries
    (hopper(16384, CAUSAL, d=128, dtype=F16), True),
    (hopper(16384, CAUSAL, d=128, mask=(1, 1, 1, 16384)), False),
    (hopper(1024, CAUSAL | {"dropout_p": 0.1}, d=64), False),
    (hopper(1024, CAUSAL, d=64, bias=(1, 1, 1024, 1024)), False),
]


@pytest.mark.parametrize(("call", "added"), ADDED, ids=label)
def test_added_statistics(call, added):
    plan = call.plans()[1]
    assert "dQ added in order" in plan
    assert ("statistics added by products" in plan) == added
