"""Peaks of forward mode and of double backward on the CPU, in linear memory. GPUs: cuda/test_derivative_memory.py."""

import sys

import pytest

from support.forks import run_forked

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
    return [torch.randn(1, heads, length, {head_dim}, requires_grad={requires_grad}) for heads in ({heads}, 1, 1)]

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

{function}(*inputs({length} // 16))
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
    assert peak_in_mb(function, heads=1, length=16384, head_dim=64) < 150


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("function", ["double_backward", "forward_mode"])
def test_peak_of_grouped_heads(function):
    """64 heads that share a key head: 512 queries and keys of each would have tiles of 64 MB."""
    assert peak_in_mb(function, heads=64, length=1024, head_dim=8) < 60


def peak_in_mb(function, **shape):
    script = PEAK.format(function=function, requires_grad=function == "double_backward", **shape)
    process = run_forked(script)
    assert process.returncode == 0, process.stderr
    return float(process.stdout)
