"""Every analytic gradient against finite differences in float64, at sizes where each element is perturbed."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.derivatives.small_cases import BIAS_PATTERNS, CASES, EVERYTHING, PACKED_CASES, SMALL, function_of
from support.params import computes_in, over_cases
from support.runners import call_ours

pytestmark = computes_in(torch.float64)


@over_cases(CASES + BIAS_PATTERNS)
def test_dense(case, backend):
    function, leaves, _ = function_of(case, backend)
    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@over_cases(PACKED_CASES)
def test_packed(case, backend):
    function, leaves, _ = function_of(case, backend)
    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "alibi_slopes", "sink"])
def test_one_input_alone(wanted, backend):
    """Only one input requires grad: its gradient is the same, and no other is computed."""
    inputs = make_inputs(Case(**SMALL, **EVERYTHING), torch.float64, backend.device).replace(differentiable=(wanted,))
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "bias", "alibi_slopes", "sink")}

    def function(leaf):
        return call_ours(inputs, tensors | {wanted: leaf}, backend)

    assert torch.autograd.gradcheck(function, (inputs.leaves()[wanted],))


def test_lse_alone(backend):
    inputs = make_inputs(Case(**SMALL, **EVERYTHING), torch.float64, backend.device)
    leaves = inputs.leaves()
    names = list(leaves)

    def function(*tensors):
        return call_ours(inputs, dict(zip(names, tensors, strict=True)), backend)[1]

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


def test_sdpa_with_a_mask_that_requires_grad(backend):
    q, k, v = (torch.randn(1, 2, n, 2, dtype=torch.float64, device=backend.device) for n in (3, 4, 4))
    mask = torch.randn(4, dtype=torch.float64, device=backend.device)
    leaves = tuple(t.requires_grad_() for t in (q, k, v, mask))
    assert torch.autograd.gradcheck(flash_attn_ext.scaled_dot_product_attention, leaves)
