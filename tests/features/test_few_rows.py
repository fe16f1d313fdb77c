"""Few queries or few keys, where PyTorch's products add up in many short sums: float32 has to be as exact."""

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import compare_with_pytorch
from support.errors import assert_rule, pooled
from support.params import over_cases
from support.runners import run_ours

DRAWS = 8


def with_large_scores(case: Case, device: str, seed: int) -> Inputs:
    """Standard deviation 3: scores of 9 sqrt(d), whose rounding errors are those of the weights."""
    inputs = make_inputs(case, torch.float32, device, seed)
    return inputs.replace(q=3 * inputs.q, k=3 * inputs.k, v=3 * inputs.v)


@over_cases(
    [
        *(Case(sq=sq, sk=128, d=d, batch=1, heads=16) for sq in (1, 2, 3) for d in (64, 128, 200, 256)),
        *(Case(sq=64, sk=sk, d=d, batch=1, heads=8) for sk in (1, 3) for d in (64, 128)),
        Case(sq=128, sk=128, d=256, batch=1, heads=4),
        Case(sq=65, sk=300, d=256, batch=1, heads=4),  # a tile of one query after one of 64
    ]
)
def test_mean_error_in_float32(case, backend):
    """Over several draws, since a few rows average little."""

    def draw(seed: int):
        inputs = with_large_scores(case, backend.device, seed)
        return compare_with_pytorch(inputs, backend, run_ours(inputs, backend))

    assert_rule(pooled([draw(seed) for seed in range(DRAWS)]))


@pytest.mark.parametrize("d", [32, 64, 80, 128, 200])
def test_a_single_key_has_weight_1(d, backend):
    """The backward pass forms P = exp(score - lse) anew: with one key it is exp(0), and dv is dout bit by bit."""
    if not backend.is_cpu:
        pytest.skip("a GPU's product with 1 is the sum of two TF32 products")
    inputs = with_large_scores(Case(sq=1, sk=1, d=d, batch=3, heads=5), backend.device, seed=0)
    result = run_ours(inputs, backend)
    assert torch.equal(result["out"], inputs.v)
    assert torch.equal(result["dv"], inputs.dout)
