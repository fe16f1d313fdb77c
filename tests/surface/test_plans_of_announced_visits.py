"""Which backward calls on Hopper announce dQ of a visit to who adds it up: where that is faster."""

import pytest

from support.plans import F16, Call, label


def hopper(seqlen: int, options: dict | None = None, **more) -> Call:
    return Call(seqlen, options={"backend": "sm90"} | (options or {}), **more)


CAUSAL = {"causal": "top_left"}
ANNOUNCED = [
    (hopper(8128, d=128), True),
    (hopper(8129, d=128), False),  # 128 tiles of queries, which all tiles of keys go round
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
