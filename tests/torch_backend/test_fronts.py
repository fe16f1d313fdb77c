"""Kernels of C++ in front of those of Python: what they run, that both give the same, and what is handed on."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn_ext
from flash_attn_ext import _C
from flash_attn_ext.integrations.torch_backend import switch
from support import aten

ATEN = torch.ops.aten
FORWARDS = [name for name in _C.operators_with_front() if name.startswith("_") and not name.endswith("backward")]
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
    """Only the kernels in Python."""
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


def function_inputs(device: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    return [torch.randn(2, 4, 37, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(scale=0.3), dict(enable_gqa=True)], ids=str)
def test_pytorchs_function_is_taken_before_it_chooses(options, layout, device):
    """With the results of our own entry, bit for bit, in the strides that PyTorch's operators declare."""
    q, k, v = function_inputs(device)
    if options.get("enable_gqa"):
        k, v = (tensor.detach()[:, :2].clone().requires_grad_() for tensor in (k, v))
    if layout == "bshd":
        q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v))
    expected = flash_attn_ext.scaled_dot_product_attention(q, k, v, **options)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    with aten.active():
        before = _C.passes_of_fronts(), _C.recorded_backward_passes()
        found = F.scaled_dot_product_attention(q, k, v, **options)
        assert found.grad_fn.name() == "FlashAttentionFunctionBackward" and found.stride() == q.stride()
        assert torch.equal(found, expected)
        assert all(map(torch.equal, torch.autograd.grad(found.sum(), (q, k, v)), gradients))
        assert _C.passes_of_fronts()[0] == before[0][0] + 1 and _C.recorded_backward_passes() == before[1] + 1
        with torch.no_grad():
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, **options), expected)
        with torch.inference_mode():
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, **options), expected)
        assert _C.passes_of_fronts()[0] == before[0][0] + 3


def test_the_function_has_the_arguments_that_ours_reads():
    arguments = ATEN.scaled_dot_product_attention.default._schema.arguments
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [argument.name for argument in arguments] == names


def test_float32_has_the_strides_of_efficient_attention(device):
    q, k, v = function_inputs(device, torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v).stride()
    with aten.active():
        assert F.scaled_dot_product_attention(q, k, v).stride() == expected


class Sees(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.append(function.name())
        return function(*args, **kwargs or {})


def test_who_watches_sees_operators(device):
    """Dispatch modes: FLOP counters, checkpoint policies, compilers."""
    q, k, v = function_inputs(device)
    with aten.active(), Sees() as mode:
        F.scaled_dot_product_attention(q, k, v)
    assert any("_scaled_dot_product_" in name for name in mode.operators)


def test_pytorchs_choice_is_kept_where_there_is_one(device):
    """A kind of kernel that is switched off, a mask, dropout: PyTorch chooses."""
    q, k, v = function_inputs(device)
    math = [SDPBackend.MATH]
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if device == "cuda" else math
    expected = F.scaled_dot_product_attention(q, k, v)
    with aten.active(), aten.recorded() as passes, sdpa_kernel(math):
        out = F.scaled_dot_product_attention(q, k, v)
        assert "FlashAttentionFunction" not in out.grad_fn.name()
    assert passes == []
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
    with aten.active(), sdpa_kernel(fused):
        assert "FlashAttentionFunction" not in F.scaled_dot_product_attention(q, k, v).grad_fn.name()
    with aten.active():
        mask = torch.ones(37, 37, dtype=torch.bool, device=device)
        assert "FlashAttentionFunction" not in F.scaled_dot_product_attention(q, k, v, mask).grad_fn.name()
        wide = torch.cat([v, v], dim=-1)
        assert "FlashAttentionFunction" not in F.scaled_dot_product_attention(q, k, wide).grad_fn.name()
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k[:, :3], v[:, :3])
        if device == "cuda":  # efficient attention, the only one that takes float32, has no grouped heads
            q, k, v = (tensor.float() for tensor in (q, k[:, :2], v[:, :2]))
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            assert "FlashAttentionFunction" not in out.grad_fn.name()


def test_double_backward_through_pytorchs_function(device):
    """Which PyTorch's fused operators do not have."""
    tensors = function_inputs(device, torch.float32)

    def penalty(attend):
        gradients = torch.autograd.grad(attend(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), tensors)

    with sdpa_kernel([SDPBackend.MATH]):
        expected = penalty(F.scaled_dot_product_attention)
    with aten.active():
        found = penalty(F.scaled_dot_product_attention)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_refused():
    with pytest.raises(ValueError, match="no kernel goes in front of operator mm"):
        _C.OperatorFront("mm", "CPU")
    with pytest.raises(RuntimeError, match="CPUU"):
        _C.OperatorFront(FORWARDS[0], "CPUU")
