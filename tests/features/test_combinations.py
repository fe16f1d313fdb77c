"""Everything combines with everything: problems drawn at random from all features, shapes preferring tile edges.

More of them: pytest tests/features/test_combinations.py --random-problems 5000
"""

import math
import random

from support.cases import ALL_PATTERNS, DTYPES, Case, Inputs, make_inputs
from support.checks import check_drawn
from support.masks import attended
from support.strides import with_strides

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


def pytest_generate_tests(metafunc):
    metafunc.parametrize("seed", range(metafunc.config.getoption("--random-problems")))


def with_poisoned_strangers(inputs: Inputs) -> Inputs:
    """NaN in the keys that no query of their heads attends."""
    case = inputs.case
    seen = attended(case, inputs.mask).any(2).unflatten(1, (case.num_kv_heads, -1)).any(2).to(inputs.k.device)
    hidden = ~seen.unsqueeze(-1)
    return inputs.replace(k=inputs.k.masked_fill(hidden, math.nan), v=inputs.v.masked_fill(hidden, math.nan))


def with_random_strides(inputs: Inputs, rng: random.Random) -> Inputs:
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    return inputs.replace(**{name: with_strides(t, rng) for name, t in tensors.items() if t is not None})


def test_random_problem(seed, backend):
    """Each seed is a problem, a dtype and strides; a failure is repeated by its seed alone."""
    case, dtype = draw(seed), DTYPES[seed % len(DTYPES)]

    def present(inputs: Inputs) -> Inputs:
        inputs = with_poisoned_strangers(inputs)
        return with_random_strides(inputs, random.Random(seed)) if seed % 3 == 0 else inputs

    check_drawn(lambda redraw: make_inputs(case, dtype, backend.device, seed + 10**6 * redraw), backend, present)
