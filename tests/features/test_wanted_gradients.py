"""Any subset of the gradients: each is what it is beside the others."""

import itertools

import pytest
import torch

from flash_attn_ext import attention_varlen
from support.cases import DTYPES, Case, make_inputs
from support.errors import assert_same_answer
from support.params import computes_in, over_cases, over_dtypes
from support.runners import call_ours, gradients, run_ours

NAMES = ("q", "k", "v", "bias")
SUBSETS = [names for n in range(1, len(NAMES)) for names in itertools.combinations(NAMES, n)]
OF_MATRICES = [names for names in SUBSETS if "bias" not in names]


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
@over_cases(
    [
        Case(sq=140, sk=300, bias="bhqk", causal="bottom_right"),
        Case(sq=140, sk=300, bias="11q1", heads=4, kv_heads=2),
        Case(sq=100, sk=2100, d=64, bias="bhqk", batch=1),  # on a GPU blocks share the keys of dq
        Case(sq=140, sk=300, bias="1h1k", softcap=5.0, dropout_p=0.2, window=(90, 20)),
    ]
)
def test_subsets(case, names, backend):
    check_subset(case, names, torch.float32, backend)


@pytest.mark.parametrize("names", OF_MATRICES, ids="-".join)
@over_dtypes(DTYPES[1:3])
@over_cases(  # of which Hopper's kernels compute some gradients that are not wanted
    [
        Case(sq=300, sk=400, d=64, causal="top_left", heads=4, kv_heads=2, sink=True),
        Case(sq=140, sk=1100, d=128, dv=64, mask="b1qk", batch=1),
        Case(sq=300, sk=1100, d=192, layout="bshd", batch=1),
        Case(sq=1100, sk=1100, d=96, batch=1),
        Case(sq=500, sk=77, d=40),
        Case(sq=40, sk=600, d=128),
    ]
)
def test_subsets_of_matrices(case, names, dtype, backend):
    check_subset(case, names, dtype, backend)


def check_subset(case, names, dtype, backend):
    inputs = make_inputs(case, dtype, backend.device)
    leaves = inputs.leaves()
    tensors = {name: leaf if name in names else leaf.detach() for name, leaf in leaves.items()}
    out, lse = call_ours(inputs, tensors, backend)
    part = gradients({"out": out, "lse": lse}, inputs, {name: leaves[name] for name in names})
    whole = run_ours(inputs, backend)
    assert len(part) == len(names)
    for name, gradient in part.items():
        if backend.is_cpu:
            assert torch.equal(gradient, whole[name]), name
        else:  # other kernels may compute what is left
            assert_same_answer(gradient, whole[name], backend, name)


@computes_in(torch.bfloat16)
@pytest.mark.parametrize("names", OF_MATRICES, ids="-".join)
def test_subsets_of_packed_sequences(names, backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(rows, 2, 128, generator=generator).to(backend.device, torch.bfloat16)
        for rows in (1200, 1300, 1300, 1200)
    )
    offsets = [
        torch.tensor(t, dtype=torch.int32, device=backend.device) for t in ((0, 300, 300, 1200), (0, 200, 260, 1300))
    ]

    def gradients_of(wanted):
        leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in (("q", q), ("k", k), ("v", v))}
        out = attention_varlen(*leaves.values(), *offsets, max_seqlen_q=900, max_seqlen_k=1040, backend=backend.name)
        return dict(zip(wanted, torch.autograd.grad(out, [leaves[n] for n in wanted], dout), strict=True))

    whole = gradients_of(("q", "k", "v"))
    for name, gradient in gradients_of(names).items():
        assert_same_answer(gradient, whole[name], backend, name)
