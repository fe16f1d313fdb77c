"""pytest parameters from data, and what a test asks of a backend."""

from collections.abc import Iterable

import pytest
import torch

from support.backends import Backend
from support.cases import DTYPES, Case


def over_cases(cases: Iterable[Case]):
    return pytest.mark.parametrize("case", list(cases), ids=str)


def over_dtypes(dtypes: Iterable[torch.dtype] = DTYPES):
    return pytest.mark.parametrize("dtype", list(dtypes), ids=lambda dtype: str(dtype).removeprefix("torch."))


def over_problems(metafunc) -> None:
    """As a module's pytest_generate_tests: `number` goes over the problems that the command line asks for."""
    first, count = (metafunc.config.getoption(name) for name in ("--first-problem", "--random-problems"))
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(first, first + count))


def computes_in(dtype: torch.dtype | None):
    """The dtype of a test without a parameter of that name, where it is not float32. None: the test asks itself."""
    return pytest.mark.computes_in(dtype)


def refusal_of(request: pytest.FixtureRequest, backend: Backend) -> str | None:
    """Why the backend cannot take the test, by the test's dtype and by the head dims of its case; None when it can."""
    params = request.node.callspec.params
    marker = request.node.get_closest_marker("computes_in")
    dtype = params.get("dtype", marker.args[0] if marker else torch.float32)
    if dtype is None:
        return None
    case = params.get("case")
    case = getattr(case, "base", case)  # that of a packed case
    return backend.refusal(dtype, case.d, case.head_dim_v) if isinstance(case, Case) else backend.refusal(dtype)
