"""Numbers that a product adds to its columns (tile/sm90/column_terms.h): a model of how they are split in three."""

import pytest
import torch

ELEMENTS = (torch.bfloat16, torch.float16)
HIGH, LOW = 2.0**12, 2.0**-11


def parts(x: torch.Tensor, element: torch.dtype) -> list[torch.Tensor]:
    """Of float32 numbers, in float32 arithmetic, as ColumnTerms::row has them."""

    def rounded(y: torch.Tensor) -> torch.Tensor:
        return y.to(element).float()

    h = rounded(x / HIGH)
    rest = x - h * HIGH
    m = rounded(rest)
    return [h, m, rounded((rest - m) / LOW)]


def sum_of(split: list[torch.Tensor]) -> torch.Tensor:
    return sum(part.double() * factor for part, factor in zip(split, (HIGH, 1.0, LOW), strict=True))


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_what_is_lost_is_less_than_float32_rounds(element):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(200_000, generator=generator) * 60 - 33  # up to 1.9 x 2^27
    x = torch.randn(200_000, generator=generator).clamp(-1.9, 1.9) * torch.exp2(exponents)
    lost = (sum_of(parts(x, element)) - x.double()).abs()
    allowed = torch.maximum(x.double().abs() * 2.0**-24, torch.tensor(2.0**-36, dtype=torch.float64))
    assert (lost <= allowed).all()


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("x", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_adds_nan(element, x):
    assert sum_of(parts(torch.tensor(x), element)).isnan()


def test_what_float16_does_not_reach_adds_nan():
    """So that the rows are computed again, not wrong."""
    assert sum_of(parts(torch.tensor([2.0**28, -3e9, 1e30]), torch.float16)).isnan().all()
    assert sum_of(parts(torch.tensor([2.0**28, -3e9, 1e30]), torch.bfloat16)).isfinite().all()
