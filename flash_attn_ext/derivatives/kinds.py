"""What the tensors of a call are made of: it says how they are cut into pieces and folded by the batching rule."""

from __future__ import annotations

import enum

from flash_attn_ext._problem import DIFFERENTIABLE


class Kind(enum.Enum):
    """Shapes are those of the canonical form (_problem.py): dense; packed."""

    QUERIES = enum.auto()  # (B, Hq, Sq, *); (Tq, Hq, *)
    KEYS = enum.auto()  # (B, Hk, Sk, *); (Tk, Hk, *)
    STATISTIC = enum.auto()  # (B, Hq, Sq); (Hq, Tq)
    TABLE = enum.auto()  # (B|1, Hq|1, Sq|1, Sk|1)
    SLOPES = enum.auto()  # (Hq,) or (B, Hq)
    SINK = enum.auto()  # (Hq,)
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
    cu_seqlens_q=Kind.OFFSETS,
    cu_seqlens_k=Kind.OFFSETS,
    rng_seed=Kind.SEED,
    out=Kind.QUERIES,
    lse=Kind.STATISTIC,
    lse_residual=Kind.STATISTIC,
    dout=Kind.QUERIES,
    dlse=Kind.STATISTIC,
)
KINDS |= {tangent_name(name): kind for name, kind in KINDS.items()}
