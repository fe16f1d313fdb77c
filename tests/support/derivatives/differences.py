"""Central differences of a function and of its backward pass, along directions of -1 and 1.

One difference along such a direction has every element of a Jacobian in it, with a factor of -1 or 1: an element that
is wrong by some amount makes an element of the result wrong by that amount. The entries that make one sum can only hide
one another along some directions, so there are several. That takes a few calls where a difference for each element
takes hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

Function = Callable[..., tuple[Tensor, ...]]
Tensors = tuple[Tensor, ...]

NUM_DIRECTIONS = 3
STEP = 1e-6
TOLERANCES = dict(rtol=1e-5, atol=1e-6)  # of float64


def directions(tensors: Iterable[Tensor]) -> Iterator[Tensors]:
    """NUM_DIRECTIONS times, -1 or 1 for each element of the tensors."""
    tensors = tuple(tensors)
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_DIRECTIONS):
        signs = (torch.randint(2, tensor.shape, generator=generator) * 2 - 1 for tensor in tensors)
        yield tuple(sign.to(tensor) for sign, tensor in zip(signs, tensors, strict=True))


def check_forward_mode(function: Function, leaves: Tensors) -> None:
    leaves = fresh(leaves)
    for along in directions(leaves):
        with forward_ad.dual_level():
            found = tangents_of(function(*map(forward_ad.make_dual, leaves, along)))
        assert_close(found, central_difference(function, leaves, along))


def check_double_backward(function: Function, leaves: Tensors) -> None:
    """Given a direction as cotangents of the gradients B(x, g), it is the change of B along that direction for x, since
    B's derivative by x is symmetric, and the change of the function for g."""
    leaves = fresh(leaves, requires_grad=True)
    cotangents = fresh(random_cotangents(function, leaves), requires_grad=True)
    for along in directions(leaves):
        gradients = torch.autograd.grad(function(*leaves), leaves, cotangents, create_graph=True)
        asked = (*leaves, *cotangents)
        found = torch.autograd.grad(gradients, asked, along, allow_unused=True)
        found = [torch.zeros_like(t) if g is None else g for g, t in zip(found, asked, strict=True)]
        of_gradients = central_difference(lambda *x: backward(function, x, cotangents), leaves, along)
        assert_close(found, (*of_gradients, *central_difference(function, leaves, along)))


def check_forward_over_reverse(function: Function, leaves: Tensors) -> None:
    leaves = fresh(leaves, requires_grad=True)
    cotangents = fresh(random_cotangents(function, leaves), requires_grad=True)
    inputs = (*leaves, *cotangents)

    def backward_of_all(*inputs, create_graph=False):
        return backward(function, inputs[: len(leaves)], inputs[len(leaves) :], create_graph)

    for along in directions(inputs):
        with forward_ad.dual_level():
            found = tangents_of(backward_of_all(*map(forward_ad.make_dual, inputs, along), create_graph=True))
        assert_close(found, central_difference(backward_of_all, inputs, along))


def backward(function: Function, leaves: Tensors, cotangents: Tensors, create_graph: bool = False) -> Tensors:
    if not create_graph:
        leaves = fresh(leaves, requires_grad=True)
    return torch.autograd.grad(function(*leaves), leaves, cotangents, create_graph=create_graph)


def random_cotangents(function: Function, leaves: Tensors) -> Tensors:
    return tuple(map(torch.randn_like, function(*leaves)))


def central_difference(function: Function, at: Tensors, along: Tensors) -> Tensors:
    above, below = (
        function(*(x.detach() + sign * STEP * step for x, step in zip(at, along, strict=True))) for sign in (1, -1)
    )
    return tuple((a - b).detach() / (2 * STEP) for a, b in zip(above, below, strict=True))


def tangents_of(duals: Iterable[Tensor]) -> list[Tensor]:
    pairs = map(forward_ad.unpack_dual, duals)
    return [torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent for pair in pairs]


def fresh(tensors: Iterable[Tensor], requires_grad: bool = False) -> Tensors:
    return tuple(tensor.detach().clone().requires_grad_(requires_grad) for tensor in tensors)


def assert_close(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one.detach(), other, **TOLERANCES, msg=lambda text, i=index: f"tensor {i}: {text}")
