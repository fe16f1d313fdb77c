"""Peaks of forward mode and of double backward on the CPU, in linear memory. GPUs: cuda/test_derivative_memory.py."""

import subprocess
import sys

import pytest

LIMIT_MB = 150

# As surface/test_memory.py: VmHWM is the peak of the whole process, and is reset once everything is loaded and warm.
PEAK = """
import torch
import flash_attn_ext

def attend(q, k, v):
    return flash_attn_ext.attention(q, k, v, causal="top_left", window=(1024, 0), backend="cpu")

def double_backward(q, k, v):
    gradients = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()

def forward_mode(*tensors):
    torch.func.jvp(attend, tensors, tensors)

def inputs(length):
    return [torch.randn(1, 1, length, 64, requires_grad={requires_grad}) for _ in range(3)]

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

{function}(*inputs(1024))
long = inputs({length})
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
{function}(*long)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("function", ["double_backward", "forward_mode"])
def test_peak_at_16384(function):
    """float32, one head of 64: one score matrix would be 1024 MB. A window keeps the time of the test short."""
    script = PEAK.format(function=function, length=16384, requires_grad=function == "double_backward")
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < LIMIT_MB
