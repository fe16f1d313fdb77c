"""Short sequences of which each has a bias of its own: the shifted windows of Swin, graphs of a few nodes.

On a GPU the bias of up to 64 tokens is copied ahead of its sequence, in the chunks of 16 bytes that each row touches.
Lengths lie at the edge at which a row fits eight chunks wherever it begins, rows begin anywhere, the last one ends at a
chunk or not, and CTAs have one sequence or several.
"""

import math

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import check_case, check_drawn
from support.params import over_cases, over_dtypes
from support.runners import run_ours

OWN = dict(bias="bhqk", batch=8, heads=3)
SHAPES = [
    *(Case(sq=sk, sk=sk, d=32, **OWN) for sk in (1, 7, 8, 33, 49, 56, 57, 58, 63, 64)),
    *(Case(sq=sq, sk=sk, d=d, **OWN) for sq, sk in ((64, 49), (17, 64), (5, 57)) for d in (8, 40, 64, 72)),
    Case(sq=49, sk=49, d=32, **OWN | dict(batch=696)),
    Case(sq=49, sk=49, d=64, **OWN | dict(batch=304)),
    *(Case(sq=sk, sk=sk, d=d, **OWN | dict(batch=7)) for sk in (49, 56, 63) for d in (32, 64)),
    Case(sq=49, sk=49, d=32, **OWN | dict(batch=1)),
]
FEATURES = [
    Case(sq=49, sk=sk, d=d, **OWN | features)
    for sk, d in ((49, 32), (64, 64))
    for features in (
        dict(mask="b1qk", dlse=True),
        dict(causal="bottom_right"),
        dict(window=(20, 3), sink=True),
        dict(bias="b1qk"),
        dict(bias="bh1k"),
        dict(bias="bhq1"),
        dict(scale=-0.4),
    )
]
# Elements before the bias, and behind each of its rows. Where both leave the same rest by 8, the last row ends at a
# multiple of 16 bytes.
PLACES = ((8, 0), (1, 1), (3, 3), (7, 7), (0, 8), (5, 13), (1, 0), (0, 3))


def placed(inputs: Inputs, before: int, behind: int) -> Inputs:
    """With the bias at another place in memory, among NaN."""
    batch, heads, rows, columns = inputs.bias.shape
    size = before + batch * heads * rows * (columns + behind)
    memory = inputs.bias.new_full((size,), math.nan)
    bias = memory[before:].view(batch, heads, rows, columns + behind)[..., :columns]
    bias.copy_(inputs.bias)
    return inputs.replace(bias=bias)


@over_dtypes()
@over_cases(SHAPES)
def test_shapes(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, torch.float16))
@over_cases(FEATURES)
def test_features(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("before", "behind"), PLACES)
@pytest.mark.parametrize("tokens", [49, 57, 64])
def test_rows_begin_anywhere(tokens, before, behind, dtype, backend):
    case = Case(sq=tokens, sk=tokens, d=32, **OWN)
    check_drawn(lambda seed: placed(make_inputs(case, dtype, backend.device, seed), before, behind), backend)


@over_dtypes((torch.bfloat16, torch.float16))
@pytest.mark.parametrize("d", [32, 64])
def test_what_a_bias_hides(d, dtype, backend):
    """Keys of -inf reach nothing, not even as NaN, and rows of -inf are empty."""

    def draw(seed: int) -> Inputs:
        inputs = make_inputs(Case(sq=49, sk=49, d=d, **OWN), dtype, backend.device, seed)
        inputs.bias[..., 40:] = -math.inf
        inputs.bias[3, :, 20:30] = -math.inf
        return inputs

    check_drawn(draw, backend)
    inputs = draw(0)
    clean = run_ours(inputs, backend)
    inputs.k[:, :, 40:] = inputs.v[:, :, 40:] = math.nan
    spoilt = run_ours(inputs, backend)
    for name in ("out", "dq", "dbias"):
        assert not bool(spoilt[name].isnan().any()), name
    assert not bool(clean["out"][3, :, 20:30].any()) and not bool(spoilt["dk"][:, :, 40:].any())
