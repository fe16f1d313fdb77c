"""Scores that grow far beyond those of the first keys that a kernel reads.

The sm90 kernel refers the exponents of bfloat16 scores to a row's first key tile, and computes a query tile
again where a row's sum leaves its range (docs/numerics.md, "A fixed row maximum"). Here some tiles have such
rows and others have none, in calls so long that they take that kernel.
"""

import dataclasses
import math

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import SM_COUNT_SWITCH, compare_with_pytorch
from support.disturbance import Disturbance
from support.errors import assert_rule_over_draws
from support.masks import visible
from support.params import over_cases, over_dtypes
from support.runners import call_ours, poisoned_memory, run_ours

RUNS = 100
HALVES = (torch.bfloat16, torch.float16)
CASES = [
    Case(sq=1100, sk=1300, d=d, batch=8, heads=6, **options)
    for d in (64, 128, 256)
    for options in ({}, dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(500, 100)))
]
# Causal ones at head dim 64 take tiles of 64 keys, as do these; then one that does not.
CASES += [
    Case(sq=600, sk=1300, d=64, batch=8, heads=6, **options)
    for options in (dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(500, None)))
]
CASES.append(Case(sq=1600, sk=1700, d=64, batch=8, heads=6, causal="top_left"))
# Rows that are no whole sectors take tiles of more queries.
CASES += [
    Case(sq=1100, sk=1300, d=d, batch=8, heads=6, **options)
    for d in (72, 104)
    for options in ({}, dict(causal="bottom_right"), dict(window=(500, 100)))
]
# Kernels that know a mask.
CASES += [Case(sq=1100, sk=1300, d=d, batch=8, heads=6, mask="11qk") for d in (128, 192, 256)]
FIRST_KEYS = 256  # at least as many as a first tile of keys has
SUM_LIMIT = 64  # beyond which a row is computed again: 2^64


def with_wide_scores(inputs: Inputs) -> Inputs:
    """Heads 0 and 1 unchanged; 2: all rows wide; 3: rows of one tile; 4: every seventh row; 5: all scores low."""
    q, k = inputs.q.clone(), inputs.k.clone()
    q[:, 2] *= 60
    first = 700 if inputs.case.sq > 764 else 400
    q[:, 3, first : first + 64] *= 60
    q[:, 4, ::7] *= 30
    q[:, 5, :, 0] -= 60
    k[:, 5, :, 0] += 8
    return inputs.replace(q=q, k=k)


