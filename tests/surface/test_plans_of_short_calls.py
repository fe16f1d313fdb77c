"""Which tiles Hopper's backend takes: for calls at head dims up to 64 that are short, or have few heads; and where rows
are no whole sectors."""

import dataclasses

import pytest

from support.plans import F16, Call, label

CAUSAL, LAST = {"causal": "top_left"}, {"causal": "bottom_right"}
DROPOUT = {"dropout_p": 0.1}

TILES = [
    # 12 heads of 1000 queries are 72 tiles of 192, or 96 of 128, which end earlier.
    (Call(1000, batch=1, heads=12), "(short, head dims 64 and 64), 128 queries x 128 keys"),
    (Call(1000, batch=11, heads=12), "(plain, head dims 64 and 64), 192 queries x 128 keys"),
    # Small tiles, by lengths, head dims and visibility alone: where one side alone is bounded, up to 1536 tokens.
    (Call(257, options=CAUSAL), "(small, head dims 64 and 64), 128 queries x 64 keys"),
    (Call(640, options=CAUSAL), "workspace 7680 bytes (NaN flags 5120, tile list 2560)"),
    (Call(640, options=CAUSAL, batch=1, heads=1, dtype=F16), "(small,"),
    (Call(576), "(plain,"),
    # And windows of up to 1536 keys, unless some query sees everything through them.
    (Call(576, options={"window": (100, 9)}), "(small,"),
    (Call(8192, options={"window": (511, 0)}), "(small,"),
    (Call(8192, options={"window": (767, 768)}), "(small,"),
    (Call(8192, options={"window": (768, 768)}), "(plain,"),
    (Call(1024, options={"window": (511, 511)}), "(small,"),
    (Call(1024, options={"window": (512, 511)}), "(plain,"),
    (Call(700, options={"window": (700, 700)}), "(plain,"),
    (Call(1536, options={"window": (100, None)}), "(small,"),
    (Call(1536, options=CAUSAL), "(small,"),
    (Call(1537, options=CAUSAL), "(plain,"),
    (Call(700, 1536, options=LAST), "(small,"),
    (Call(700, 1537, options=LAST), "(plain,"),
    (Call(500, options=CAUSAL, sink=True, key_heads=4, d=40), "(small, head dims 64 and 64)"),
    (Call(500, options=CAUSAL, dv=65), "(plain, head dims 96 and 96)"),
    (Call(500, options=CAUSAL | {"dropout_p": 0.1}), "(dropout,"),
    (Call(400, 1024, batch=1, heads=8, options=LAST), "keys divided among"),
    # All keys in one tile, of one of seven sizes, by the number of keys and which are visible; units by how they fill
    # the multiprocessors.
    (Call(65, 80), "(all keys, head dims 64 and 64), 128 queries x 80 keys per tile"),
    (Call(65, 81), "x 96 keys per tile; workspace 1024 bytes (NaN flags 1024)"),
    (Call(197), "(all keys, head dims 64 and 64), 256 queries x 208 keys"),
    (Call(197, batch=1, heads=4), "64 queries x 208 keys"),
    (Call(4096, 77, batch=64), "1024 queries x 80 keys"),
    (Call(256, d=40, key_heads=4, sink=True), "x 256 keys"),
    (Call(256, dtype=F16, options={"window": (9, 9)}), "x 256 keys"),
    (Call(160, options=CAUSAL), "x 160 keys"),
    (Call(161, options=CAUSAL), "(small,"),
    # More queries a tile where rows are no whole sectors of 32 bytes, by head dims, lengths and visibility alone.
    (Call(257, d=72), "(tall, head dims 96 and 96), 192 queries x 112 keys"),
    (Call(256, d=72), "(plain, head dims 96 and 96), 128 queries x 128 keys"),
    (Call(729, d=80), "(plain,"),
    (Call(729, d=80, dv=88, batch=1), "(tall,"),
    (Call(729, d=40, dv=72), "(tall,"),
    (Call(729, d=120, dtype=F16), "(tall, head dims 128 and 128), 192 queries x 64 keys"),
    (Call(729, d=136), "(plain,"),
    (Call(513, d=72, options=CAUSAL), "(tall,"),
    (Call(512, d=72, options=CAUSAL), "(plain,"),
    (Call(4096, d=72, options={"window": (255, 0)}), "(plain,"),
    (Call(4096, d=72, options={"window": (256, 0)}), "(tall,"),
    (Call(729, d=72, options=DROPOUT), "(dropout, head dims 128 and 128)"),
    # At head dims from 97 to 128 few of them have smaller ones, which cost more where copies bound the call.
    (Call(729, d=104, batch=1), "(short, head dims 128 and 128), 128 queries x 64 keys"),
    (Call(512, d=104), "(tall,"),
    (Call(729, d=72, batch=1), "(tall,"),
    # And windows of up to 4097 keys.
    (Call(8192, d=128, options={"window": (511, 0)}), "(tall, head dims 128 and 128), 192 queries x 64 keys"),
    (Call(8192, d=112, options={"window": (4096, 0)}), "(tall,"),
    (Call(8192, d=112, options={"window": (4096, 1)}), "(plain,"),
    (Call(576, d=128, dtype=F16, options={"window": (64, 64)}), "(tall,"),
    (Call(576, d=128, options={"window": (575, 575)}), "(plain,"),
    (Call(2048, d=128, batch=1, options={"window": (255, 0)}), "(short, head dims 128 and 128)"),
    (Call(4096, d=128, batch=1, heads=32, options={"window": (1024, 0)}), "(tall,"),
    (Call(8192, d=96, options={"window": (511, 0)}), "(plain,"),
    # And calls of which one side alone is bounded, of more than 256 and up to 4096 tokens.
    (Call(2048, d=128, options=CAUSAL), "(tall, head dims 128 and 128), 192 queries x 64 keys"),
    (Call(4096, d=112, options={"window": (None, 9)}), "(tall,"),
    (Call(257, d=128, batch=64, options=LAST), "(tall,"),
    (Call(256, d=128, batch=64, options=CAUSAL), "(plain,"),
    (Call(257, 4096, d=128, batch=64, options=LAST), "(tall,"),
    (Call(257, 4097, d=128, batch=64, options=LAST), "(plain,"),
    (Call(4097, d=128, options=CAUSAL), "(plain,"),
    (Call(1024, d=128, batch=1, options=CAUSAL), "(short, head dims 128 and 128)"),
]

