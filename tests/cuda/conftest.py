"""What only a GPU has. Without one these tests are not collected."""

import pytest
import torch

from support.backends import BACKENDS, SM90, Backend, not_runnable_because
from support.params import refusal_of


@pytest.fixture(params=[backend for backend in BACKENDS if not backend.is_cpu], ids=lambda backend: backend.name)
def gpu(request) -> Backend:
    """Each CUDA backend in turn, with nothing of earlier tests left on the device."""
    reason = not_runnable_because(request.param) or refusal_of(request, request.param)
    if reason:
        pytest.skip(reason)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return request.param


@pytest.fixture
def on_hopper(gpu: Backend) -> None:
    """For tests of one backend's own kernels."""
    if gpu != SM90:
        pytest.skip("the kernels of this backend are others")
