"""A bias whose rows do not begin at multiples of 16 bytes, or whose keys are not contiguous. On Hopper such calls take
an aligned copy of it: lengths that are no multiples of 8, views, the order of an embedding of relative positions,
packed sequences, and gradients of the bias."""

import math

import pytest
import torch

from support.cases import Case, Inputs, make_inputs, without_dbias
from support.checks import check_drawn, check_hidden_keys, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import for_gpus, over_cases, over_dtypes

RUNS = 100
over_16_bits = over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))

PATTERNS = ("1hqk", "bhqk", "b1qk", "11qk")
OPTIONS = (dict(), dict(mask="b11k"), dict(causal="bottom_right", dlse=True), dict(mask="b1qk", sink=True))
CASES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, bias=PATTERNS[(n + m) % 4], **options)
    for d, kv_heads in ((64, 4), (128, 2), (32, 4), (80, 1))
    for n, (sq, sk) in enumerate(((197, 197), (130, 251), (500, 499), (77, 1030)))
    for m, options in enumerate(OPTIONS)
]
ON_CPU = CASES[::9]
# Beside these another kernel runs, which reads the bias where it is.
BESIDE_OTHERS = [
    Case(sq=200, sk=333, heads=4, d=64, bias="1hqk", **options)
    for options in (dict(dropout_p=0.2), dict(softcap=9.0), dict(alibi="h"), dict(scale=-0.2), dict(window=(70, 9)))
]
PACKED = [
    PackedCase((300, 0, 65, 701, 64), (303, 40, 129, 504, 0), Case(d=d, heads=4, kv_heads=2, bias=bias, **options))
    for d, bias, options in (
        (64, "1hqk", {}),
        (128, "b1qk", dict(causal="bottom_right")),
        (64, "bhqk", dict(dlse=True)),
    )
]


def in_order_of_an_embedding(bias: torch.Tensor) -> torch.Tensor:
    """Heads are closest in memory, as in T5's values of (query, key, head)."""
    return bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def with_queries_closest(bias: torch.Tensor) -> torch.Tensor:
    return bias.mT.contiguous().mT


def from_the_second_element(bias: torch.Tensor) -> torch.Tensor:
    """Strides are multiples of 8, the address is not a multiple of 16."""
    batch, heads, queries, keys = bias.shape
    wide = bias.new_full((batch, heads, queries, (keys + 15) // 8 * 8), math.nan)
    wide[..., 1 : keys + 1] = bias
    return wide[..., 1 : keys + 1]


def of_every_second_key(bias: torch.Tensor) -> torch.Tensor:
    return bias.repeat_interleave(2, -1)[..., ::2]


VIEWS = (in_order_of_an_embedding, with_queries_closest, from_the_second_element, of_every_second_key)


@over_16_bits
@over_cases([*ON_CPU, *for_gpus([case for case in CASES if case not in ON_CPU])])
def test_lengths_that_are_no_multiples_of_8(case, dtype, backend):
    check_drawn(lambda seed: make_inputs(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.bfloat16,))
@over_cases([CASES[0], *for_gpus(CASES[1::5])])
def test_without_the_gradient_of_the_bias(case, dtype, backend):
    def draw(seed: int) -> Inputs:
        return without_dbias(make_inputs(case, dtype, backend.device, seed))

    check_drawn(draw, backend)


@over_dtypes((torch.bfloat16,))
@over_cases([BESIDE_OTHERS[0], *for_gpus(BESIDE_OTHERS[1:])])
def test_beside_others(case, dtype, backend):
    check_drawn(lambda seed: make_inputs(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.bfloat16,))
@over_cases([PACKED[0], *for_gpus(PACKED[1:])])
def test_packed(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_16_bits
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize(
    "case",
    [
        Case(sq=200, sk=256, d=64, heads=4, bias="1hqk"),
        *for_gpus(
            [
                Case(sq=300, sk=413, d=128, heads=6, kv_heads=2, bias="bhqk", causal="bottom_right"),
                Case(sq=160, sk=208, d=32, heads=4, bias="1hqk", mask="b11k"),
                Case(sq=300, sk=263, d=64, heads=3, bias="b1qk"),
            ]
        ),
    ],
    ids=str,
)
def test_views(case, view, dtype, backend):
    def draw(seed: int) -> Inputs:
        inputs = make_inputs(case, dtype, backend.device, seed)
        return inputs.replace(bias=view(inputs.bias))

    check_drawn(draw, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("mebibytes", ["0", "1"])
def test_without_memory_for_the_copy(mebibytes, dtype, backend, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    case = Case(sq=500, sk=499, d=64, heads=6, bias="bhqk")
    check_drawn(lambda seed: make_inputs(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
def test_nan_in_what_a_mask_hides(d, poison, dtype, backend):
    inputs = make_inputs(Case(sq=300, sk=413, d=d, heads=2, bias="1hqk", mask="b11k"), dtype, backend.device)
    inputs.mask[..., 350:] = False
    check_hidden_keys(inputs, 350, poison, backend)


@over_dtypes((torch.bfloat16,))
@over_cases(for_gpus(CASES[4:20:5]))
def test_repeats(case, dtype, backend):
    assert_repeats(make_inputs(case, dtype, backend.device), backend, RUNS)
