"""The checks of cuda/test_very_long_sequences.py at lengths that every backend computes in no time."""

import pytest
import torch

from support.backends import CPU
from support.cases import Case
from support.packed import PackedCase, run_by_sequence
from support.params import for_gpus, over_dtypes
from support.runners import run_reference
from support.sampled import bands, by_heads, check_linear, check_sampled, exact_at, heads_of, make

HEADS = dict(batch=1, heads=2, d=64)
PROBLEMS = [
    Case(sq=1500, sk=1500, **HEADS),
    Case(sq=1500, sk=1500, **HEADS, kv_heads=1, causal="top_left"),
    Case(sq=1300, sk=1300, **HEADS | dict(d=128), window=(200, 0)),
    Case(sq=1300, sk=1300, **HEADS, window=(30, 100)),
    PackedCase((900, 200, 400), (900, 200, 400), Case(**HEADS, kv_heads=1, causal="bottom_right")),
    PackedCase((700, 1, 600), (700, 1, 600), Case(**HEADS)),
]
over_some_dtypes = over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))


@over_some_dtypes
@pytest.mark.parametrize("case", PROBLEMS, ids=str)
def test_sampled_rows(case, dtype, backend):
    check_sampled(case, dtype, backend)


@over_some_dtypes
@pytest.mark.parametrize("case", PROBLEMS, ids=str)
def test_gradients_are_linear(case, dtype, backend):
    check_linear(case, dtype, backend)


@pytest.mark.parametrize("case", PROBLEMS, ids=str)
def test_the_answers_are_those_of_the_reference(case):
    inputs = make(case, torch.float32, CPU).to(torch.float64)
    expected = run_by_sequence(case, inputs) if isinstance(case, PackedCase) else run_reference(inputs)
    expected, heads = by_heads(case, expected), heads_of(case, inputs)
    lse, delta = heads.lse_and_delta()
    torch.testing.assert_close(lse, expected["lse"])
    for band in bands(heads.q.shape[1]):
        for name, tensor in exact_at(heads, band, lse, delta).items():
            torch.testing.assert_close(tensor, expected[name][:, band], msg=lambda m, n=name: f"{n}: {m}")
