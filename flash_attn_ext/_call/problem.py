"""One attention call as data. The public functions fill it in, and the extension and the operators take it."""

from __future__ import annotations

import typing
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_ext.types import Backend, Causal


class Problem(NamedTuple):
    """The arguments of an attention call, in the order of csrc/host/call/fields.h.

    Without ``cu_seqlens_*`` the problem is dense. Fields are filled by keyword. Shapes are those of the canonical form,
    into which canonical.py brings a call.
    """

    q: Tensor  # (B, Hq, Sq, D), packed: (Tq, Hq, D)
    k: Tensor  # (B, Hk, Sk, D), packed: (Tk, Hk, D)
    v: Tensor  # (B, Hk, Sk, Dv), packed: (Tk, Hk, Dv)
    bias: Tensor | None = None  # (B|1, Hq|1, Sq|1, Sk|1)
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None  # (Hq,) or (B, Hq)
    sink: Tensor | None = None  # (Hq,)
    intervals: Tensor | None = None  # (B|1, Hq|1, Sq, 2 n) int32, packed: (Hq|1, Tq, 2 n)
    blocks: Tensor | None = None  # (B|1, Hq|1, query blocks, key blocks) bool, of 64 or 128; dense only
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    rng_seed: Tensor | None = None  # (1,) int64
    scale: float | None = None
    softcap: float | None = None
    causal: Causal | None = None
    window_left: int | None = None
    window_right: int | None = None
    dropout_p: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    backend: Backend | None = None
    allow_tf32: bool = False
    sequence_first: bool = False  # the caller has (B, S, H, D), and out gets it where q's strides leave it open
    wants_row_max: bool = False  # the forward pass also returns the largest score of each row
    bias_is_relative: bool = False  # bias is (1, Hq|1, 1, Sq + Sk - 1), with a value per key - query


class KvCache(NamedTuple):
    """The arguments of a call with a cache, beside its :class:`Problem`, in which k and v are the cache.

    The cache is (B_cache, Hk, rows, D|Dv), or with a block_table (pages, Hk, page size, D|Dv). The fields are in the
    order of csrc/host/call/fields.h.
    """

    cache_seqlens: Tensor  # (B,) int32: keys in the cache before the call
    k_new: Tensor | None = None  # (B, Hk, new, D)
    v_new: Tensor | None = None  # (B, Hk, new, Dv)
    block_table: Tensor | None = None  # (B, pages of a sequence) int32
    cache_batch_idx: Tensor | None = None  # (B,) int32
    rotary_cos: Tensor | None = None  # (positions, rotary dim / 2)
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False


def block_size(count: int, length: int) -> int:
    """The size of blocks of a length of which there are ``count``: 64 or 128."""
    return 64 if count == -(-length // 64) else 128


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, the LSE, slopes and sinks of a problem of that dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sink")  # in the order of their gradients

# PyTorch makes constants of the symbolic arguments of a type "float", but not of "Scalar" and "SymInt".
_SCHEMA_TYPES = {Tensor: "Tensor", float: "Scalar", Causal: "str", Backend: "str", int: "SymInt", bool: "bool"}


def _schema_type(hint: object) -> str:
    kinds = typing.get_args(hint) or (hint,)
    (kind,) = (kind for kind in kinds if kind is not type(None))
    return _SCHEMA_TYPES[kind] + "?" * (len(kinds) - 1)


def _schema_types(fields: type) -> dict[str, str]:
    return {name: _schema_type(hint) for name, hint in typing.get_type_hints(fields).items()}


def _schema(types: dict[str, str]) -> str:
    return ", ".join(f"{kind} {name}" for name, kind in types.items())


_TYPES = _schema_types(Problem)

SCHEMA = _schema(_TYPES)
"""A problem as arguments of a torch.library operator."""

CACHE_SCHEMA = _schema(_TYPES | {"k": "Tensor(a!)", "v": "Tensor(b!)"} | _schema_types(KvCache))
"""A problem whose k and v are a cache, which the call writes, and the cache's own arguments."""

NUMBERS = tuple(name for name, kind in _TYPES.items() if kind.startswith("Scalar"))

SCHEMA_OF_VARYING = _schema({f"varying_{name}": "Tensor?" for name in NUMBERS})
"""The numbers as float64 tensors on the CPU, each None where it is a constant."""

NUM_TENSORS = sum(kind.startswith("Tensor") for kind in _TYPES.values())  # a Problem begins with them
