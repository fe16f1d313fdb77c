"""No memory of size N x N: peaks of a long sequence on the CPU, and what autograd keeps. GPUs: cuda/test_peaks.py."""

import sys

import pytest
import torch

from support.cases import Case, make_inputs
from support.forks import run_forked
from support.runners import call_ours

LIMIT_MB = 150

# In a process of its own: VmHWM is the peak of the whole process, and is reset once everything is loaded and warm.
PEAK_OF_LONG_SEQUENCE = """
import torch
import flash_attn_ext

def inputs(length):
    return [torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3)]

def train(tensors):
    flash_attn_ext.attention(*tensors, causal={causal!r}, backend="cpu").square().sum().backward()

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

train(inputs(512))
long = inputs(16384)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
train(long)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_peak_at_16384(causal):
    """float32, one head of 64: the score matrix alone would be 1024 MB."""
    script = PEAK_OF_LONG_SEQUENCE.format(causal=causal)
    process = run_forked(script)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < LIMIT_MB


BROADCAST = dict(bias="111k", mask="11q1", alibi="h", sink=True)


@pytest.mark.parametrize("features", [{}, dict(dropout_p=0.5), BROADCAST], ids=str)
def test_autograd_keeps_inputs_output_and_lse(features, backend):
    """Saved: q, k, v, out, the LSE, a seed, and what else was given, each once; with a bias the LSE's residual."""
    inputs = make_inputs(Case(sq=256, sk=256, d=32, batch=1, **features), torch.float32, backend.device)
    given = (inputs.bias, inputs.mask, inputs.alibi_slopes, inputs.sink)
    tables = sum(tensor.numel() for tensor in given if tensor is not None)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call_ours(inputs, inputs.leaves(), backend)
    rows = 2 * 256
    assert sum(saved.values()) <= 4 * rows * 32 + rows * (1 + (inputs.bias is not None)) + tables + 1
