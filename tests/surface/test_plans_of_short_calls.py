"""Which tiles Hopper's backend takes: for calls at head dims up to 64 that are short, or have few heads; and where rows
are no whole sectors."""

import dataclasses

import pytest
import torch

from flash_attn_ext._call.options import dense_problem, problem_of
from flash_attn_ext._explanation import Plan, plans_of
from support.plans import BF16, DEFAULTS, F16, SHORT_BIAS, SINGLE_TILE, WARP_SPECIALISED, Call, label, mismatches

CAUSAL, LAST = {"causal": "top_left"}, {"causal": "bottom_right"}
DROPOUT = {"dropout_p": 0.1}

TILES = [
    # 12 heads of 1000 queries are 72 tiles of 192, or 96 of 128, which end earlier.
    (Call(1000, batch=1, heads=12), dict(head_dims=(64, 64), tile=(128, 128))),
    (Call(1000, batch=11, heads=12), dict(head_dims=(64, 64), tile=(192, 128))),
    # Small tiles and two CTAs per SM, by lengths, head dims and visibility: where only one side is bounded, up
    # to 1536 tokens.
    (Call(257, options=CAUSAL), dict(ctas_per_sm=2, head_dims=(64, 64), tile=(128, 64))),
    (Call(640, options=CAUSAL), dict(workspace_bytes=7680, workspace={"NaN flags": 5120, "tile list": 2560})),
    (Call(640, options=CAUSAL, batch=1, heads=1, dtype=F16), dict(ctas_per_sm=2, tile=(128, 64))),
    (Call(576), dict(tile=(192, 128))),
    # And windows of up to 1536 keys, unless some query sees everything through them.
    (Call(576, options={"window": (100, 9)}), dict(ctas_per_sm=2, tile=(128, 64))),
    (Call(8192, options={"window": (511, 0)}), dict(ctas_per_sm=2, tile=(128, 64))),
    (Call(8192, options={"window": (767, 768)}), dict(ctas_per_sm=2, tile=(128, 64))),
    (Call(8192, options={"window": (768, 768)}), dict(tile=(192, 128))),
    (Call(1024, options={"window": (511, 511)}), dict(ctas_per_sm=2, tile=(128, 64))),
    (Call(1024, options={"window": (512, 511)}), dict(tile=(192, 128))),
    (Call(700, options={"window": (700, 700)}), dict(tile=(192, 128))),
    (Call(1536, options={"window": (100, None)}), dict(ctas_per_sm=2, tile=(128, 64))),
    (Call(1536, options=CAUSAL), dict(ctas_per_sm=2, tile=(128, 64))),
    (Call(1537, options=CAUSAL), dict(tile=(192, 128))),
    (Call(700, 1536, options=LAST), dict(ctas_per_sm=2, tile=(128, 64))),
    (Call(700, 1537, options=LAST), dict(tile=(192, 128))),
    (Call(500, options=CAUSAL, sink=True, key_heads=4, d=40), dict(ctas_per_sm=2, tile=(128, 64), head_dims=(64, 64))),
    (Call(500, options=CAUSAL, dv=65), dict(tile=(128, 128), head_dims=(80, 80))),
    (Call(500, options=CAUSAL | {"dropout_p": 0.1}), dict(score_mode="dropout")),
    (Call(400, 1024, batch=1, heads=8, options=LAST), dict(kernel=WARP_SPECIALISED, splits=None)),
    (Call(400, 1536, batch=1, heads=8, options=LAST), dict(kernel=WARP_SPECIALISED, splits=3)),
    # All keys in one tile, of one of seven sizes, by the number of keys and which are visible; work tiles by how they
    # fill the SMs.
    (Call(65, 80), dict(kernel=SINGLE_TILE, head_dims=(64, 64), tile=(128, 80))),
    (Call(65, 81), dict(tile=(128, 96), workspace_bytes=1024, workspace={"NaN flags": 1024})),
    (Call(197), dict(kernel=SINGLE_TILE, head_dims=(64, 64), tile=(256, 208))),
    (Call(197, batch=1, heads=4), dict(tile=(64, 208))),
    (Call(4096, 77, batch=64), dict(tile=(832, 80))),
    (Call(128, batch=16, heads=12), dict(tile=(64, 128))),
    (Call(16, d=128), dict(kernel=SINGLE_TILE, head_dims=(128, 128), tile=(64, 80))),
    (Call(128, d=65, options=CAUSAL), dict(kernel=SINGLE_TILE, head_dims=(128, 128), tile=(128, 128))),
    (Call(128, 129, d=80), dict(kernel=WARP_SPECIALISED)),
    (Call(700, 80, d=160, key_heads=4), dict(kernel=SINGLE_TILE, head_dims=(192, 192), tile=(704, 80))),
    (Call(700, 81, d=160), dict(kernel=WARP_SPECIALISED, head_dims=(192, 192))),
    (Call(256, d=40, key_heads=4, sink=True), dict(tile=(256, 256))),
    (Call(256, dtype=F16, options={"window": (9, 9)}), dict(tile=(256, 256))),
    (Call(160, options=CAUSAL), dict(tile=(192, 160))),
    (Call(161, options=CAUSAL), dict(ctas_per_sm=2, tile=(128, 64))),
    # With ALiBi slopes, too, of as few tokens as a call has.
    (Call(16, slopes=True), dict(kernel=SINGLE_TILE, score_mode="ALiBi", head_dims=(64, 64), tile=(64, 80))),
    (Call(80, slopes=True, d=40), dict(kernel=SINGLE_TILE, score_mode="ALiBi", tile=(128, 80))),
    (Call(81, slopes=True), dict(kernel=SINGLE_TILE, tile=(128, 128))),
    (Call(129, slopes=True), dict(kernel=SINGLE_TILE, tile=(192, 160))),
    (Call(160, slopes=True, options=CAUSAL), dict(kernel=SINGLE_TILE, score_mode="ALiBi", tile=(192, 160))),
    (Call(161, slopes=True, options=CAUSAL), dict(kernel=WARP_SPECIALISED, score_mode="ALiBi")),
    (Call(256, slopes=True), dict(kernel=SINGLE_TILE, tile=(256, 256))),
    (Call(257, slopes=True), dict(kernel=WARP_SPECIALISED, score_mode="ALiBi")),
    (Call(80, slopes=True, d=128), dict(kernel=SINGLE_TILE, score_mode="ALiBi", head_dims=(128, 128), tile=(128, 80))),
    (Call(128, slopes=True, d=72), dict(kernel=SINGLE_TILE, head_dims=(128, 128), tile=(128, 128))),
    (Call(129, slopes=True, d=128), dict(kernel=WARP_SPECIALISED, score_mode="ALiBi")),
    # More queries a tile where rows are no whole sectors of 32 bytes, by head dims, lengths and visibility.
    (Call(257, d=72), dict(head_dims=(80, 80), tile=(192, 112))),
    (Call(256, d=72), dict(head_dims=(80, 80), tile=(128, 128))),
    (Call(729, d=80), dict(tile=(128, 128))),
    (Call(729, d=80, dv=88), dict(tile=(192, 112))),
    (Call(729, d=80, dv=88, batch=1), dict(tile=(128, 112))),
    (Call(729, d=40, dv=72), dict(tile=(192, 112))),
    (Call(729, d=120, dtype=F16), dict(head_dims=(128, 128), tile=(192, 64))),
    (Call(729, d=136), dict(tile=(128, 96))),
    (Call(513, d=72, options=CAUSAL), dict(tile=(192, 112))),
    (Call(512, d=72, options=CAUSAL), dict(tile=(128, 128))),
    (Call(4096, d=72, options={"window": (255, 0)}), dict(tile=(128, 128))),
    (Call(4096, d=72, options={"window": (256, 0)}), dict(tile=(192, 112))),
    (Call(729, d=72, options=DROPOUT), dict(score_mode="dropout", head_dims=(128, 128))),
    # At head dims from 97 to 128 few of them have smaller ones, which cost more where copies bound the call.
    (Call(729, d=104, batch=1), dict(head_dims=(128, 128), tile=(128, 64))),
    (Call(512, d=104), dict(tile=(192, 64))),
    (Call(729, d=72, batch=1), dict(head_dims=(80, 80), tile=(128, 112))),
    (Call(729, d=72, batch=2), dict(tile=(192, 112))),
    # And windows of up to 4097 keys.
    (Call(8192, d=128, options={"window": (511, 0)}), dict(head_dims=(128, 128), tile=(192, 64))),
    (Call(8192, d=112, options={"window": (4096, 0)}), dict(tile=(192, 64))),
    (Call(8192, d=112, options={"window": (4096, 1)}), dict(tile=(128, 128))),
    (Call(576, d=128, dtype=F16, options={"window": (64, 64)}), dict(tile=(192, 64))),
    (Call(576, d=128, options={"window": (575, 575)}), dict(tile=(128, 128))),
    (Call(2048, d=128, batch=1, options={"window": (255, 0)}), dict(tile=(128, 64), head_dims=(128, 128))),
    (Call(4096, d=128, batch=1, heads=32, options={"window": (1024, 0)}), dict(tile=(192, 64))),
    (Call(8192, d=96, options={"window": (511, 0)}), dict(tile=(128, 128))),
    # And calls of which only one side is bounded, of more than 256 and up to 4096 tokens.
    (Call(2048, d=128, options=CAUSAL), dict(head_dims=(128, 128), tile=(192, 64))),
    (Call(4096, d=112, options={"window": (None, 9)}), dict(tile=(192, 64))),
    (Call(257, d=128, batch=64, options=LAST), dict(tile=(192, 64))),
    (Call(256, d=128, batch=64, options=CAUSAL), dict(tile=(128, 128))),
    (Call(257, 4096, d=128, batch=64, options=LAST), dict(tile=(192, 64))),
    (Call(257, 4097, d=128, batch=64, options=LAST), dict(tile=(128, 128))),
    (Call(4097, d=128, options=CAUSAL), dict(tile=(128, 128))),
    (Call(1024, d=128, batch=1, options=CAUSAL), dict(tile=(128, 64), head_dims=(128, 128))),
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
    # At head dims from 129 to 256, nothing but a scale.
    (Call(64, d=65), HOPPER),
    (Call(64, d=128), HOPPER),
    (Call(64, d=129), PORTABLE),
    (Call(65, 64, d=129), HOPPER),
    (Call(64, d=192, dv=128, key_heads=4, options=CAUSAL), PORTABLE),
    (Call(64, d=256, options={"window": (9, 9)}), PORTABLE),
    (Call(64, d=257), HOPPER),
    (Call(64, d=128, options=DROPOUT), HOPPER),
    (padded(64, d=160), PORTABLE),  # bias-stationary
    (padded(64, d=161), HOPPER),
    # Kernels with masks, biases or dropout.
    (padded(64), PORTABLE),
    (padded(65), HOPPER),
    (padded(193), HOPPER),
    (Call(4096, 96, mask=(8, 1, 1, 96)), HOPPER),
    (Call(64, options=DROPOUT), PORTABLE),
    (Call(65, options=DROPOUT), HOPPER),
    (Call(64, bias=(1, 16, 64, 64)), PORTABLE),
    (Call(72, bias=(1, 16, 72, 72)), HOPPER),
    (padded(65, options=DROPOUT), HOPPER),  # the mask is written as a bias
    (padded(64, options=DROPOUT | CAUSAL), PORTABLE),
    (padded(65, options=DROPOUT | CAUSAL), HOPPER),
    (Call(64, slopes=True), HOPPER),
    (Call(65, slopes=True), HOPPER),
    (Call(64, options={"softcap": 9.0}), PORTABLE),
    (Call(65, options={"softcap": 9.0}), HOPPER),
    (padded(64, slopes=True), PORTABLE),
    (padded(65, slopes=True), HOPPER),
    # What everything else takes.
    (Call(256, slopes=True, options=DROPOUT), PORTABLE),
    (Call(257, slopes=True, options=DROPOUT), HOPPER),
    (Call(256, 257, slopes=True, options=DROPOUT), HOPPER),
    # From 9 queries on, reading the keys is not all that takes time where heads fill the SMs, and elsewhere from 33 on.
    (Call(8, 4096), PORTABLE),
    (Call(9, 4096), HOPPER),
    (Call(32, 4096, batch=1), PORTABLE),
    (Call(33, 4096, batch=1), HOPPER),
    (Call(33, 4096), HOPPER),
    (Call(33, 4096, d=128), HOPPER),
    (Call(33, 4096, mask=(8, 1, 1, 4096)), HOPPER),
]
# 132 SMs.
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
    (padded(64), PORTABLE),  # bias-stationary
    (padded(65), HOPPER),
    (Call(16, options=DROPOUT), HOPPER),
    (Call(64, bias=(1, 16, 64, 64)), PORTABLE),
    (Call(72, bias=(1, 16, 72, 72)), HOPPER),
    (Call(64, key_heads=8, bias=(1, 16, 64, 64)), HOPPER),  # heads would share dK and dV
    (Call(128, bias=(1, 16, 128, 128)), HOPPER),
    (Call(128, bias=(1, 16, 128, 128), mask=(1, 1, 1, 128)), HOPPER),
    (Call(136, bias=(1, 16, 136, 136), mask=(1, 1, 1, 136)), HOPPER),
    (Call(16, options={"softcap": 9.0}), HOPPER),
    (Call(16, slopes=True), HOPPER),
    (Call(256, options={"softcap": 9.0} | DROPOUT), PORTABLE),
    (Call(257, options={"softcap": 9.0} | DROPOUT), HOPPER),
    (Call(16, 512, mask=(8, 1, 1, 512)), HOPPER),
    (Call(16, 512, key_heads=4, mask=(8, 1, 1, 512)), PORTABLE),  # dQ is split-KV there
    (Call(16, 512, intervals=(8, 1, 16, 2)), PORTABLE),
    (Call(16, 512, mask=(8, 1, 16, 1)), PORTABLE),
    (Call(16, 512, mask=(8, 1, 1, 512), options={"scale": -1.0}), PORTABLE),
    (Call(16, d=256), HOPPER),
    (Call(16, 512, d=256), PORTABLE),
    (Call(64, d=160), PORTABLE),  # bias-stationary
    (Call(64, d=168), HOPPER),
    (Call(65, d=128), HOPPER),
    (Call(64, key_heads=8, d=128), HOPPER),
]


