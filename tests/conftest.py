"""What every test shares: the backend axis, which cases are collected, how workers share a machine, and hypothesis
settings that repeat.

pytest puts this folder on sys.path, so tests import their helpers as `support.*`, and the package that is tested is
the installed one.
"""

import ctypes
import os
import tempfile

# Before torch loads OpenMP: its threads would spin between the small calls that tests are made of, which multiplies
# the time of a suite that shares its cores with anything else.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if WORKER := os.environ.get("PYTEST_XDIST_WORKER"):
    # Each worker has a core. A test that is about threads sets their number itself.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What one worker compiles is no cache for another, which may clear it meanwhile.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/flash_attn_ext_{os.getuid()}_{WORKER}")
# Or Inductor compiles six programs first, to see that the compiler knows the instructions of this CPU.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")

from support.backends import BACKENDS, Backend, device_not_runnable_because, not_runnable_because  # noqa: E402
from support.params import is_collected, refusal_of  # noqa: E402

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption(
        "--random-problems", type=int, default=200, help="how many *combinations.py and test_tiny_problems.py draw"
    )
    parser.addoption("--first-problem", type=int, default=0, help="the first of them; its number is its seed")
    parser.addoption("--repeats", type=int, default=5, help="how often cuda/test_paths.py repeats each call")
    parser.addoption(
        "--collect-gpu",
        action="store_true",
        help="collect the cases of a GPU where there is none, too: to see that they can be collected; they are skipped",
    )
    parser.addoption(
        "--run-only",
        action="store_true",
        help="run our side of random problems and shape cases, outputs poisoned as usual, but compare nothing: for "
        "sanitizers",
    )


def keep_freed_memory() -> None:
    """Has glibc keep what tensors leave for those that follow. By default large blocks go back to the system and come
    again page by page, which takes as long as the tests of long sequences themselves."""
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 64 * 2**20)


def pytest_configure(config):
    keep_freed_memory()
    config.addinivalue_line("markers", "computes_in(dtype): of a test without a dtype parameter; else float32")
    config.addinivalue_line("markers", "for_gpus: of a case that differs in what only GPU kernels distinguish")
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker runs, since they share what is slow")
    if config.getoption("--run-only"):
        from support import checks  # here, so that collecting tests of the source tree needs no built extension

        checks.run_only = True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config) -> int:
    """Of `-n auto`: a worker for each core that has 4 GiB, but only one process for a GPU, whose memory tests measure
    and fill."""
    if torch.cuda.is_available():
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory >> 32))


@pytest.hookimpl(hookwrapper=True)
def pytest_pycollect_makeitem():
    outcome = yield
    made = outcome.get_result()
    if isinstance(made, list):
        outcome.force_result(list(filter(is_collected, made)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker runs what Inductor compiles: in a process its first call takes ten seconds more than others."""
    for item in items:
        if "inductor" in item.nodeid and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("inductor"))


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request) -> Backend:
    """Each backend in turn; skipped where it was not built, there is no GPU that runs it, or it does not take such
    tensors (support/backends.py)."""
    reason = not_runnable_because(request.param) or refusal_of(request, request.param)
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> str:
    """For what does not depend on the backend: each kind of memory once, skipped where no backend runs on it."""
    reason = device_not_runnable_because(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def fresh_compiler():
    """torch.compile without what other tests compiled, and counted. Nor what is on disk, where another process may have
    compiled the same function with our switch on, or for another of PyTorch's kernels."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def every_reason_is_new(monkeypatch):
    """For tests of warnings: what was warned about before is forgotten."""
    from flash_attn_ext.integrations import _warnings  # here, as above

    monkeypatch.setattr(_warnings, "_warned", set())


@pytest.fixture(autouse=True)
def _same_state_for_every_test():
    """Seeds, and thread count, default dtype and TF32 switch of PyTorch that a test may have changed."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    # PyTorch's default, stated: float32 is measured by PyTorch's float32.
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