def make_wide(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    return with_wide_scores(make_inputs(case, dtype, "cuda", seed, draw_on="cuda"))


def growth(inputs: Inputs) -> torch.Tensor:
    """(B, H, Sq): by how many powers of 2 the largest weight exceeds that of the last keys that a row sees."""
    case = inputs.case
    seen = visible(case, "cuda")
    places = torch.arange(case.sk, device="cuda")
    last = torch.where(seen, places, -1).amax(-1, keepdim=True)
    scores = inputs.q.double() @ inputs.k.double().mT * (case.d**-0.5 / math.log(2))
    first = scores.masked_fill(~seen | (places <= last - FIRST_KEYS), -math.inf)
    return scores.masked_fill(~seen, -math.inf).amax(-1) - first.amax(-1)


def attend(inputs: Inputs, gpu) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad(), poisoned_memory():
        return call_ours(inputs, {name: getattr(inputs, name) for name in ("q", "k", "v")}, gpu)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_some_rows_grow_out_of_range_and_others_do_not(case, gpu):
    """The other tests here would mean nothing otherwise."""
    grown = growth(make_wide(case, torch.float32))
    assert all(float(grown[:, head].max()) > SUM_LIMIT for head in (2, 3, 4))
    assert float(grown[:, :2].max()) < SUM_LIMIT / 4


@over_dtypes(HALVES)
@over_cases(CASES)
def test_a_hundred_runs_give_the_same_bits(case, dtype, gpu):
    """While other work comes and goes, so that CTAs fetch other work tiles each time."""
    inputs = make_wide(case, dtype)
    disturbance = Disturbance()
    torch.cuda.synchronize()
    out, lse = attend(inputs, gpu)
    assert bool(out.isfinite().all())
    for run in range(RUNS):
        disturbance.start(3 * run % 7)
        again, lse_again = attend(inputs, gpu)
        assert torch.equal(out, again) and torch.equal(lse, lse_again), f"run {run}"
    torch.cuda.synchronize()


@over_dtypes(HALVES)
@over_cases(CASES)
def test_a_head_alone_gives_the_same_bits(case, dtype, gpu):
    """A tile that is computed again changes no other, whichever block had it."""
    inputs = make_wide(case, dtype)
    out, lse = attend(inputs, gpu)
    single = dataclasses.replace(case, batch=1, heads=1)
    for head in range(case.heads):
        tensors = {name: getattr(inputs, name)[3:4, head : head + 1] for name in ("q", "k", "v")}
        alone, lse_alone = attend(inputs.replace(case=single, **tensors), gpu)
        assert torch.equal(out[3, head], alone[0, 0]) and torch.equal(lse[3, head], lse_alone[0, 0]), f"head {head}"


@over_dtypes(HALVES)
@over_cases([dataclasses.replace(case, batch=2) for case in CASES])
def test_tiles_of_any_size_give_the_same_bits(case, dtype, gpu, monkeypatch):
    """Where there are few tiles of queries the sm90 kernel has smaller ones; not on a GPU of one SM."""
    inputs = make_wide(case, dtype)
    monkeypatch.delenv(SM_COUNT_SWITCH, raising=False)
    out, lse = attend(inputs, gpu)
    monkeypatch.setenv(SM_COUNT_SWITCH, "1")
    again, lse_again = attend(inputs, gpu)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@over_dtypes(HALVES)
@over_cases([dataclasses.replace(case, batch=1) for case in CASES])
def test_results_obey_the_error_rule(case, dtype, gpu):
    def compare_draw(seed: int):
        inputs = make_wide(case, dtype, seed)
        comparisons = compare_with_pytorch(inputs, gpu, run_ours(inputs, gpu))
        return {name: comparisons[name] for name in ("out", "lse")}

    assert_rule_over_draws(compare_draw)


@over_dtypes(HALVES)
@over_cases(
    [Case(sq=1100, sk=1300, d=d, batch=1, heads=4, scale=scale) for d in (64, 96, 128, 256) for scale in (0.5, 2.0)]
)
def test_few_large_weights_obey_the_error_rule(case, dtype, gpu):
    """Scores so wide that a few weights make up a row, though no sum leaves its range."""

    def compare_draw(seed: int):
        inputs = make_inputs(case, dtype, "cuda", seed, draw_on="cuda")
        comparisons = compare_with_pytorch(inputs, gpu, run_ours(inputs, gpu))
        return {name: comparisons[name] for name in ("out", "lse")}

    assert_rule_over_draws(compare_draw)


@over_dtypes(HALVES)
@pytest.mark.parametrize("value", [2.0**-60, 2.0**70], ids=str)
def test_values_of_any_size(value, dtype, gpu):
    """O is a sum of weights times values before it is divided: no product may leave float32's range on the way."""
    if dtype == torch.float16:
        value = 2.0 ** (-9 if value < 1 else 12)
    inputs = make_wide(CASES[0], dtype)
    out, lse = attend(inputs, gpu)
    scaled, lse_scaled = attend(inputs.replace(v=inputs.v * value), gpu)
    torch.testing.assert_close(lse_scaled, lse, rtol=1e-6, atol=1e-4)  # tiles that were computed again round otherwise
    eps = torch.finfo(dtype).eps
    scale = float(out.abs().max())
    torch.testing.assert_close(scaled.double() / value, out.double(), rtol=2 * eps, atol=2 * eps * scale)
