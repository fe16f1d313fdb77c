"""Everything combines with everything: problems drawn at random from all features, shapes preferring tile edges.

    pytest tests/features/test_combinations.py --random-problems 5000 -k sm80        # problems 0 to 4999
    pytest tests/features/test_combinations.py --first-problem 1234 --random-problems 1

Results lie in memory that was NaN before, and keys that no query attends hold NaN or infinities. A problem is its
number: the list is the same each time (support/problems/draw.py). Numbers are drawn and checked on the backend's own
device, so that a GPU works through thousands.
"""

import pytest

from support.cases import DTYPES
from support.params import computes_in, over_problems
from support.problems.checks import check_problem
from support.problems.draw import draw

pytest_generate_tests = over_problems


@computes_in(None)
def test_random_problem(number, backend):
    problem = draw(number)
    if refusal := backend.refusal(problem.dtype, problem.case.d, problem.case.head_dim_v):
        pytest.skip(refusal)
    try:
        check_problem(problem, backend)
    except Exception as error:
        raise AssertionError(
            f"problem {number} on {backend.name} ({problem}): {error}\nalone: pytest "
            f"tests/features/test_combinations.py --first-problem {number} --random-problems 1 -k {backend.name}"
        ) from error


def test_a_number_is_a_problem():
    """The same one in any order; and the first thousand reach all dtypes, wide head dims, packed sequences, plans."""
    forward, backward = [draw(n) for n in range(1000)], [draw(n) for n in reversed(range(1000))]
    assert forward == backward[::-1]
    assert {len(p.environment) for p in forward} == {0, 1, 2} and {len(p.wanted) for p in forward} == {1, 2, 3, 4, 5, 6}
    for dtype in DTYPES:
        dims = {max(p.case.d, p.case.head_dim_v) for p in forward if p.dtype == dtype}
        assert (max(dims) > 256) == (dtype.itemsize == 2)
        assert {p.packed is None for p in forward if p.dtype == dtype} == {True, False}
