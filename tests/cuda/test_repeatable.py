"""Bitwise repeatable on a GPU: every gradient, also while other work disturbs the order in which CTAs run.

Small problems and all backends: surface/test_determinism.py. Here the grids are larger than the GPU.
"""

import pytest
import torch

from support.backends import CPU, Backend
from support.binding import forward
from support.cases import ALL_PATTERNS, Case, Inputs, make_inputs
from support.disturbance import assert_repeats
from support.params import over_cases, over_dtypes
from support.runners import identity_parts, run_ours

RUNS = 8
LARGE = dict(sq=1100, sk=1500, d=64, batch=3, heads=8)
CASES = [
    Case(**LARGE, kv_heads=2, causal="bottom_right", dlse=True),
    Case(**(LARGE | dict(sq=600, sk=700, batch=12)), kv_heads=2, causal="top_left"),
    Case(**LARGE, bias="1111", mask="b11k", dropout_p=0.2),
    Case(**LARGE, bias="11qk", alibi="h", sink=True, softcap=20.0, dlse=True),
    Case(**LARGE, bias="bh1k", alibi="bh", sink=True, window=(300, 100)),
    Case(**(LARGE | dict(d=128, dv=96)), kv_heads=1, bias="b1q1", sink=True, causal="top_left"),
    Case(**(LARGE | dict(d=256)), kv_heads=4, alibi="h", sink=True),
]


@over_dtypes()
@over_cases(CASES)
def test_all_gradients(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_dtypes((torch.bfloat16, torch.float32))
@pytest.mark.parametrize("pattern", ALL_PATTERNS)
def test_bias_gradient_of_every_shape(pattern, dtype, gpu):
    case = Case(sq=600, sk=700, d=64, batch=3, heads=4, bias=pattern)
    inputs = make_inputs(case, dtype, "cuda", draw_on="cuda")
    first = run_ours(inputs, gpu)
    for _ in range(RUNS):
        assert torch.equal(first["dbias"], run_ours(inputs, gpu)["dbias"])


@over_dtypes()
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_masks_are_those_of_the_cpu(p, dtype, gpu):
    """Bit for bit. (The generators of the two devices make different seeds; here both calls get one.)"""
    inputs = make_inputs(Case(sq=140, sk=600, batch=3, heads=3, dropout_p=p), dtype)
    seed = torch.tensor([2**62 + 12345])
    on_cpu, on_gpu = (bits_of(inputs, seed, p, backend) for backend in (CPU, gpu))
    assert torch.equal(on_cpu, on_gpu.cpu())
    assert abs(float(on_cpu.double().mean()) - (1 - p)) < 0.01


def bits_of(inputs: Inputs, seed: torch.Tensor, p: float, backend: Backend) -> torch.Tensor:
    """(B, H, Sq, Sk), True = kept: uniform weights times an identity V."""
    case, make = inputs.case, dict(device=backend.device, dtype=inputs.q.dtype)
    q, k = (torch.zeros(case.batch, case.heads, n, 1, **make) for n in (case.sq, case.sk))
    options = dict(rng_seed=seed.to(backend.device), dropout_p=p, backend=backend.name)
    parts = (columns.expand(case.batch, case.heads, -1, -1) for columns in identity_parts(case.sk, **make))
    return torch.cat([forward(q, k, v, **options)[0] > 0 for v in parts], dim=-1)
