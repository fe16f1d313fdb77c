"""Boolean masks of every broadcast shape: True = attend, and a row without any key is zero, never NaN."""

import pytest
import torch

from support.cases import ALL_PATTERNS, Case, make_inputs
from support.checks import check_case, check_inputs
from support.params import over_cases, over_dtypes
from support.runners import run_ours

CASES = [Case(sq=140, sk=270, d=16, batch=3, mask=pattern) for pattern in ALL_PATTERNS]
SPARSE = [Case(sq=140, sk=270, d=16, mask="bhqk", mask_keep=keep) for keep in (0.003, 0.02, 0.999)]
COMBINED = [Case(sq=140, sk=270, d=16, mask="b1qk", causal=causal, dlse=True) for causal in (None, "top_left")]


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(CASES)
def test_every_broadcast_shape(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float64, torch.float16))
@over_cases(SPARSE + COMBINED)
def test_sparse_masks_and_combinations(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes()
@pytest.mark.parametrize("rows", [[0], [127, 128], list(range(0, 140)), list(range(128, 140))], ids=str)
def test_rows_without_keys(rows, dtype, backend):
    """Output 0, LSE -inf, gradients 0; the other rows as if the empty ones were not there."""
    inputs = make_inputs(Case(sq=140, sk=270, mask="11qk", dlse=True), dtype, backend.device)
    inputs.mask[:, :, rows] = False
    result = check_inputs(inputs, backend)
    assert bool((result["out"][:, :, rows] == 0).all())
    assert bool((result["lse"][:, :, rows] == -float("inf")).all())
    assert bool((result["dq"][:, :, rows] == 0).all())


def test_keys_that_no_query_attends_get_no_gradient(backend):
    inputs = make_inputs(Case(sq=140, sk=270, mask="111k"), torch.float32, backend.device)
    result = run_ours(inputs, backend)
    hidden = ~inputs.mask[0, 0, 0]
    assert bool((result["dk"][:, :, hidden] == 0).all())
    assert bool((result["dv"][:, :, hidden] == 0).all())


def test_mask_of_whole_tiles(backend):
    """Blocks of 128 x 256 that are all False, all True, or mixed, in one mask."""
    inputs = make_inputs(Case(sq=300, sk=600, d=16, mask="11qk"), torch.float32, backend.device)
    inputs.mask[..., :128, 256:512] = False
    inputs.mask[..., 128:256, :512] = True
    inputs.mask[..., 256:, :256] = False
    check_inputs(inputs, backend)


def test_mask_equals_a_bias_of_minus_infinity(backend):
    case = Case(sq=140, sk=270, mask="bhqk")
    masked = make_inputs(case, torch.float32, backend.device)
    bias = torch.zeros_like(masked.mask, dtype=torch.float32).masked_fill(~masked.mask, -float("inf"))
    biased = masked.replace(case=Case(sq=140, sk=270, bias="bhqk"), mask=None, bias=bias)
    by_mask, by_bias = run_ours(masked, backend), run_ours(biased, backend)
    for name in by_mask:
        torch.testing.assert_close(by_mask[name], by_bias[name])
    assert not bool(by_bias["dbias"].isnan().any())
