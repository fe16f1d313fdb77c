"""Many sequences of at most 64 queries and keys: set models, frames of a video, and the windows of Swin.

A GPU computes those of 16 bits one after the other, and the bias of a head stays.
"""

import math

import pytest
import torch

from support.backends import CPU
from support.cases import Case, make_inputs
from support.checks import check_case, check_hidden_keys, check_inputs
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours

BIASES = ("1hqk", "11qk", "bhqk", "b1qk", "1h1k", "b111")
MASKS = ("b1qk", "b11k", "1hqk", "bhq1")
SIZES = ((1, 1), (1, 64), (64, 1), (7, 17), (16, 16), (17, 15), (33, 50), (49, 49), (63, 64), (64, 64))
HEAD_DIMS = (
    *((32, 32), (8, 8), (24, 40), (64, 64), (33, 32), (64, 8)),
    *((96, 96), (80, 72), (128, 128), (120, 65), (160, 160), (136, 40), (32, 160)),
)


def sized(count: int, **features) -> Case:
    (sq, sk), (d, dv) = SIZES[count % len(SIZES)], HEAD_DIMS[count % len(HEAD_DIMS)]
    return Case(sq=sq, sk=sk, d=d, dv=dv, batch=5, heads=3, **features)


CASES = [
    *(sized(i, bias=bias) for i, bias in enumerate(BIASES)),
    *(sized(i + 3, mask=mask) for i, mask in enumerate(MASKS)),
    *(sized(i + j, bias=bias, mask=mask) for i, bias in enumerate(BIASES) for j, mask in enumerate(MASKS)),
    *(Case(sq=n, sk=m, d=32, bias="1hqk", mask="b1qk") for n, m in SIZES),
    *(Case(sq=49, sk=49, d=d, dv=dv, bias="1hqk", mask="b1qk") for d, dv in HEAD_DIMS),
]
SCALE_ONLY = [
    *(Case(sq=n, sk=m, d=d, dv=dv, batch=9, heads=3) for d, dv in HEAD_DIMS for n, m in ((49, 49), (16, 64), (64, 7))),
    *(
        Case(sq=n, sk=m, d=d, heads=4, **dict(batch=5) | features)
        for d in (24, 80, 128, 160)
        for n, m, features in (
            (50, 50, dict(causal="top_left", dlse=True)),
            (33, 64, dict(causal="bottom_right", sink=True)),
            (64, 64, dict(window=(5, 9), scale=0.3)),
            (17, 40, dict(kv_heads=2, layout="bshd")),
            (20, 20, dict(batch=200)),
        )
    ),
]
COMBINED = [
    Case(sq=33, sk=50, bias="1hqk", causal="bottom_right", dlse=True),
    Case(sq=50, sk=33, bias="bhqk", mask="b11k", causal="top_left", mask_keep=0.2),
    Case(sq=49, sk=49, d=64, mask="1hqk", window=(5, 3), sink=True),
    Case(sq=49, sk=49, bias="1hqk", mask="b1qk", heads=6, kv_heads=2, sink=True, dlse=True),
    Case(sq=49, sk=49, bias="11qk", mask="b1qk", layout="bshd", scale=0.7),
    Case(sq=49, sk=49, bias="1hqk", mask="b1qk", batch=300, heads=2),
    Case(sq=49, sk=49, bias="1hqk", mask="b1qk", batch=0),  # the gradient of the bias is 0
]
SWIN = Case(sq=49, sk=49, batch=70, heads=3, bias="1hqk", mask="b1qk")


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(CASES + COMBINED)
def test_biases_and_masks(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(SCALE_ONLY)
def test_scale_only(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("d", [32, 64, 96, 128, 160])
@pytest.mark.parametrize("bias", ["1hqk", "bhqk"])
def test_hidden_keys_reach_nothing(bias, d, dtype, backend):
    """NaN and infinity in a key that a sequence's mask hides change no bit of another sequence. Rows of its own are
    computed again, with other roundings, which reach the gradient of the bias. A CTA has several sequences."""
    batch = 6 if backend == CPU else 700
    case = Case(sq=49, sk=49, d=d, batch=batch, heads=2, bias=bias, mask="b1qk")
    inputs = make_inputs(case, dtype, backend.device)
    inputs.mask[3, :, :, 11] = False
    inputs.mask[3, :, 0, 0] = True
    clean = run_ours(inputs, backend)
    inputs.k[3, :, 11] = math.nan
    inputs.v[3, :, 11] = math.inf
    met = run_ours(inputs, backend)
    others = torch.arange(batch) != 3
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(met[name][others], clean[name][others]), name
        assert torch.allclose(met[name][3], clean[name][3], rtol=0.02, atol=0.02), name
    assert torch.allclose(met["dbias"], clean["dbias"], rtol=0.02, atol=0.02)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("d", [24, 80, 160])
def test_hidden_keys_reach_nothing_without_a_mask(d, dtype, backend):
    inputs = make_inputs(Case(sq=40, sk=50, d=d, batch=4, heads=3, causal="top_left"), dtype, backend.device)
    check_hidden_keys(inputs, 40, math.nan, backend)


@over_dtypes((torch.bfloat16,))
def test_a_query_that_sees_nothing(dtype, backend):
    inputs = make_inputs(SWIN, dtype, backend.device)
    inputs.mask[4, :, 7] = False
    inputs.mask[5] = False
    check_inputs(inputs, backend)


@over_dtypes((torch.bfloat16,))
def test_a_sequence_does_not_depend_on_the_others(dtype, backend):
    """Bit by bit, but for the bias of all: its gradient is a sum over them."""
    inputs = make_inputs(SWIN, dtype, backend.device)
    together = run_ours(inputs, backend)
    some = slice(17, 23)
    parts = {name: getattr(inputs, name)[some] for name in ("q", "k", "v", "dout", "mask")}
    alone = run_ours(inputs.replace(**parts), backend)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(alone[name], together[name][some]), name


@over_dtypes((torch.bfloat16,))
def test_gradients_are_reproducible(dtype, backend):
    inputs = make_inputs(SWIN, dtype, backend.device)
    first, *others = (run_ours(inputs, backend) for _ in range(5))
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name
