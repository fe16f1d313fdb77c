"""Biases that are looked up in a table: which entry each pair of a query and a key has.

``attention(..., bias_table=T, bias_index=...)`` adds ``T[head, entry]`` to each score. The index is "clip", buckets of
T5 (:class:`T5Buckets`), or a tensor of entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class T5Buckets:
    """The buckets of T5's relative positions (Raffel et al. 2020, "T5", section 2.1), for ``bias_index``.

    The entries of a table are buckets of ``key - query``. Half of the buckets of a direction hold one distance each.
    The others hold ranges that grow with the distance, and the last one every distance from ``max_distance`` on. An
    encoder's buckets are bidirectional; a decoder's are not, and put every later key into bucket 0. Buckets are those
    of ``T5Attention._relative_position_bucket`` of transformers, bit for bit, on the same device.

    Example:
        >>> buckets = flash_attn_ext.bias_tables.T5Buckets(bidirectional=False)
        >>> buckets.of(torch.tensor([-200, -20, -3, 0, 5]), num_buckets=32)
        tensor([31, 17,  3,  0,  0])
    """

    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        if type(self.bidirectional) is not bool or type(self.max_distance) is not int:
            raise TypeError(f"{self}: expected a bool for bidirectional and an int for max_distance")

    def of(self, distance: Tensor, num_buckets: int) -> Tensor:
        """The bucket of each ``key - query``, int64 in the shape of ``distance``.

        Raises ValueError where so many buckets cannot hold the distances.
        """
        sides = 2 if self.bidirectional else 1
        own, max_exact = num_buckets // sides, num_buckets // sides // 2
        if num_buckets % sides or max_exact < 1 or self.max_distance <= max_exact:
            least = "an even number of at least 4" if self.bidirectional else "at least 2"
            raise ValueError(
                f"bias_table has {num_buckets} entries, with {self}, expected {least} entries, and "
                f"a max_distance above {max_exact}, the number of distances that have a bucket of their own"
            )
        later = (distance > 0).long() * own if self.bidirectional else torch.zeros_like(distance)
        away = distance.abs() if self.bidirectional else -distance.clamp(max=0)
        # The operations of transformers, one by one, so that the logarithm is rounded as theirs.
        beyond = torch.log(away.float().clamp(min=max_exact) / max_exact) / math.log(self.max_distance / max_exact)
        far = (max_exact + (beyond * (own - max_exact)).long()).clamp(max=own - 1)
        return later + torch.where(away < max_exact, away, far)


BiasIndex = Literal["clip", "t5"] | T5Buckets | Tensor


def entries_of_pairs(index: BiasIndex | None, distance: Tensor, num_entries: int) -> Tensor:
    """The entry of each pair, int64; ``distance`` of each pair is key - (query + diagonal)."""
    return index.long() if isinstance(index, Tensor) else entries_of_distances(index, distance, num_entries)


def entries_of_distances(index: str | T5Buckets | None, distance: Tensor, num_entries: int) -> Tensor:
    """The entry of each ``key - query``, int64, by an index that is no tensor."""
    if isinstance(index, str) and index == "clip":
        if num_entries % 2 == 0:
            raise ValueError(
                f"bias_table has {num_entries} entries, expected an odd number for bias_index='clip': 2 m + 1, of the "
                "distances -m to m"
            )
        most = num_entries // 2
        return distance.clamp(-most, most) + most
    buckets = T5Buckets() if isinstance(index, str) and index == "t5" else index
    if not isinstance(buckets, T5Buckets):
        raise ValueError(
            f"bias_index must be 'clip', 't5', a flash_attn_ext.bias_tables.T5Buckets, or an int16 or int32 tensor "
            f"(queries, keys), got {index!r}"
        )
    return buckets.of(distance, num_entries)