def on_hopper(call: Call) -> tuple[Plan, Plan]:
    return dataclasses.replace(call, options=call.options | {"backend": "sm90"}).plans()


@pytest.mark.parametrize(("call", "expected"), TILES, ids=label)
def test_tiles(call, expected):
    assert mismatches(on_hopper(call)[0], expected) == {}


@pytest.mark.parametrize(("call", "own"), FORWARD, ids=str)
def test_forward_backend(call, own):
    assert (WARP_SPECIALISED in on_hopper(call)[0].kernel) == own


@pytest.mark.parametrize(("call", "own"), BACKWARD, ids=str)
def test_backward_backend(call, own):
    assert (WARP_SPECIALISED in on_hopper(call)[1].kernel) == own


@pytest.mark.parametrize(
    ("row_stride", "takes_short_bias"), [((1 << 23) - 8, True), (1 << 23, False), ((1 << 23) + (1 << 16), False)]
)
def test_offsets_in_short_heads_with_a_bias_fit_32_bits(row_stride, takes_short_bias):
    sq, sk, d = 65, 136, 32
    call = Call(sq, sk, d=d, batch=1, heads=1, bias=(1, 1, sq, sk), options={"backend": "sm90"})
    memory = torch.empty((sq - 1) * row_stride + d, dtype=BF16)  # nothing of it is touched
    q = memory.as_strided((1, 1, sq, d), (sq * row_stride, sq * row_stride, row_stride, 1)).requires_grad_()
    problem, _, _ = dense_problem(problem_of(**DEFAULTS | call.arguments() | {"q": q}), "bhsd")
    kernels = [plan.kernel for plan in plans_of(problem)]
    assert [kernel == SHORT_BIAS for kernel in kernels] == [takes_short_bias] * 2