HOPPER, PORTABLE = True, False


def padded(tokens: int, **more) -> Call:
    return Call(tokens, mask=(8, 1, 1, tokens), **more)


FORWARD = [
    # Scores that are only scaled.
    (Call(64), PORTABLE),
    (Call(65), HOPPER),
    (Call(64, 65), HOPPER),
    (Call(256), HOPPER),
    (Call(1, 200), HOPPER),
    (Call(128, options=CAUSAL), HOPPER),
    (Call(193, options=CAUSAL), HOPPER),
    (Call(128, 161, options=LAST), PORTABLE),
    (Call(129, 161, options=LAST), HOPPER),
    (Call(193, options={"window": (9, 9)}), HOPPER),
    (Call(90, 300, options={"window": (0, 0)}), PORTABLE),  # 90 keys are visible
    (Call(90, 300, options={"window": (9, 9)}), PORTABLE),
    (Call(90, 300, options={"window": (200, 9)}), HOPPER),
    (Call(500, options={"window": (9, 9)}), HOPPER),
    (Call(65, 257), HOPPER),
    (Call(16, 300), HOPPER),
    (Call(4096, 96), HOPPER),
    (Call(193, d=65), HOPPER),
    # Kernels that look masks and biases up, or drop weights.
    (padded(64), PORTABLE),
    (padded(65), HOPPER),
    (padded(193), HOPPER),
    (Call(4096, 96, mask=(8, 1, 1, 96)), HOPPER),
    (Call(64, options=DROPOUT), PORTABLE),
    (Call(65, options=DROPOUT), HOPPER),
    (Call(64, bias=(1, 16, 64, 64)), PORTABLE),
    (Call(72, bias=(1, 16, 72, 72)), HOPPER),
    # What everything else takes.
    (Call(256, slopes=True), PORTABLE),
    (Call(257, slopes=True), HOPPER),
    (Call(256, 257, slopes=True), HOPPER),
    # From 33 queries on, reading the keys is not all that takes time.
    (Call(32, 4096), PORTABLE),
    (Call(33, 4096), HOPPER),
    (Call(33, 4096, d=128), HOPPER),
    (Call(33, 4096, mask=(8, 1, 1, 4096)), HOPPER),
]
# 132 multiprocessors.
BACKWARD = [
    # A tile of keys for each, or none.
    (Call(128), PORTABLE),
    (Call(128, 256, batch=4), PORTABLE),
    (Call(176, batch=4), PORTABLE),
    (Call(177, batch=4), HOPPER),
    (Call(129, batch=1, heads=2, key_heads=1), PORTABLE),
    # Two.
    (Call(128, batch=16), PORTABLE),
    (Call(224), PORTABLE),
    (Call(225), HOPPER),
    # More.
    (Call(96, batch=64), PORTABLE),
    (Call(97, batch=64), HOPPER),
    (Call(64, 256, batch=64), PORTABLE),
    (Call(65, 256, batch=64), HOPPER),
    (Call(129, batch=9), HOPPER),
    (Call(256, 257), HOPPER),
    (Call(257, 256), HOPPER),
    (padded(16), HOPPER),
    (Call(16, options=DROPOUT), HOPPER),
    (Call(16, bias=(1, 16, 16, 16)), HOPPER),
    (Call(128, bias=(1, 16, 128, 128)), HOPPER),
    (Call(128, bias=(1, 16, 128, 128), mask=(1, 1, 1, 128)), PORTABLE),
    (Call(136, bias=(1, 16, 136, 136), mask=(1, 1, 1, 136)), HOPPER),
    (Call(256, options={"softcap": 9.0}), PORTABLE),
    (Call(257, options={"softcap": 9.0}), HOPPER),
    (Call(16, 512, mask=(8, 1, 1, 512)), PORTABLE),  # keys of dQ are divided there
    (Call(16, d=256), HOPPER),
    (Call(16, 512, d=256), PORTABLE),
    (Call(16, d=128), HOPPER),
]


def on_hopper(call: Call) -> tuple[str, str]:
    return dataclasses.replace(call, options=call.options | {"backend": "sm90"}).plans()


@pytest.mark.parametrize(("call", "words"), TILES, ids=label)
def test_tiles(call, words):
    assert words in on_hopper(call)[0]


@pytest.mark.parametrize(("call", "own"), FORWARD, ids=str)
def test_forward_backend(call, own):
    assert ("warp-specialised" in on_hopper(call)[0]) == own


@pytest.mark.parametrize(("call", "own"), BACKWARD, ids=str)
def test_backward_backend(call, own):
    assert ("warp-specialised" in on_hopper(call)[1]) == own
