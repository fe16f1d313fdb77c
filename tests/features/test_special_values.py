"""NaN and infinities in what is attended, and weights of exactly 0. What is not attended: test_poison.py."""

import math

import pytest
import torch

from support.cases import Case, make_inputs
from support.errors import assert_same_answer
from support.params import over_dtypes
from support.runners import dropout_bits, run_ours, run_reference
from support.strides import integer_of

KEY = 200

# A GPU's arithmetic sets every bit but the sign; a negated NaN has the sign too.
NANS = ("torch.nan", "of arithmetic", "negated")


def nan_of(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """(1,), with the bits of that kind of NaN."""
    if kind == "torch.nan":
        return torch.tensor([math.nan], dtype=dtype)
    integer = integer_of(dtype)
    return torch.tensor([-1 if kind == "negated" else torch.iinfo(integer).max], dtype=integer).view(dtype)


@over_dtypes()
@pytest.mark.parametrize("kind", NANS)
@pytest.mark.parametrize(("sq", "sk", "d"), [(1, 1, 64), (1, 2, 8), (70, 1, 128), (3, 3, 256), (140, 300, 64)], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_a_nan_reaches_all_that_depends_on_it(name, sq, sk, d, kind, dtype, backend):
    inputs = make_inputs(Case(sq=sq, sk=sk, d=d), dtype, backend.device)
    getattr(inputs, name)[:, :, 0, 3] = nan_of(kind, dtype).to(backend.device)
    results, expected = run_ours(inputs, backend), run_reference(inputs.to(torch.float64))
    for result, tensor in results.items():
        assert torch.equal(tensor.isnan(), expected[result].isnan()), result


@over_dtypes()
def test_a_bias_of_plus_infinity_spoils_its_row_alone(dtype, backend):
    inputs = make_inputs(Case(sq=140, sk=300, bias="11qk"), dtype, backend.device)
    clean = run_ours(inputs, backend)
    inputs.bias[..., 3, KEY] = math.inf
    result = run_ours(inputs, backend)
    assert bool(result["out"][:, :, 3].isnan().all())
    others = torch.arange(140, device=backend.device) != 3
    for name in ("out", "lse", "dq"):
        assert_same_answer(result[name], clean[name], backend, name, (slice(None), slice(None), others))


@over_dtypes()
@pytest.mark.parametrize("d", [32, 128])
def test_a_weight_that_underflows_takes_nothing_of_an_infinite_value(d, dtype, backend):
    inputs = make_inputs(Case(sq=140, sk=300, d=d, bias="111k"), dtype, backend.device)
    inputs.bias[..., KEY] = -1e4
    clean = run_ours(inputs, backend)
    inputs.v[:, :, KEY] = math.inf
    for name, tensor in run_ours(inputs, backend).items():
        assert_same_answer(tensor, clean[name], backend, name)


@over_dtypes()
@pytest.mark.parametrize(
    ("sq", "sk", "d"), [(300, 600, 64), (300, 600, 128), (300, 600, 192), (60, 1100, 64), (60, 1100, 128)]
)
def test_so_does_one_of_scores_that_are_only_scaled(sq, sk, d, dtype, backend):
    if backend.name == "sm80" or (dtype == torch.float32 and not backend.is_cpu):
        pytest.skip("docs/semantics.md: where P and dS are materialised, dK of such a key is NaN")
    inputs = make_inputs(Case(sq=sq, sk=sk, d=d), dtype, backend.device)
    inputs.q[..., 0] = 40
    inputs.k[..., 0], inputs.k[:, :, KEY, 0] = 0, -400
    clean = run_ours(inputs, backend)
    assert not bool(clean["dk"][:, :, KEY].any())
    inputs.v[:, :, KEY] = math.inf
    for name, tensor in run_ours(inputs, backend).items():
        assert_same_answer(tensor, clean[name], backend, name)


@over_dtypes()
def test_a_dropped_weight_takes_nothing_of_an_infinite_value(dtype, backend):
    inputs = make_inputs(Case(sq=140, sk=300, dropout_p=0.4), dtype, backend.device)
    kept = dropout_bits(inputs, backend)[..., KEY]
    clean = run_ours(inputs, backend)["out"]
    inputs.v[:, :, KEY] = math.inf
    out = run_ours(inputs, backend)["out"]
    assert_same_answer(out, clean, backend, "out", ~kept)
    assert not bool(out[kept].isfinite().any())


@over_dtypes()
def test_a_sink_of_minus_infinity_is_none(dtype, backend):
    case = Case(sq=70, sk=130, mask="11qk", dlse=True)
    without = make_inputs(case, dtype, backend.device)
    without.mask[:, :, 5] = False  # a row without keys
    inputs = make_inputs(Case(sq=70, sk=130, mask="11qk", sink=True, dlse=True), dtype, backend.device)
    inputs = inputs.replace(mask=without.mask, sink=torch.full_like(inputs.sink, -math.inf))
    result = run_ours(inputs, backend)
    assert not bool(result["dsink"].any())
    for name, expected in run_ours(without, backend).items():
        assert_same_answer(result[name], expected, backend, name)
