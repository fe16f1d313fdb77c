"""The same values, or broadcast ones, at other strides."""

import random

import torch


def with_strides(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A view with the values of `tensor`, in a storage of random dimension order with NaN in the gaps."""
    order = list(range(tensor.dim()))
    if rng.random() < 0.7:
        rng.shuffle(order)
    steps = [rng.choice((1, 1, 2, 3)) for _ in order]
    starts = [rng.choice((0, 0, 1, 5)) for _ in order]
    sizes = [start + max(tensor.shape[dim], 1) * step for dim, start, step in zip(order, starts, steps, strict=True)]
    gap = float("nan") if tensor.is_floating_point() else True
    storage = torch.full(sizes, gap, dtype=tensor.dtype, device=tensor.device)
    slices = tuple(
        slice(start, start + tensor.shape[dim] * step, step)
        for dim, start, step in zip(order, starts, steps, strict=True)
    )
    view = storage[slices].permute([order.index(dim) for dim in range(tensor.dim())])
    return view.copy_(tensor)


def with_stride_zero(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Index 0 of each of `dims`, expanded to its length without memory."""
    view = tensor
    for dim in dims:
        view = view.narrow(dim, 0, 1)
    return view.expand_as(tensor)


def integer_of(dtype: torch.dtype) -> torch.dtype:
    """That has as many bits."""
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def bits_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a view, (elements,), also what lies in its gaps."""
    return torch.empty(0, dtype=integer_of(tensor.dtype), device=tensor.device).set_(tensor.untyped_storage())
