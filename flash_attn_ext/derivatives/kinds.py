"""The kinds of a call's tensors, by their dimensions. A kind decides how a tensor is cut and folded (batching.py)."""

from __future__ import annotations

import enum

from flash_attn_ext._call.problem import DIFFERENTIABLE


class Kind(enum.Enum):
    """The comments give the shapes in canonical form (_call/problem.py), of dense calls; of packed calls."""

    QUERIES = enum.auto()  # (B, Hq, Sq, *); (Tq, Hq, *)
    KEYS = enum.auto()  # (B, Hk, Sk, *); (Tk, Hk, *)
    STATISTIC = enum.auto()  # (B, Hq, Sq); (Hq, Tq)
    TABLE = enum.auto()  # (B|1, Hq|1, Sq|1, Sk|1)
    SLOPES = enum.auto()  # (Hq,) or (B, Hq)
    SINK = enum.auto()  # (Hq,)
    INTERVALS = enum.auto()  # (B|1, Hq|1, Sq, 2 n); (Hq|1, Tq, 2 n)
    BLOCKS = enum.auto()  # (B|1, Hq|1, query blocks, key blocks)
    OFFSETS = enum.auto()  # (B + 1,)
    SEED = enum.auto()  # (1,)


def tangent_name(name: str) -> str:
    return f"{name}_tangent"


TANGENTS = tuple(tangent_name(name) for name in DIFFERENTIABLE)

KINDS = dict(
    q=Kind.QUERIES,
    k=Kind.KEYS,
    v=Kind.KEYS,
    bias=Kind.TABLE,
    mask=Kind.TABLE,
    alibi_slopes=Kind.SLOPES,
    sink=Kind.SINK,
    intervals=Kind.INTERVALS,
    blocks=Kind.BLOCKS,
    cu_seqlens_q=Kind.OFFSETS,
    cu_seqlens_k=Kind.OFFSETS,
    rng_seed=Kind.SEED,
    out=Kind.QUERIES,
    lse=Kind.STATISTIC,
    lse_residual=Kind.STATISTIC,
    row_max=Kind.STATISTIC,
    dout=Kind.QUERIES,
    dlse=Kind.STATISTIC,
)
KINDS |= {tangent_name(name): kind for name, kind in KINDS.items()}
