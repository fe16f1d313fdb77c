"""Both passes are bitwise reproducible on each path through the GPU backends, beside other work.

    pytest tests/cuda/test_paths.py --repeats 100

What decides the order of additions, as numbers of SMs and chunks, is varied in the tests of single kernels.
"""

import pytest
import torch

from flash_attn_ext import explain
from support.backends import BACKENDS, not_runnable_because
from support.cases import Inputs, make_inputs
from support.disturbance import assert_repeats
from support.paths import PATHS, Path

OF_THE_TABLE = 132  # SMs


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_repeats(path, request):
    (backend,) = (backend for backend in BACKENDS if backend.name == path.backend)
    if reason := not_runnable_because(backend):
        pytest.skip(reason)
    torch.cuda.empty_cache()
    inputs = make_inputs(path.case, path.dtype, "cuda", draw_on="cuda").replace(differentiable=path.wanted)
    kernels, expected = kernels_of(path, inputs), (path.forward["kernel"], path.backward["kernel"])
    if kernels != expected and torch.cuda.get_device_properties(0).multi_processor_count != OF_THE_TABLE:
        pytest.skip(f"on this many SMs the call takes {kernels}")
    assert kernels == expected
    assert_repeats(inputs, backend, request.config.getoption("--repeats"))


def kernels_of(path: Path, inputs: Inputs) -> tuple[str, str]:
    """Those that this GPU's plans name. Their columns depend on its number of SMs and its memory."""
    tensors = inputs.operands(inputs.leaves())
    masks = dict(mask=inputs.mask, intervals=inputs.intervals, block_lists=inputs.block_lists)
    options = path.case.options() | dict(dropout_p=path.case.dropout_p, backend=path.backend)
    found = explain(**tensors, **masks, **options)
    return found.forward.kernel, found.backward.kernel
