"""The gradient of a bias that all batch entries share, on GPUs of few and many SMs: each tile has other parts."""

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_on_sm_counts
from support.disturbance import assert_repeats
from support.params import over_cases, over_dtypes

SM_COUNTS = (1, 3, 16, 61, 132)
RUNS = 100
pytestmark = pytest.mark.usefixtures("on_hopper")

CASES = [
    Case(sq=256, sk=256, batch=13, heads=2, bias="1hqk", mask="b11k"),
    Case(sq=129, sk=136, batch=29, heads=1, bias="1hqk"),
    Case(sq=160, sk=256, batch=5, heads=3, bias="11qk", mask="b11k", padding=True),
    Case(sq=300, sk=264, d=64, batch=7, heads=2, bias="1hqk", causal="top_left"),
    Case(sq=264, sk=264, d=64, batch=3, heads=4, kv_heads=2, bias="11qk"),
    Case(sq=520, sk=392, d=64, batch=3, heads=4, bias="1hqk", mask="b11k", padding=True),
    Case(sq=300, sk=520, d=64, batch=3, heads=4, kv_heads=2, bias="1hqk", mask="bh1k", dropout_p=0.2),
]


@over_dtypes((torch.bfloat16, torch.float16))
@over_cases(CASES)
def test_numbers_of_parts(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16,))
@over_cases(CASES)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)
