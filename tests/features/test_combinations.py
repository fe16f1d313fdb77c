"""Everything combines with everything: problems drawn at random from all features, shapes preferring tile edges."""

import random

import pytest

from support.cases import ALL_PATTERNS, DTYPES, Case
from support.checks import check_case

LENGTHS = (1, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 300)
HEAD_DIMS = (1, 3, 8, 16, 33, 64, 72, 96)


def draw(seed: int) -> Case:
    rng = random.Random(seed)

    def maybe(value, probability=0.35):
        return value if rng.random() < probability else None

    kv_heads = rng.choice((1, 2))
    heads = kv_heads * rng.choice((1, 1, 2, 3))
    # A lone key has an exact gradient of zero for q and k, against which no relative error exists.
    sq, sk = rng.choice(LENGTHS), rng.choice(LENGTHS[1:])
    return Case(
        sq=sq,
        sk=sk,
        d=rng.choice(HEAD_DIMS),
        dv=maybe(rng.choice(HEAD_DIMS)),
        batch=rng.choice((1, 2, 3)),
        heads=heads,
        kv_heads=kv_heads,
        causal=maybe(rng.choice(("top_left", "bottom_right")), 0.5),
        window=maybe((rng.choice((None, 0, 7, 100)), rng.choice((None, 0, 7, 100)))),
        scale=maybe(rng.choice((-0.2, 0.05, 0.5))),
        softcap=maybe(rng.choice((1.0, 20.0))),
        bias=maybe(rng.choice(ALL_PATTERNS), 0.5),
        bias_float32=rng.random() < 0.3,
        mask=maybe(rng.choice(ALL_PATTERNS)),
        alibi=maybe(rng.choice(("h", "bh"))),
        sink=rng.random() < 0.35,
        dropout_p=maybe(rng.choice((0.1, 0.6)), 0.3) or 0.0,
        dlse=rng.random() < 0.5,
        layout=rng.choice(("bhsd", "bshd")),
    )


@pytest.mark.parametrize("seed", range(240))
def test_random_problem(seed, backend):
    """Each seed is a problem and a dtype; a failure is repeated by its seed alone."""
    check_case(draw(seed), DTYPES[seed % len(DTYPES)], backend, seed)
