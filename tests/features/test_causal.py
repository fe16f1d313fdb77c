"""Causal attention in both alignments, for every relation of the two lengths."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.checks import check_case
from support.params import over_cases, over_dtypes
from support.runners import run_ours

ALIGNMENTS = ("top_left", "bottom_right")
LENGTHS = ((64, 64), (128, 257), (257, 128), (33, 300), (300, 33), (1, 65), (65, 1), (129, 192), (256, 256), (255, 31))
CASES = [Case(sq=sq, sk=sk, causal=causal, d=24) for causal in ALIGNMENTS for sq, sk in LENGTHS]


@over_dtypes()
@over_cases(CASES)
def test_matches_float64(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes()
@over_cases([Case(sq=150, sk=270, causal=causal, dlse=True) for causal in ALIGNMENTS])
def test_with_lse_gradient(case, dtype, backend):
    check_case(case, dtype, backend)


def test_alignments_agree_on_squares(backend):
    results = [
        run_ours(make_inputs(Case(sq=130, sk=130, causal=causal), torch.float32, backend.device), backend)
        for causal in ALIGNMENTS
    ]
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


@pytest.mark.parametrize(("causal", "first"), [("top_left", 0), ("bottom_right", 3)])
def test_the_diagonal(causal, first, backend):
    """Two queries, five keys: query 0 sees keys up to 0 at the top left, up to 3 at the bottom right."""
    q = torch.zeros(1, 1, 2, 1, device=backend.device)
    k = torch.zeros(1, 1, 5, 1, device=backend.device)
    v = torch.eye(5, device=backend.device).reshape(1, 1, 5, 5)
    weights = flash_attn_ext.attention(q, k, v, causal=causal, backend=backend.name)[0, 0]
    seen = [first + 1, first + 2]
    for row, count in zip(weights, seen, strict=True):
        expected = torch.zeros(5, device=backend.device)
        expected[:count] = 1 / count
        torch.testing.assert_close(row, expected)


def test_bottom_right_rows_before_the_first_key_are_zero(backend):
    """More queries than keys: the first Sq - Sk queries see nothing."""
    inputs = make_inputs(Case(sq=200, sk=70, causal="bottom_right"), torch.float32, backend.device)
    result = run_ours(inputs, backend)
    blind = slice(0, 130)
    assert bool((result["out"][:, :, blind] == 0).all())
    assert bool((result["lse"][:, :, blind] == -float("inf")).all())
    assert bool((result["dq"][:, :, blind] == 0).all())
    assert all(bool(torch.isfinite(result[name]).all()) for name in ("out", "dq", "dk", "dv"))
