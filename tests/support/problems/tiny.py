"""Random problems of many pairs of a batch entry and a head with few tokens each, as windows and sets have."""

from __future__ import annotations

import random

import torch

from support.cases import ALL_PATTERNS, Case
from support.problems.draw import Problem, draw_wanted, maybe

SIZES = range(16, 65)
EDGES = (16, 17, 31, 32, 33, 48, 49, 63, 64)
HEAD_DIMS = (8, 16, 24, 32, 32, 33, 40, 48, 64, 80, 96, 128, 160)
BIASES = ("1hqk", "1hqk", "11qk", "bhqk", "b1qk")  # with a value for each pair of a query and a key; others are rare
MASKS = ("b1qk", "b1qk", "b11k", "1hqk", "bhqk")
DTYPES = (*[torch.bfloat16] * 5, *[torch.float16] * 3, torch.float32)


def draw_tiny(number: int, pairs: int) -> Problem:
    """`pairs`: the least number of pairs of a batch entry and a head."""
    rng = random.Random(f"{number}, tiny")
    heads = rng.choice((1, 2, 3, 4, 6, 8, 12))
    dtype = rng.choice(DTYPES)
    case = Case(
        sq=_size(rng),
        sk=_size(rng),
        d=rng.choice(HEAD_DIMS),
        dv=maybe(rng, rng.choice(HEAD_DIMS), 0.2),
        batch=-(-pairs // heads) + rng.choice((0, 0, 1, 5)),
        heads=heads,
        kv_heads=rng.choice([n for n in range(1, heads + 1) if heads % n == 0]) if rng.random() < 0.2 else heads,
        bias=maybe(rng, rng.choice(BIASES) if rng.random() < 0.8 else rng.choice(ALL_PATTERNS), 0.8),
        bias_float32=rng.random() < 0.15,
        mask=maybe(rng, rng.choice(MASKS) if rng.random() < 0.8 else rng.choice(ALL_PATTERNS), 0.7),
        mask_keep=rng.choice((0.7, 0.7, 0.3)),
        padding=rng.random() < 0.2,
        causal=maybe(rng, rng.choice(("top_left", "bottom_right")), 0.15),
        window=maybe(rng, (rng.choice((3, 20)), rng.choice((2, 20))), 0.1),
        scale=maybe(rng, 0.5, 0.1),
        sink=rng.random() < 0.15,
        dlse=rng.random() < 0.2,
        layout=rng.choice(("bhsd", "bshd")),
    )
    return Problem(number, case, None, dtype, rng.random() < 0.5, draw_wanted(rng, case), ())


def _size(rng: random.Random) -> int:
    return rng.choice(EDGES if rng.random() < 0.6 else SIZES)
