"""An additive bias of every broadcast shape, and its gradient summed over what was broadcast."""

import pytest
import torch

from support.cases import ALL_PATTERNS, Case, make_inputs
from support.checks import check_case, check_inputs, check_packed_drawn
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes

CASES = [Case(sq=140, sk=270, d=16, batch=3, heads=2, bias=pattern) for pattern in ALL_PATTERNS]
EDGES = [Case(sq=n, sk=m, d=16, bias="1hqk") for n, m in ((1, 257), (128, 256), (129, 33), (257, 32), (64, 1))]
COMBINED = [
    Case(sq=140, sk=270, d=16, heads=4, kv_heads=2, bias=pattern, causal="bottom_right", dlse=True)
    for pattern in ("bhqk", "11qk", "b11k", "1hq1")
]
# Where a GPU keeps dS, and dBias is read from it: rows of dBias that are multiples of 16 bytes, and not.
KEPT = [
    Case(sq=sq, sk=sk, d=d, batch=2, heads=4, kv_heads=2, bias=pattern, **features)
    for d in (64, 96, 128, 192)
    for pattern in ("1hqk", "bhqk", "11qk", "b1qk")
    for sq, sk, features in ((140, 270, {}), (201, 136, dict(causal="bottom_right")))
]
KEPT_PACKED = [
    PackedCase((70, 0, 129, 3), (31, 64, 200, 1), Case(d=d, heads=4, kv_heads=2, bias=pattern, causal=causal))
    for d in (64, 128, 192)
    for pattern, causal in (("1hqk", None), ("b1qk", "bottom_right"), ("11qk", "top_left"))
]


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(CASES)
def test_every_broadcast_shape(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float64, torch.float16))
@over_cases(EDGES + COMBINED)
def test_tile_edges_and_combinations(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, torch.float16))
@over_cases(KEPT)
def test_head_dims_at_which_scores_are_kept(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16,))
@over_cases(KEPT_PACKED)
def test_packed_where_scores_are_kept(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.bfloat16, torch.float16))
@over_cases(
    [Case(sq=140, sk=270, bias=pattern, bias_float32=True) for pattern in ("bhqk", "1h11", "b11k")]
    + [Case(sq=140, sk=sk, d=128, bias="1hqk", bias_float32=True) for sk in (270, 272)]
)
def test_float32_bias_beside_16_bit_inputs(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, torch.float16))
@pytest.mark.parametrize("d", [32, 128, 192])
def test_float32_bias_is_not_rounded(d, dtype, backend):
    """Neither to the inputs' dtype on the way in, nor its gradient on the way out.

    Around 4096 the neighbours of 16-bit numbers are 4 and more apart, so all that distinguishes keys would be gone.
    """
    inputs = make_inputs(Case(sq=140, sk=270, d=d, bias="bhqk", bias_float32=True), dtype, backend.device)
    inputs.bias += 4096
    result = check_inputs(inputs, backend)
    gradient = result["dbias"]
    assert float((gradient == gradient.to(dtype).float()).double().mean()) < 0.1
