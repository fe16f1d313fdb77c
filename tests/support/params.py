"""pytest parameters from data, and what a test asks of a backend."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from support.backends import CPU, Backend
from support.cases import DTYPES, Case

FOR_GPUS = pytest.mark.for_gpus
CUDA_TESTS = Path(__file__).resolve().parents[1] / "cuda"


def over_cases(cases: Iterable[Case]):
    return pytest.mark.parametrize("case", list(cases), ids=str)


def over_dtypes(dtypes: Iterable[torch.dtype] = DTYPES):
    return pytest.mark.parametrize("dtype", list(dtypes), ids=lambda dtype: str(dtype).removeprefix("torch."))


def for_gpus(values: Iterable) -> list:
    """Cases or dtypes beside others that differ in what only GPU kernels distinguish: the CPU does not run them. Tuples
    are values of several parameters."""
    return [pytest.param(*(value if type(value) is tuple else (value,)), marks=FOR_GPUS) for value in values]


def over_problems(metafunc) -> None:
    """As a module's pytest_generate_tests: `number` goes over the problems that the command line asks for."""
    first, count = (metafunc.config.getoption(name) for name in ("--first-problem", "--random-problems"))
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(first, first + count))


def computes_in(dtype: torch.dtype | None):
    """The dtype of a test without a parameter of that name, where it is not float32. None: the test asks itself."""
    return pytest.mark.computes_in(dtype)


def is_collected(item: pytest.Item) -> bool:
    """Cases of a GPU are where there is one: elsewhere three of four tests would be skipped. Cases for GPUs are not on
    the CPU."""
    if needs_gpu(item):
        return collects_gpu(item.config)
    return not (item.get_closest_marker("for_gpus") and _is_on_cpu(item))


def collects_gpu(config: pytest.Config) -> bool:
    return torch.cuda.is_available() or config.getoption("--collect-gpu")


def needs_gpu(item: pytest.Item) -> bool:
    """Whether a test, by its folder or by its parameters, can only run on a GPU."""
    params = _params(item)
    backends = (value for value in params.values() if isinstance(value, Backend))
    return (
        CUDA_TESTS in item.path.parents
        or params.get("device") == "cuda"
        or any(not backend.is_cpu for backend in backends)
    )


def _is_on_cpu(item: pytest.Item) -> bool:
    params = _params(item)
    return params.get("device") == "cpu" or CPU in params.values()


def _params(item: pytest.Item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


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
