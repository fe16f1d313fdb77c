"""Hopper's key-stationary backward kernel where masks leave few iterations: L2 head groups have more heads."""

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_on_sm_counts
from support.disturbance import assert_repeats
from support.params import over_cases, over_dtypes

SM_COUNTS = (1, 2, 7, 20, 132)
RUNS = 50
pytestmark = pytest.mark.usefixtures("on_hopper")

# On few SMs an L2 head group has two pairs, and eight or sixteen where a mask is sparse.
SHAPE = dict(sq=1100, sk=1300, batch=1, blocks="1h", block_keep=0.1)
LISTS = [
    Case(**SHAPE, d=d, heads=heads, kv_heads=kv_heads, block_sizes=sizes, **more)
    for d, heads, kv_heads, sizes, more in (
        (64, 20, 20, (128, 128), {}),
        (96, 9, 9, (128, 128), dict(dlse=True)),
        (128, 11, 11, (64, 64), {}),
        (64, 16, 4, (64, 128), dict(causal="bottom_right")),
        (128, 16, 2, (128, 64), dict(intervals="1h", num_intervals=2, interval_rows=100)),
        (128, 6, 6, (128, 128), dict(window=(500, 300))),
    )
]


@over_dtypes((torch.bfloat16,))
@over_cases(LISTS)
def test_lists_of_few_blocks(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16,))
@over_cases(LISTS)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)
