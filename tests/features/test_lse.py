"""The LSE as an output: natural log, and differentiable on its own."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.checks import check_case
from support.params import over_cases, over_dtypes

CASES = [
    Case(sq=140, sk=270, dlse=True),
    Case(sq=65, sk=97, dlse=True, bias="bhqk"),
    Case(sq=65, sk=97, dlse=True, softcap=4.0, window=(20, 20)),
    Case(sq=65, sk=97, dlse=True, heads=4, kv_heads=2, causal="top_left"),
]


@over_dtypes()
@over_cases(CASES)
def test_matches_float64(case, dtype, backend):
    check_case(case, dtype, backend)


def test_is_the_natural_logarithm(backend):
    q, k = (torch.zeros(1, 1, n, 8, device=backend.device) for n in (2, 10))
    _, lse = flash_attn_ext.attention(q, k, k, return_lse=True, backend=backend.name)
    torch.testing.assert_close(lse, torch.full_like(lse, 10.0).log())


def test_gradient_of_the_lse_alone(backend):
    """d lse / d score is the softmax, so dq = softmax . k x scale; v gets nothing."""
    inputs = make_inputs(Case(sq=65, sk=97), torch.float64, backend.device)
    q, k, v = (t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    _, lse = flash_attn_ext.attention(q, k, v, return_lse=True, backend=backend.name)
    lse.sum().backward()
    scale = 32**-0.5
    weights = (scale * q.detach() @ k.detach().mT).softmax(-1)
    torch.testing.assert_close(q.grad, scale * weights @ k.detach())
    torch.testing.assert_close(k.grad, scale * weights.mT @ q.detach())
    assert v.grad is None or bool((v.grad == 0).all())


@pytest.mark.parametrize("split", [1, 128, 200, 269])
def test_two_halves_merge_through_it(split, backend):
    """softmax over all keys = the two parts weighted by exp(lse - total): how context parallelism uses the LSE."""
    inputs = make_inputs(Case(sq=65, sk=270), torch.float64, backend.device)

    def part(keys: slice):
        options = dict(return_lse=True, backend=backend.name)
        return flash_attn_ext.attention(inputs.q, inputs.k[:, :, keys], inputs.v[:, :, keys], **options)

    (out1, lse1), (out2, lse2) = part(slice(0, split)), part(slice(split, None))
    whole, total = part(slice(None))
    torch.testing.assert_close(torch.logaddexp(lse1, lse2), total)
    weights = [(lse - total).exp().unsqueeze(-1) for lse in (lse1, lse2)]
    torch.testing.assert_close(weights[0] * out1 + weights[1] * out2, whole)


@over_dtypes()
@pytest.mark.parametrize(("sq", "sk"), [(3, 3), (1, 2048), (600, 600)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_is_not_returned_unless_asked(sq, sk, has_bias, dtype, backend):
    """Kernels write it all the same, to where it overwrites nothing that they read."""
    q, k, v = (torch.randn(2, 2, n, 32, device=backend.device, dtype=dtype) for n in (sq, sk, sk))
    bias = torch.randn(2, 2, sq, sk, device=backend.device, dtype=dtype) if has_bias else None
    options = dict(bias=bias, causal="bottom_right", backend=backend.name)
    out = flash_attn_ext.attention(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, flash_attn_ext.attention(q, k, v, return_lse=True, **options)[0])
