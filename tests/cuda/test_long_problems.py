"""Random problems with more than a thousand queries and keys: kernels that short sequences do not take.

The problems of features/test_combinations.py with longer sequences, in 16 bits: other dtypes have no such kernels.
"""

import dataclasses

import pytest

from support.packed import PackedCase
from support.params import computes_in
from support.problems.checks import check_problem
from support.problems.draw import Problem, draw

COUNT = 300  # of which about half are 16-bit ones
LONGER = 1024  # a multiple of every tile: the edges stay those of the short problem
SHORTEST = 17  # packed sequences below that stay as they are


def longer(problem: Problem) -> Problem:
    case = dataclasses.replace(problem.case, sq=problem.case.sq + LONGER, sk=problem.case.sk + LONGER, batch=1)
    packed = problem.packed
    if packed is not None:
        case = dataclasses.replace(case, batch=problem.case.batch)
        lengths = (tuple(n + LONGER * (n > SHORTEST) for n in each) for each in (packed.lengths_q, packed.lengths_k))
        packed = PackedCase(*lengths, case)
    return dataclasses.replace(problem, case=case, packed=packed)


@computes_in(None)
@pytest.mark.parametrize("number", range(COUNT))
def test_random_problem(number, gpu):
    problem = longer(draw(number))
    if problem.dtype.itemsize != 2:
        pytest.skip("short ones are enough in this dtype")
    if refusal := gpu.refusal(problem.dtype, problem.case.d, problem.case.head_dim_v):
        pytest.skip(refusal)
    try:
        check_problem(problem, gpu)
    except Exception as error:
        raise AssertionError(f"problem {number} on {gpu.name} ({problem}): {error}") from error
