"""The error rule of every path, written once.

Against the float64 answer to the same inputs: the largest error is at most twice that of PyTorch's own attention in
the same dtype plus 1e-5 of the output's scale, and the mean error is at most 1.1 times plus the same slack.

Some gradients cancel to nothing in exact arithmetic (that of a bias which is constant along a row; q's where a query
sees one key). Such an output has no scale of its own: it gets the scale of the terms that cancel.
"""

from dataclasses import dataclass

import torch

MAX_RATIO = 2.0
MEAN_RATIO = 1.1
# In float64 the exact answer is itself only float64, so the slack is what two orders of summation may differ by.
SLACK = {torch.float64: 1e-12}
DEFAULT_SLACK = 1e-5
CANCELLED = 1e-3  # an output below this fraction of its terms


@dataclass(frozen=True)
class Errors:
    largest: float
    mean: float


def errors_of(result: torch.Tensor, exact: torch.Tensor) -> Errors:
    """Equal infinities (the LSE of a row without keys) are no error; a NaN is an infinite one."""
    result, exact = result.detach().to("cpu", torch.float64), exact.detach().to("cpu", torch.float64)
    assert result.shape == exact.shape, f"shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
    if exact.numel() == 0:
        return Errors(0.0, 0.0)
    error = (result - exact).abs()
    error = torch.where(result == exact, 0.0, error).nan_to_num(nan=float("inf"))
    return Errors(float(error.max()), float(error.mean()))


def scale_of(exact: torch.Tensor) -> float:
    finite = exact.detach()[torch.isfinite(exact)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def check_error(
    name: str, result: torch.Tensor, yardstick: torch.Tensor, exact: torch.Tensor, terms: float = 0.0
) -> None:
    """Raise when `result` breaks the rule.

    `yardstick` is PyTorch's answer in the same dtype, `terms` the largest sum of absolute terms of an element.
    """
    ours, theirs = errors_of(result, exact), errors_of(yardstick, exact)
    scale = scale_of(exact)
    if scale < CANCELLED * terms:
        scale = terms
    slack = SLACK.get(result.dtype, DEFAULT_SLACK) * scale
    for kind, ratio in (("largest", MAX_RATIO), ("mean", MEAN_RATIO)):
        error, allowed = getattr(ours, kind), ratio * getattr(theirs, kind) + slack
        assert error <= allowed, (
            f"{name}: {kind} error {error:.3g}, allowed {allowed:.3g} = {ratio} x {getattr(theirs, kind):.3g} "
            f"(PyTorch in {result.dtype}) + {slack:.3g}"
        )
