"""Plain tensors whose tangents and cotangents are of a subclass: what is computed of these is of it, too."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import flash_attn_ext
from support.params import computes_in

pytestmark = computes_in(torch.float64)


class Wrapper(torch.Tensor):
    """A tensor within a tensor, which may hold what it likes. It cannot be written into a plain one."""

    @staticmethod
    def __new__(cls, held):
        shape = dict(strides=held.stride(), dtype=held.dtype, device=held.device)
        tensor = torch.Tensor._make_wrapper_subclass(cls, held.size(), **shape)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        name = function._schema.name
        if name.endswith("_") and not isinstance(arguments[0], cls):
            raise TypeError(f"{name} writes a {cls.__name__} into a plain tensor")
        results = function(*pytree.tree_map_only(cls, lambda t: t.held, arguments), **(keywords or {}))
        return pytree.tree_map_only(torch.Tensor, cls, results)


class Logger(torch.Tensor):
    """A tensor whose operations are seen."""

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        with torch._C._DisableTorchDispatch():
            results = function(*arguments, **(keywords or {}))
        return pytree.tree_map_only(torch.Tensor, lambda t: t.as_subclass(cls), results)


class Named(torch.Tensor):
    """A tensor of another name."""


MAKE = {cls: cls if cls is Wrapper else lambda t, cls=cls: t.as_subclass(cls) for cls in (Wrapper, Logger, Named)}


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        return getattr(tensor, "held", tensor).detach().as_subclass(torch.Tensor)


def forward_mode(attend, tensors, along):
    with forward_ad.dual_level():
        out = attend(*map(forward_ad.make_dual, tensors, along))
        return [forward_ad.unpack_dual(out).tangent]


def forward_over_reverse(attend, tensors, along):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with forward_ad.dual_level():
        duals = list(map(forward_ad.make_dual, leaves, along))
        gradients = torch.autograd.grad(attend(*duals).square().sum(), duals, create_graph=True)
        return [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]


def double_backward(attend, tensors, along):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    gradients = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(gradients, leaves, along)


def attention_of_pytorch(*tensors):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*tensors)


@pytest.mark.parametrize("cls", MAKE, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("derivative", [forward_mode, forward_over_reverse, double_backward], ids=lambda f: f.__name__)
def test_as_pytorchs_attention(derivative, cls, device):
    """The same types, and the values of plain tangents."""
    tensors = [torch.randn(2, 2, n, 4, dtype=torch.float64, device=device) for n in (5, 7, 7)]
    plain = list(map(torch.randn_like, tensors))
    of_pytorch = derivative(attention_of_pytorch, tensors, list(map(MAKE[cls], plain)))
    for attend in (flash_attn_ext.scaled_dot_product_attention, flash_attn_ext.attention):
        expected = derivative(attend, tensors, plain)
        found = derivative(attend, tensors, list(map(MAKE[cls], plain)))
        assert [type(tensor) for tensor in found] == [type(tensor) for tensor in of_pytorch]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(values_of(one), values_of(other))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sink"])
@pytest.mark.parametrize("cls", MAKE, ids=lambda cls: cls.__name__)
def test_one_tangent_of_any_tensor(cls, name, device):
    def number(*shape):
        return torch.randn(shape, dtype=torch.float64, device=device)

    tensors = dict(q=number(2, 2, 5, 4), k=number(2, 2, 7, 4), v=number(2, 2, 7, 4))
    tensors |= dict(bias=number(1, 2, 5, 7), alibi_slopes=number(2), sink=number(2))
    plain = torch.randn_like(tensors[name])

    def tangents(of_one):
        with forward_ad.dual_level():
            duals = tensors | {name: forward_ad.make_dual(tensors[name], of_one)}
            results = flash_attn_ext.attention(**duals, softcap=2.0, causal="bottom_right", return_lse=True)
            return [forward_ad.unpack_dual(result).tangent for result in results]

    for found, expected in zip(tangents(MAKE[cls](plain)), tangents(plain), strict=True):
        assert type(found) is cls
        torch.testing.assert_close(values_of(found), expected)
