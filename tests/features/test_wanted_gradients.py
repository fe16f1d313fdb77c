"""Any subset of the gradients: each is what it is beside the others."""

import itertools

import pytest
import torch

from support.cases import Case, make_inputs
from support.errors import assert_same_answer
from support.params import over_cases
from support.runners import call_ours, gradients, run_ours

NAMES = ("q", "k", "v", "bias")
SUBSETS = [names for n in range(1, len(NAMES)) for names in itertools.combinations(NAMES, n)]


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
    inputs = make_inputs(case, torch.float32, backend.device)
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
