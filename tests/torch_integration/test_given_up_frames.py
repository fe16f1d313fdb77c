"""Where torch.compile gives up a frame: what PyTorch calls from C++ meanwhile is not compiled as a frame of its own."""

import gc
import logging
import types
import typing

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from flash_attn_ext import _frames
from flash_attn_ext._call.problem import Problem
from flash_attn_ext.integrations import dtensor, torch_backend  # noqa: F401  (their functions are marked on import)
from support import aten
from support.frames import compiled_inner_functions, given_up, is_inner

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def qkv(device) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 5, 8, device=device, requires_grad=True) for _ in range(3)]


def gradients(*tensors):
    out, lse = flash_attn_ext.attention(*tensors, causal="top_left", return_lse=True)
    return out, torch.autograd.grad(out.sum() + lse.sum(), tensors)


def second_derivatives(*tensors):
    out = flash_attn_ext.attention(*tensors, causal="top_left")
    first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    return first, torch.autograd.grad(first[0].square().sum(), tensors)


def forward_mode(*tensors):
    q, k, v = (tensor.detach() for tensor in tensors)
    return torch.func.jvp(lambda q: flash_attn_ext.attention(q, k, v), (q,), (k,))


def transformed(*tensors):
    q, k, v = (tensor.detach() for tensor in tensors)
    gradient = torch.func.grad(lambda q: flash_attn_ext.attention(q, k, v).square().sum())(q)
    return gradient, torch.vmap(lambda q: flash_attn_ext.attention(q, q, q))(q)


def operator(*tensors):
    out = torch.ops.flash_attn_ext.attention_forward(*Problem(*tensors))[0]
    first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    return out, first, torch.autograd.grad(first[0].square().sum(), tensors)


FUNCTIONS = [gradients, second_derivatives, forward_mode, transformed, operator]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_pytorch_calls_runs_as_python(function, device):
    tensors = qkv(device)
    expected = function(*tensors)
    with compiled_inner_functions() as names:
        frame = given_up(function)
        for _ in range(2):
            torch.testing.assert_close(frame(*tensors), expected)
    assert names == []


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32], ids=str)
def test_kernels_behind_the_operators_of_pytorch(mask, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kernel = SDPBackend.FLASH_ATTENTION if device == "cpu" or mask is None else SDPBackend.EFFICIENT_ATTENTION
    tensors = [torch.randn(2, 3, 40, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    table = None
    if mask is not None:
        table = (torch.rand(40, 40, device=device) < 0.7).to(mask if mask == torch.bool else dtype)

    def attend(*tensors):
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(*tensors, attn_mask=table)
        return out, torch.autograd.grad(out.float().square().sum(), tensors)

    with aten.active(), compiled_inner_functions() as names:
        expected = attend(*tensors)
        frame = given_up(attend)
        with aten.recorded() as passes:
            got = frame(*tensors)
    torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0)
    assert passes == ["forward", "backward"] and names == []


def test_copies_are_logged(caplog):
    q, k, v = (torch.randn(2, 3, 5, 8).transpose(-1, -2).contiguous().transpose(-1, -2) for _ in range(3))
    sink = torch.randn(6)[::2]  # what is copied on every device
    with caplog.at_level(logging.DEBUG, logger="flash_attn_ext"), compiled_inner_functions() as names:

        def attend():
            return flash_attn_ext.FlashAttentionFunction.apply(*Problem(q, k, v, sink=sink))[0]

        given_up(attend)()
    assert names == [] and "sink was copied" in caplog.text


def test_all_inner_functions_are_marked(monkeypatch):
    """Those that decorators hide, too."""
    marked = set()
    mark = _frames.skip_code

    def note(code: types.CodeType) -> None:
        marked.add(code)
        mark(code)

    monkeypatch.setattr(_frames, "skip_code", note)
    _frames.skip_functions_of(flash_attn_ext.__name__)
    if hasattr(typing, "clear_overloads"):  # since Python 3.11 typing holds the declarations, which nothing calls
        typing.clear_overloads()
    codes = {found.__code__ for found in gc.get_objects() if type(found) is types.FunctionType}
    inner = {code for code in codes if is_inner(code)} - {mark.__code__}  # which the one above replaces
    assert inner and inner - marked == set()
