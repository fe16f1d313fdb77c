"""Caches with everything: problems drawn at random from all features, lengths, pages and strides.

    pytest tests/features/test_cache_combinations.py --random-problems 2000 -k sm80        # problems 0 to 1999
    pytest tests/features/test_cache_combinations.py --first-problem 1234 --random-problems 1

Results lie in memory that was NaN before. Rows and pages that no sequence has hold NaN, as do the gaps between rows,
and have to keep it. A problem is its number: the list is the same each time (support/problems/caches.py).
"""

import pytest

from support.cases import DTYPES
from support.params import computes_in, over_problems
from support.problems.caches import CacheProblem, check_problem, draw

pytest_generate_tests = over_problems


@computes_in(None)
def test_random_problem(number, backend):
    problem = draw(number)
    base = problem.case.base
    if refusal := backend.refusal(problem.dtype, base.d, base.head_dim_v):
        pytest.skip(refusal)
    try:
        check_problem(problem, backend)
    except Exception as error:
        raise AssertionError(
            f"problem {number} on {backend.name} ({problem}): {error}\nalone: pytest "
            f"tests/features/test_cache_combinations.py --first-problem {number} --random-problems 1 -k {backend.name}"
        ) from error


def test_a_number_is_a_problem():
    """The same one in any order; and the first thousand reach every kind of cache in every dtype."""
    forward, backward = [draw(n) for n in range(1000)], [draw(n) for n in reversed(range(1000))]
    assert forward == backward[::-1]
    for dtype in DTYPES:
        kinds = {kind_of(problem) for problem in forward if problem.dtype == dtype}
        assert len(kinds) == 12


def kind_of(problem: CacheProblem) -> tuple[str, bool, bool]:
    """How keys are found; whether there are new ones, and whether these are rotated."""
    case = problem.case
    if case.page_size is None:
        place = "indexed" if case.indexed else "in order"
    else:
        place = "shared pages" if case.shared_pages else "pages"
    return place, case.new > 0, case.rotary_dim > 0
