"""Random problems of 16 to 64 tokens with biases, masks and their gradients, at odd strides. On a GPU each has 4096
pairs of a batch entry and a head, or a few more.

    pytest tests/features/test_tiny_problems.py --random-problems 1000 -k sm90

Numbers repeat a problem, as in test_combinations.py.
"""

import pytest

from support.backends import CPU
from support.params import computes_in, over_problems
from support.problems.checks import check_problem
from support.problems.tiny import draw_tiny

pytest_generate_tests = over_problems
PAIRS_ON_A_GPU, PAIRS_ON_THE_CPU = 4096, 24


@computes_in(None)
def test_tiny_problem(number, backend):
    problem = draw_tiny(number, PAIRS_ON_THE_CPU if backend == CPU else PAIRS_ON_A_GPU)
    if refusal := backend.refusal(problem.dtype, problem.case.d, problem.case.head_dim_v):
        pytest.skip(refusal)
    try:
        check_problem(problem, backend)
    except Exception as error:
        raise AssertionError(
            f"problem {number} on {backend.name} ({problem}): {error}\nalone: pytest "
            f"tests/features/test_tiny_problems.py --first-problem {number} --random-problems 1 -k {backend.name}"
        ) from error
