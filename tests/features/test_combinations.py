"""Everything combines with everything: problems drawn at random from all features, shapes preferring tile edges.

    pytest tests/features/test_combinations.py --random-problems 5000 -k sm80        # problems 0 to 4999
    pytest tests/features/test_combinations.py --first-problem 1234 --random-problems 1

Results lie in memory that was NaN before, and keys that nobody attends hold NaN or infinities. A problem is its number:
the list is the same each time (support/problems.py). Numbers are drawn on the backend's own device, where they are
also checked, so that a GPU works through thousands.
"""

import math
import random

import torch

from support.backends import Backend
from support.cases import DTYPES, Inputs, make_inputs
from support.checks import check_drawn, check_packed_drawn
from support.masks import attended
from support.packed import PackedCase, make_packed, sequences
from support.problems import Problem, draw
from support.strides import with_strides

ANOTHER_DRAW = 10**6  # of the same problem
POISONS = (math.nan, math.inf, -math.inf)


def pytest_generate_tests(metafunc):
    first, count = (metafunc.config.getoption(name) for name in ("--first-problem", "--random-problems"))
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(first, first + count))


def unattended(inputs: Inputs) -> torch.Tensor:
    """(B, Hk, Sk): keys that no query of their heads sees."""
    case = inputs.case
    seen = attended(case, inputs.mask, inputs.k.device).any(2)
    return ~seen.unflatten(1, (case.num_kv_heads, -1)).any(2)


def unattended_tokens(case: PackedCase, inputs: Inputs) -> torch.Tensor:
    """(Tk, Hk)"""
    return torch.cat([unattended(alone)[0].T for alone, _, _ in sequences(case, inputs)])


def as_presented(problem: Problem, inputs: Inputs) -> Inputs:
    """The same problem with poison where nothing may look, and at random strides."""
    hidden = unattended(inputs) if problem.packed is None else unattended_tokens(problem.packed, inputs)
    hidden, poison = hidden.unsqueeze(-1), POISONS[problem.number % len(POISONS)]
    inputs = inputs.replace(k=inputs.k.masked_fill(hidden, poison), v=inputs.v.masked_fill(hidden, poison))
    if not problem.is_strided:
        return inputs
    rng = random.Random(problem.number)
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    return inputs.replace(**{name: with_strides(t, rng) for name, t in tensors.items() if t is not None})


def check(problem: Problem, backend: Backend) -> None:
    def present(inputs: Inputs) -> Inputs:
        return as_presented(problem, inputs)

    case, packed, dtype, device = problem.case, problem.packed, problem.dtype, backend.device
    if packed is None:
        check_drawn(
            lambda redraw: make_inputs(case, dtype, device, problem.number + ANOTHER_DRAW * redraw, device),
            backend,
            present,
        )
    else:
        check_packed_drawn(
            packed,
            lambda redraw: make_packed(packed, dtype, device, problem.number + ANOTHER_DRAW * redraw, device),
            backend,
            present,
        )


def test_random_problem(number, backend):
    problem = draw(number)
    try:
        check(problem, backend)
    except Exception as error:
        raise AssertionError(
            f"problem {number} on {backend.name} ({problem}): {error}\nalone: pytest "
            f"tests/features/test_combinations.py --first-problem {number} --random-problems 1 -k {backend.name}"
        ) from error


def test_a_number_is_a_problem():
    """The same one in any order; and the first thousand reach every dtype, wide head dims and packed sequences."""
    forward, backward = [draw(n) for n in range(1000)], [draw(n) for n in reversed(range(1000))]
    assert forward == backward[::-1]
    for dtype in DTYPES:
        dims = {max(p.case.d, p.case.head_dim_v) for p in forward if p.dtype == dtype}
        assert (max(dims) > 256) == (dtype.itemsize == 2)
        assert {p.packed is None for p in forward if p.dtype == dtype} == {True, False}
