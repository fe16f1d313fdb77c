"""Scores far from zero. Rows whose bias swallows the scores: finfo.min is a uniform average, -1e4 an ordinary row."""

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import check_drawn, check_inputs
from support.params import over_cases, over_dtypes
from support.runners import run_ours, run_reference

# L % 128 == 64 is where a fused kernel of PyTorch's returns NaN gradients for such rows; 64 is the shortest.
LENGTHS = (64, 192, 320)
ROWS = [0, 17, 63]
CASES = [Case(sq=n, sk=n, d=16, batch=1, bias=pattern) for n in LENGTHS for pattern in ("11qk", "1hqk", "11q1")]
# The scores drown in finfo.min where they are added to it in the accumulate dtype; in float16 they do not.
SWALLOWING = (torch.float32, torch.bfloat16, torch.float64)


def with_low_rows(case: Case, dtype: torch.dtype, value: float, device: str, seed: int = 0) -> Inputs:
    inputs = make_inputs(case, dtype, device, seed)
    inputs.bias[:, :, ROWS] = value
    return inputs


@over_dtypes()
@over_cases([*CASES, Case(sq=192, sk=192, bias="11qk", dlse=True), Case(sq=64, sk=64, bias="11qk", alibi="h")])
def test_rows_at_minus_ten_thousand(case, dtype, backend):
    check_drawn(lambda seed: with_low_rows(case, dtype, -1e4, backend.device, seed), backend)


@over_dtypes()
@over_cases([*CASES, Case(sq=192, sk=192, bias="11qk", dlse=True), Case(sq=192, sk=192, bias="11qk", softcap=5.0)])
def test_rows_at_finfo_min(case, dtype, backend):
    """Forward and backward: the LSE cannot hold finfo.min + log n, yet the gradients are right."""
    check_drawn(lambda seed: with_low_rows(case, dtype, torch.finfo(dtype).min, backend.device, seed), backend)


@over_dtypes(SWALLOWING)
@over_cases([Case(sq=n, sk=n, d=16, bias="11qk") for n in LENGTHS])
def test_finfo_min_is_a_uniform_average(case, dtype, backend):
    inputs = with_low_rows(case, dtype, torch.finfo(dtype).min, backend.device)
    result = run_ours(inputs, backend)
    expected = inputs.v.double().mean(2, keepdim=True).expand(-1, -1, len(ROWS), -1)
    # The output itself is rounded to the dtype, and an average of numbers around 1 to a few units of it.
    tolerance = dict(rtol=torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(result["out"][:, :, ROWS].double(), expected, **tolerance)
    assert not any(bool(tensor.isnan().any()) for tensor in result.values())


@over_dtypes(SWALLOWING)
def test_every_row_at_finfo_min(dtype, backend):
    inputs = make_inputs(Case(sq=140, sk=300, d=16, bias="1111"), dtype, backend.device)
    inputs.bias[:] = torch.finfo(dtype).min
    result = check_inputs(inputs, backend)
    # The weights do not depend on the scores, but the gradient still flows through the softmax of equals.
    assert bool(torch.isfinite(result["dq"]).all())


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_padding_masks_of_models(causal, dtype, backend):
    """finfo.min for padded keys beside 0 for real ones; a row with padded keys only is their average."""
    inputs = make_inputs(Case(sq=140, sk=140, d=16, bias="b11k", causal=causal), dtype, backend.device)
    inputs.bias.zero_()
    inputs.bias[0, ..., :50] = torch.finfo(dtype).min
    inputs.bias[1, ..., 100:] = torch.finfo(dtype).min
    check_inputs(inputs, backend)


@over_dtypes()
@pytest.mark.parametrize("value", [-float("inf"), -1e4])
def test_float_mask_rows_next_to_empty_rows(value, dtype, backend):
    """-inf rows are empty (0, not NaN) and leave their neighbours alone."""
    inputs = make_inputs(Case(sq=192, sk=192, d=16, bias="11qk", dlse=True), dtype, backend.device)
    inputs.bias[:, :, [5, 64, 191]] = -float("inf")
    inputs.bias[:, :, [4, 65, 190]] = value
    result = check_inputs(inputs, backend)
    assert bool((result["out"][:, :, [5, 64, 191]] == 0).all())
    assert bool((result["dq"][:, :, [5, 64, 191]] == 0).all())
    assert bool((result["dbias"][:, :, [5, 64, 191]] == 0).all())


@over_dtypes((torch.float32, torch.float64))
@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6])
def test_a_constant_added_to_every_score_changes_only_the_lse(offset, dtype, backend):
    inputs = make_inputs(Case(sq=65, sk=97, d=16, bias="1111"), dtype, backend.device)
    inputs.bias[:] = offset
    check_inputs(inputs, backend)


@over_dtypes()
@pytest.mark.parametrize("sk", [113, 900])
@pytest.mark.parametrize("magnitude", [1e3, 1e5, 4e6])
def test_scores_far_from_zero(magnitude, sk, dtype, backend):
    """Keys nearly along one direction, which the queries share: the bound of docs/numerics.md on out and dv."""
    inputs = make_inputs(Case(sq=70, sk=sk, d=64, heads=2, batch=1), dtype, backend.device)
    direction = torch.nn.functional.normalize(torch.randn(64, device=backend.device, dtype=torch.float64), dim=0)
    length = (8 * magnitude) ** 0.5
    inputs.q.copy_(direction * length + inputs.q * 0.2 / length)
    inputs.k.copy_(direction * length + inputs.k * 0.02)
    ours, exact = run_ours(inputs, backend), run_reference(inputs.to(torch.float64))
    bits_of_score = 50 if dtype == torch.float64 else 22
    bound = 4 * torch.finfo(dtype).eps + magnitude * 2.0**-bits_of_score
    for name in ("out", "dv"):
        error = (ours[name].double() - exact[name]).abs().max() / exact[name].abs().max()
        assert float(error) <= bound, f"{name}: {float(error):.2e}, allowed {bound:.2e}"
