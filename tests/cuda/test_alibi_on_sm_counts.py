"""Hopper's kernels for ALiBi slopes as plans of GPUs of few and of many SMs choose them: tiles of 192 queries and of
128, several phases of a cyclic loop order, and shares of a head's query tiles."""

import pytest
import torch

from support.cases import Case
from support.checks import check_on_sm_counts
from support.params import over_cases, over_dtypes

SM_COUNTS = (1, 7, 132)
pytestmark = pytest.mark.usefixtures("on_hopper")

SHAPES = (
    *((dict(sq=1000, sk=1000, d=d, heads=4, kv_heads=kv_heads)) for d, kv_heads in ((64, 4), (80, 2), (128, 1))),
    dict(sq=700, sk=1300, d=64, heads=2),
)
CASES = [
    Case(**shape, alibi="h", dlse=True, **visible)
    for shape in SHAPES
    for visible in (
        dict(),
        dict(causal="bottom_right"),
        dict(window=(None, 30)),
        dict(window=(0, None)),
        dict(mask="b11k", padding=True),
        dict(mask="b1qk"),
    )
]
# Of few key tiles, so that a head's query tiles are divided among CTAs.
SHARES = [
    Case(sq=4096, sk=300, d=d, batch=1, heads=heads, kv_heads=1, alibi="h") for d in (64, 128) for heads in (1, 2)
]


@over_dtypes((torch.bfloat16,))
@over_cases(CASES + SHARES)
def test_matches_float64(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)
