"""The one check that feature tests are made of: a case on a backend obeys the error rule, forward and backward."""

import torch

from support.backends import Backend
from support.cases import Case, Inputs, accumulate_dtype, make_inputs
from support.errors import check_error
from support.runners import Result, dropout_bits, run_ours, run_reference, run_sdpa, sdpa_can
from support.terms import largest_terms


def check_case(case: Case, dtype: torch.dtype, backend: Backend, seed: int = 0) -> Result:
    return check_inputs(make_inputs(case, dtype, backend.device, seed), backend)


def check_inputs(inputs: Inputs, backend: Backend, ours: Result | None = None) -> Result:
    """Compare with float64, PyTorch being the yardstick; returns our result."""
    ours = run_ours(inputs, backend) if ours is None else ours
    keep = dropout_bits(inputs, backend) if inputs.case.dropout_p > 0 else None
    exact, yardstick = run_reference(inputs.to(torch.float64), keep), measure_yardstick(inputs, keep)
    terms = largest_terms(inputs.to(torch.float64), exact, keep)
    assert ours.keys() == exact.keys()
    check_dtypes(inputs, ours)
    for name in ours:
        check_error(name, ours[name], yardstick[name], exact[name], terms.get(name, 0.0))
    return ours


def measure_yardstick(inputs: Inputs, keep: torch.Tensor | None = None) -> Result:
    """PyTorch's attention where it has the feature, else the plain formula in the same dtype.

    It has no LSE and no slopes. The LSE is kept in the accumulate dtype, so its yardstick is computed in it.
    """
    plain = run_reference(inputs, keep)
    plain["lse"] = run_reference(inputs.to(accumulate_dtype(inputs.q.dtype)), keep)["lse"]
    return plain | run_sdpa(inputs) if sdpa_can(inputs) else plain


def check_dtypes(inputs: Inputs, result: Result) -> None:
    assert result["out"].dtype == inputs.q.dtype
    assert result["lse"].dtype == accumulate_dtype(inputs.q.dtype)
    for name in inputs.differentiable:
        tensor = getattr(inputs, name)
        if tensor is not None:
            assert result[f"d{name}"].dtype == tensor.dtype, f"d{name}"
            assert result[f"d{name}"].shape == tensor.shape, f"d{name}"
