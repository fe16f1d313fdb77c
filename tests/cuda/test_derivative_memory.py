"""Forward mode and double backward on a GPU: peaks of memory, no waiting, and graphs that hold them."""

import pytest
import torch

import flash_attn_ext
from support.device_memory import extra_memory
from support.params import computes_in

pytestmark = computes_in(torch.bfloat16)

LENGTH = 32768
LIMIT = 2**30  # a table of scores would take 4 GiB in float32, and there are several


def double_backward(q, k, v):
    out = flash_attn_ext.attention(q, k, v, causal="bottom_right")
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), create_graph=True)
    return torch.autograd.grad(gradients, (q, k, v), [torch.ones_like(gradient) for gradient in gradients])


def forward_mode(*tensors):
    tensors = tuple(tensor.detach() for tensor in tensors)
    return torch.func.jvp(lambda *t: flash_attn_ext.attention(*t, causal="bottom_right"), tensors, tensors)


def tensors_of(length):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, 1, length, 64)
    drawn = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(3)]
    return [tensor.requires_grad_() for tensor in drawn]


@pytest.mark.parametrize("function", [double_backward, forward_mode])
def test_peak(function, gpu):
    tensors = tensors_of(LENGTH)
    assert extra_memory(lambda: function(*tensors)) < LIMIT


@pytest.mark.parametrize("function", [double_backward, forward_mode])
def test_nothing_waits(function, gpu):
    tensors = tensors_of(2048)
    function(*tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("function", [double_backward, forward_mode])
def test_graph(function, gpu):
    tensors = tensors_of(2048)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = function(*tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(*tensors)
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
