"""Which tiles of queries Hopper's forward pass has in calls at head dims up to 64 that are short, or have few heads."""

import dataclasses

import pytest

from support.plans import F16, Call, label

CAUSAL, LAST = {"causal": "top_left"}, {"causal": "bottom_right"}

TILES = [
    # 12 heads of 1000 queries are 72 tiles of 192, or 96 of 128, which end earlier.
    (Call(1000, batch=1, heads=12), "(short, head dims 64 and 64), 128 queries x 128 keys"),
    (Call(1000, batch=11, heads=12), "(plain, head dims 64 and 64), 192 queries x 128 keys"),
    # Small tiles, by lengths, head dims and visibility alone: where one side alone is bounded, up to 1536 tokens.
    (Call(257, options=CAUSAL), "(small, head dims 64 and 64), 128 queries x 64 keys"),
    (Call(640, options=CAUSAL), "workspace 7680 bytes (NaN flags 5120, tile list 2560)"),
    (Call(640, options=CAUSAL, batch=1, heads=1, dtype=F16), "(small,"),
    (Call(576), "(plain,"),
    (Call(576, options={"window": (100, 9)}), "(plain,"),
    (Call(1536, options={"window": (100, None)}), "(small,"),
    (Call(1536, options=CAUSAL), "(small,"),
    (Call(1537, options=CAUSAL), "(plain,"),
    (Call(700, 1536, options=LAST), "(small,"),
    (Call(700, 1537, options=LAST), "(plain,"),
    (Call(500, options=CAUSAL, sink=True, key_heads=4, d=40), "(small, head dims 64 and 64)"),
    (Call(500, options=CAUSAL, dv=65), "(plain, head dims 96 and 96)"),
    (Call(500, options=CAUSAL | {"dropout_p": 0.1}), "(dropout,"),
    (Call(400, 1024, batch=1, heads=8, options=LAST), "keys divided among"),
]


@pytest.mark.parametrize(("call", "words"), TILES, ids=label)
def test_tiles(call, words):
    assert words in dataclasses.replace(call, options=call.options | {"backend": "sm90"}).plans()[0]
