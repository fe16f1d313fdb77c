"""Relative-position biases (``Problem.bias_is_relative``) as biases of all pairs, for derivatives whose kernels take no
others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_ext._call.problem import accumulate_dtype


def all_pairs(values: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """(..., Sq, Sk) of (..., Sq + Sk - 1) values, of which the first is that of key - query = 1 - Sq. Gradients are
    summed in the accumulate dtype."""
    if num_queries == 0 or num_keys == 0:
        return values.new_zeros((*values.shape[:-1], num_queries, num_keys))
    rows = values.to(accumulate_dtype(values.dtype)).unfold(-1, num_keys, 1)
    return rows.flip(-2).to(values.dtype)


def sums_of_pairs(pairs: Tensor) -> Tensor:
    """(..., Sq + Sk - 1) of (..., Sq, Sk): the transpose of :func:`all_pairs`."""
    num_queries, num_keys = pairs.shape[-2:]
    count = max(num_queries + num_keys - 1, 0)
    if pairs.numel() == 0:
        return pairs.new_zeros((*pairs.shape[:-2], count))
    # Rows that are one longer than the diagonals are many shift by one against rows of the diagonals' number.
    padded = torch.nn.functional.pad(pairs.flip(-2), (0, num_queries))
    shifted = padded.flatten(-2)[..., : num_queries * count].unflatten(-1, (num_queries, count))
    return shifted.sum(-2, dtype=accumulate_dtype(pairs.dtype)).to(pairs.dtype)


def with_all_pairs(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """`arguments` of a derivative, with a bias of all pairs. `names`: those that have the shape of the bias."""
    lengths = arguments["q"].shape[2], arguments["k"].shape[2]
    pairs: dict[str, Any] = {
        name: all_pairs(arguments[name].squeeze(2), *lengths) for name in names if arguments[name] is not None
    }
    return arguments | pairs | dict(bias_is_relative=False)


def with_sums_of_pairs(gradients: dict[str, Any], name: str) -> dict[str, Any]:
    """`gradients` by name, of which that of the bias has all pairs, with it summed along diagonals."""
    if gradients.get(name) is None:
        return gradients
    return gradients | {name: sums_of_pairs(gradients[name]).unsqueeze(2)}
