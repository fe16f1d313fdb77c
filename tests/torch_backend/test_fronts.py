"""Kernels of C++ in front of those of Python: what they run, that both give the same, and what is handed on."""

import contextlib

import pytest
import torch
from torch.library import Library

from flash_attn_ext import _C
from flash_attn_ext.integrations.torch_backend import switch
from support import aten

ATEN = torch.ops.aten
FORWARDS = [name for name in _C.operators_with_front() if not name.endswith("backward")]
# Positional arguments after (query, key, value); the rest have defaults.
PLAIN = {
    "_scaled_dot_product_flash_attention_for_cpu": (),
    "_scaled_dot_product_flash_attention": (),
    "_scaled_dot_product_cudnn_attention": (None, True),
    "_scaled_dot_product_efficient_attention": (None, True),
}
SHAPES = {
    "a multiple of 32": ((2, 3, 64, 8), (2, 3, 32, 8)),
    "not a multiple": ((2, 3, 37, 8), (2, 3, 41, 8)),
    "one head": ((2, 1, 5, 8), (2, 1, 7, 8)),
}


@contextlib.contextmanager
def without_fronts(device: str):
    """The kernels of Python alone."""
    kept, switch._WITH_FRONT = switch._WITH_FRONT, frozenset()
    library = Library("aten", "IMPL", device.upper())
    try:
        for override in switch.OVERRIDES:
            if device == "cpu" or override.key == "CUDA":
                library.impl(override.operator, override.kernel, allow_override=True)
        yield
    finally:
        library._destroy()
        switch._WITH_FRONT = kept


def call(name: str, tensors, **options):
    """All results, and gradients of the first."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results = getattr(ATEN, name)(*leaves, *PLAIN[name], **options)
    dout = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(2)).to(results[0])
    return results, torch.autograd.grad(results[0], leaves, dout)


def assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        if not isinstance(one, torch.Tensor):
            assert one == other
            continue
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        if one.dtype.is_floating_point:  # others are the unwritten state of a generator
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(is_causal=True, scale=0.3)], ids=str)
def test_both_give_the_same(name, shape, layout, options, device):
    if device == "cuda" and name.endswith("cpu"):
        pytest.skip("an operator of the CPU")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [torch.randn(SHAPES[shape][i > 0], device=device, dtype=dtype) for i in range(3)]
    if layout == "bshd":
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    with aten.on_device(device):
        before = _C.passes_of_fronts()
        found = call(name, tensors, **options)
        assert [n - m for n, m in zip(_C.passes_of_fronts(), before, strict=True)] == [1, 1]
    with without_fronts(device):
        before = _C.passes_of_fronts()
        expected = call(name, tensors, **options)
        assert _C.passes_of_fronts() == before
    for of_found, of_expected in zip(found, expected, strict=True):
        assert_same(of_found, of_expected)


def test_no_lse(device):
    q, k, v = (torch.randn(2, 3, 5, 8, device=device) for _ in range(3))
    with aten.on_device(device), aten.recorded() as passes:
        _, lse, _, _ = ATEN._scaled_dot_product_efficient_attention(q, k, v, None, False)
    assert passes == ["forward"] and lse.shape == (2, 3, 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("_scaled_dot_product_flash_attention_for_cpu", dict(attn_mask=torch.zeros(5, 5))),
        ("_scaled_dot_product_flash_attention", dict(dropout_p=0.4)),
        ("_scaled_dot_product_cudnn_attention", dict(dropout_p=0.4)),
        ("_scaled_dot_product_efficient_attention", dict(dropout_p=0.4)),
    ],
)
def test_what_needs_more_is_handed_on(name, options):
    """To the kernel of Python, which runs it."""
    tensors = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    with aten.on_device("cpu"), aten.recorded() as passes:
        before = _C.passes_of_fronts()
        results, gradients = call(name, tensors, **options)
        assert _C.passes_of_fronts() == before
        assert all(tensor.isfinite().all() for tensor in (results[0], *gradients))
        del results  # whose backward pass restoring would warn of
    assert passes == ["forward", "backward"]


def test_what_fails_is_told_by_the_kernel_behind():
    """With its warning, and PyTorch's kernel runs."""
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float32) for _ in range(3))
    with aten.active():
        before = _C.passes_of_fronts()
        with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="and PyTorch's kernel runs"):
            ATEN._scaled_dot_product_flash_attention_for_cpu(q, k.double(), v)
        assert _C.passes_of_fronts() == before


def test_a_front_whose_kernel_behind_is_gone():
    """As a thread meets it that is in a call while another restores: the kernel that is there then runs."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    q, k, v, mask = (torch.randn(shape) for shape in ((2, 3, 5, 8),) * 3 + ((5, 5),))
    gone, there = Library("aten", "IMPL", "CPU"), Library("aten", "IMPL", "CPU")
    gone.impl(name, lambda *args, **kwargs: pytest.fail("called"), allow_override=True)
    front = _C.OperatorFront(name, "CPU")
    inside = torch.library.get_kernel(f"aten::{name}", "CPU")
    try:
        there.impl(name, lambda q, *args, **kwargs: (2 * q, q.sum(-1)), allow_override=True)
        gone._destroy()
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        assert_same(inside.call_boxed(keys, q, k, v, attn_mask=mask), (2 * q, q.sum(-1)))
    finally:
        front.remove()
        there._destroy()


def test_refused():
    with pytest.raises(ValueError, match="no kernel goes in front of operator mm"):
        _C.OperatorFront("mm", "CPU")
    with pytest.raises(RuntimeError, match="CPUU"):
        _C.OperatorFront(FORWARDS[0], "CPUU")
