"""The error rule of every path, for ``verify`` on a user's machine and for the tests.

The largest error against the float64 answer to the same inputs is at most twice that of PyTorch's own attention in the
same dtype, plus a slack. The mean error is at most 1.1 times PyTorch's, plus the same slack. The slack is a share of
the result's largest magnitude (:func:`slack_share`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ERROR_RATIO = 2.0
MEAN_ERROR_RATIO = 1.1
# The additional error that is allowed, as a share of the result's largest magnitude, by the result's dtype. In float32
# it is a few roundings of an element, in 16 bits less than one. In float64 the exact answer is itself only float64, so
# it is the possible difference of two orders of summation.
SLACK = {
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.float64: 1e-12,
    torch.bfloat16: 1e-5,
    torch.float16: 1e-5,
}
# On a GPU, tensor cores compute each float32 product from three TF32 products, to 2^-20, and truncate sums. This allows
# a few such errors (docs/numerics.md, "float32 on a GPU").
FLOAT32_SLACK_ON_GPU = 8 * 2.0**-20


@dataclass(frozen=True)
class Errors:
    largest: float
    mean: float


@dataclass(frozen=True)
class Comparison:
    """Errors of one result against float64: ours, those of PyTorch in the same dtype, and the slack."""

    ours: Errors
    theirs: Errors
    slack: float

    def allowed(self) -> Errors:
        return Errors(
            MAX_ERROR_RATIO * self.theirs.largest + self.slack, MEAN_ERROR_RATIO * self.theirs.mean + self.slack
        )

    def keeps_rule(self) -> bool:
        allowed = self.allowed()
        return self.ours.largest <= allowed.largest and self.ours.mean <= allowed.mean

    def share_of_allowed(self) -> float:
        """Our error divided by the error that the rule allows, the larger of two quotients. Above 1 breaks the rule."""
        allowed = self.allowed()
        return max(ratio(self.ours.largest, allowed.largest), ratio(self.ours.mean, allowed.mean))


def errors_of(result: Tensor, exact: Tensor) -> Errors:
    """Equal infinities (the LSE of a row without keys) count 0, and NaN counts as infinite."""
    result, exact = result.detach().to(exact.device, torch.float64), exact.detach().to(torch.float64)
    if result.shape != exact.shape:
        raise ValueError(f"shape {tuple(result.shape)}, expected {tuple(exact.shape)}")
    if exact.numel() == 0:
        return Errors(0.0, 0.0)
    error = (result - exact).abs()
    if not bool(error.max().isfinite()):
        error = torch.where(result == exact, 0.0, error).nan_to_num(nan=float("inf"))
    return Errors(float(error.max()), float(error.mean()))


def scale_of(exact: Tensor) -> float:
    """The largest finite magnitude."""
    magnitudes = exact.detach().abs()
    if magnitudes.numel() > 0 and bool(magnitudes.max().isfinite()):
        return float(magnitudes.max())
    finite = magnitudes[torch.isfinite(magnitudes)]
    return float(finite.max()) if finite.numel() else 0.0


def slack_share(result: Tensor) -> float:
    """The error that is allowed beyond PyTorch's, as a share of the result's largest magnitude."""
    if result.is_cuda and result.dtype == torch.float32:
        return FLOAT32_SLACK_ON_GPU
    return SLACK[result.dtype]


def ratio(error: float, other: float) -> float:
    if error == 0:
        return 0.0
    return error / other if other > 0 else float("inf")
