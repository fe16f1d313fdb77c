"""Sliding windows, alone and under both causal alignments."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.checks import check_case
from support.masks import visible
from support.params import over_cases, over_dtypes
from support.runners import run_ours

WINDOWS = ((0, 0), (5, 0), (0, 5), (31, 33), (64, 64), (128, None), (None, 128), (None, None), (1000, 1000))
LENGTHS = ((192, 192), (129, 300), (300, 129))
CASES = [Case(sq=sq, sk=sk, window=window, d=16) for window in WINDOWS for sq, sk in LENGTHS]
CAUSAL = [
    Case(sq=sq, sk=sk, window=window, causal=causal, d=16)
    for window in ((0, 0), (40, 7), (128, None), (None, 3))
    for sq, sk in LENGTHS
    for causal in ("top_left", "bottom_right")
]


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(CASES)
def test_matches_float64(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float64, torch.float16))
@over_cases(CAUSAL)
def test_under_causal(case, dtype, backend):
    check_case(case, dtype, backend)


@over_cases(
    [
        Case(sq=sq, sk=sk, window=window, causal=causal, batch=1, heads=1)
        for sq, sk in ((7, 13), (13, 7), (70, 40))
        for window in (None, (0, 0), (3, 1), (2, None), (None, 4))
        for causal in (None, "top_left", "bottom_right")
    ]
)
def test_which_keys_are_seen(case, backend):
    """Score level: with uniform weights and V the identity, the nonzero outputs are the visible keys."""
    q = torch.zeros(1, 1, case.sq, 1, device=backend.device)
    k = torch.zeros(1, 1, case.sk, 1, device=backend.device)
    v = torch.eye(case.sk, device=backend.device).reshape(1, 1, case.sk, case.sk)
    weights = flash_attn_ext.attention(q, k, v, causal=case.causal, window=case.window, backend=backend.name)
    assert torch.equal(weights[0, 0].cpu() > 0, visible(case))


def test_window_wider_than_the_keys_changes_nothing(backend):
    inputs = make_inputs(Case(sq=130, sk=200), torch.float32, backend.device)
    wide = inputs.replace(case=Case(sq=130, sk=200, window=(500, 500)))
    plain, windowed = run_ours(inputs, backend), run_ours(wide, backend)
    for name in plain:
        assert torch.equal(plain[name], windowed[name]), name


def test_one_number_is_both_sides(backend):
    inputs = make_inputs(Case(sq=70, sk=90), torch.float32, backend.device)
    one, pair, listed = (
        flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, window=window, backend=backend.name)
        for window in (9, (9, 9), [9, 9])
    )
    assert torch.equal(one, pair) and torch.equal(one, listed)


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_huge_window_bounds_do_not_overflow(causal, backend):
    inputs = make_inputs(Case(sq=40, sk=50, causal=causal), torch.float32, backend.device)
    huge = inputs.replace(case=Case(sq=40, sk=50, causal=causal, window=(2**62, 2**62)))
    assert torch.equal(run_ours(inputs, backend)["out"], run_ours(huge, backend)["out"])
