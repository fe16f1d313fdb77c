"""The error rule for a random problem, with poison where nothing may look and at random strides."""

import math
import os
import random
from unittest import mock

import torch

from support.backends import Backend
from support.cases import Inputs, make_inputs
from support.checks import check_drawn, check_packed_drawn
from support.masks import attended
from support.packed import PackedCase, make_packed, sequences
from support.problems.draw import Problem
from support.strides import with_strides

ANOTHER_DRAW = 10**6  # of the same problem
POISONS = (math.nan, math.inf, -math.inf)


def unattended(inputs: Inputs) -> torch.Tensor:
    """(B, Hk, Sk): keys that no query of their heads sees."""
    case = inputs.case
    seen = attended(case, inputs.whole_mask, inputs.k.device).any(2)
    return ~seen.unflatten(1, (case.num_kv_heads, -1)).any(2)


def unattended_tokens(case: PackedCase, inputs: Inputs) -> torch.Tensor:
    """(Tk, Hk)"""
    return torch.cat([unattended(alone)[0].T for alone, _, _ in sequences(case, inputs)])


def as_presented(problem: Problem, inputs: Inputs) -> Inputs:
    """The same problem with poison where nothing may look, and at random strides."""
    hidden = unattended(inputs) if problem.packed is None else unattended_tokens(problem.packed, inputs)
    hidden, poison = hidden.unsqueeze(-1), POISONS[problem.number % len(POISONS)]
    inputs = inputs.replace(k=inputs.k.masked_fill(hidden, poison), v=inputs.v.masked_fill(hidden, poison))
    if not problem.is_strided:
        return inputs
    rng = random.Random(problem.number)
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    return inputs.replace(**{name: with_strides(t, rng) for name, t in tensors.items() if t is not None})


def check_problem(problem: Problem, backend: Backend) -> None:
    with mock.patch.dict(os.environ, problem.environment):
        _check_problem(problem, backend)


def _check_problem(problem: Problem, backend: Backend) -> None:
    def present(inputs: Inputs) -> Inputs:
        return as_presented(problem, inputs)

    def wanting(inputs: Inputs) -> Inputs:
        return inputs.replace(differentiable=problem.wanted)

    case, packed, dtype, device = problem.case, problem.packed, problem.dtype, backend.device
    if packed is None:
        check_drawn(
            lambda redraw: wanting(make_inputs(case, dtype, device, problem.number + ANOTHER_DRAW * redraw, device)),
            backend,
            present,
        )
    else:
        check_packed_drawn(
            packed,
            lambda redraw: wanting(make_packed(packed, dtype, device, problem.number + ANOTHER_DRAW * redraw, device)),
            backend,
            present,
        )
