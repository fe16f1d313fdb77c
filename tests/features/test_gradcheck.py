"""Every analytic gradient against finite differences in float64, at sizes where each element is perturbed."""

import pytest
import torch

import flash_attn_ext
from support.cases import ALL_PATTERNS, Case, make_inputs
from support.masks import attended
from support.packed import PackedCase, call_packed, make_packed
from support.params import computes_in, over_cases
from support.runners import call_ours

pytestmark = computes_in(torch.float64)

SMALL = dict(sq=3, sk=4, d=2, batch=1, heads=2)
EVERYTHING = dict(bias="bhqk", alibi="bh", softcap=2.0, sink=True)
CASES = [
    Case(**SMALL),
    Case(**SMALL, causal="top_left"),
    Case(**SMALL, causal="bottom_right"),
    Case(**(SMALL | dict(sq=4, sk=3)), causal="bottom_right"),  # the first row sees nothing
    Case(**SMALL, window=(1, 1)),
    Case(**SMALL, window=(1, 0), causal="bottom_right"),
    Case(**SMALL, scale=-0.7),
    Case(**SMALL, scale=0.0),
    Case(**SMALL, mask="11qk", sink=True),
    Case(**SMALL, mask="bh1k"),
    Case(**SMALL, softcap=0.8),
    Case(**SMALL, sink=True),
    Case(**SMALL, alibi="h"),
    Case(**SMALL, alibi="bh", causal="top_left"),
    Case(**(SMALL | dict(batch=2)), alibi="bh", causal="bottom_right"),
    Case(**SMALL, dropout_p=0.4),
    Case(**SMALL, dropout_p=0.4, sink=True, softcap=1.0, alibi="h"),
    Case(**(SMALL | dict(heads=4)), kv_heads=2),
    Case(**(SMALL | dict(heads=3)), kv_heads=1, bias="1hqk", causal="bottom_right"),
    Case(**SMALL, dv=3),
    Case(**SMALL, dv=1, sink=True),
    Case(**SMALL, layout="bshd"),
    Case(**(SMALL | dict(heads=4)), kv_heads=2, layout="bshd", **EVERYTHING, dropout_p=0.3),
    Case(**SMALL, **EVERYTHING, causal="top_left"),
    Case(**SMALL, **EVERYTHING, window=(1, 2), causal="bottom_right"),
    Case(**(SMALL | dict(batch=2)), **EVERYTHING, mask="b11k", dropout_p=0.2, dv=3),
]
BIAS_PATTERNS = [
    Case(**(SMALL | dict(batch=2)), bias=pattern, causal=causal)
    for pattern in ALL_PATTERNS
    for causal in (None, "bottom_right")
]


@over_cases(CASES + BIAS_PATTERNS)
def test_dense(case, backend):
    inputs = make_inputs(case, torch.float64, backend.device)
    leaves = inputs.leaves()
    names = list(leaves)
    # The LSE of a row that sees nothing is -inf, which finite differences cannot take.
    finite_lse = case.sink or bool(attended(case, inputs.mask).any(-1).all())

    def function(*tensors):
        out, lse = call_ours(inputs, dict(zip(names, tensors, strict=True)), backend)
        return (out, lse) if finite_lse else out

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@over_cases(
    [
        PackedCase((3, 0, 2), (2, 3, 3), Case(d=2)),
        PackedCase((3, 1, 2), (4, 1, 3), Case(d=2, causal="top_left", softcap=1.0)),
        PackedCase((2, 1, 3), (4, 1, 3), Case(d=2, causal="bottom_right", alibi="bh", dv=3)),
        PackedCase((3, 1, 2), (2, 1, 3), Case(d=2, bias="bhqk", sink=True, window=(1, 1))),
        PackedCase((3, 1, 2), (2, 1, 3), Case(d=2, bias="11q1", dropout_p=0.3, sink=True)),
        PackedCase((3, 1), (2, 2), Case(d=2, heads=4, kv_heads=2, bias="1h1k", mask="b11k", sink=True)),
    ]
)
def test_packed(case, backend):
    inputs = make_packed(case, torch.float64, backend.device)
    leaves = inputs.leaves()
    names = list(leaves)

    def function(*tensors):
        return call_packed(case, inputs, dict(zip(names, tensors, strict=True)), backend)

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
