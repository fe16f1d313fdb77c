"""The one check that feature tests are made of: a case on a backend obeys the error rule, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from support.backends import Backend
from support.cases import DIFFERENTIABLE, Case, Inputs, accumulate_dtype, make_inputs
from support.errors import Comparison, assert_rule, assert_rule_over_draws, compare
from support.masks import with_empty_tiles
from support.packed import PackedCase, run_by_sequence, run_packed
from support.runners import Result, dropout_bits, run_ours, run_reference
from support.terms import largest_terms, largest_terms_packed
from support.yardstick import run_yardstick

# pytest --run-only: our forward and backward pass alone. Sanitizers look at kernels, and not at what they compute.
run_only = False

SM_COUNT_SWITCH = "FLASH_ATTN_EXT_MULTIPROCESSORS"

Results = TypeVar("Results")


def check_case(case: Case, dtype: torch.dtype, backend: Backend) -> None:
    check_drawn(lambda seed: make_inputs(case, dtype, backend.device, seed), backend)


def check_drawn(
    draw: Callable[[int], Inputs], backend: Backend, present: Callable[[Inputs], Inputs] = lambda inputs: inputs
) -> None:
    """The rule for the inputs that `draw` makes from a seed.

    `present` gives the inputs as ours gets them: the same problem at other strides, say.
    """
    check_draws(
        draw,
        backend,
        run=lambda inputs: run_ours(present(inputs), backend),
        errors=lambda inputs, ours: compare_with_pytorch(inputs, backend, ours),
    )


def check_draws(
    draw: Callable[[int], Inputs],
    backend: Backend,
    run: Callable[[Inputs], Results],
    errors: Callable[[Inputs, Results], dict[str, Comparison]],
) -> None:
    """The rule for what `run` makes of inputs, by its `errors`."""
    if run_only:
        run(draw(0))
        synchronize(backend)
        return

    def compare_draw(seed: int) -> dict[str, Comparison]:
        inputs = draw(seed)
        return errors(inputs, run(inputs))

    assert_rule_over_draws(compare_draw)


def check_inputs(inputs: Inputs, backend: Backend) -> Result:
    """The rule for these very inputs; returns our result."""
    ours = run_ours(inputs, backend)
    if run_only:
        synchronize(backend)
    else:
        assert_rule(compare_with_pytorch(inputs, backend, ours))
    return ours


def check_hidden_tiles(case: Case, dtype: torch.dtype, backend: Backend) -> None:
    """The rule where the case's mask hides whole tiles, and zeros as gradients of rows that these are all of."""
    check_drawn(lambda seed: with_empty_tiles(make_inputs(case, dtype, backend.device, seed)), backend)
    result = run_ours(with_empty_tiles(make_inputs(case, dtype, backend.device)), backend)
    assert bool((result["dq"][:, :, 128:192] == 0).all()) and bool((result["dq"][:, :, 70] == 0).all())
    assert bool((result["dk"][:, :, 64:128] == 0).all()) and bool((result["dv"][:, :, 64:128] == 0).all())


def check_hidden_keys(inputs: Inputs, first: int, poison: float, backend: Backend) -> Result:
    """NaN or infinity in the keys from `first` on, which no query attends, reaches no gradient; their own are zeros."""
    clean = run_ours(inputs, backend)
    dirty = {name: getattr(inputs, name).clone() for name in ("k", "v")}
    for tensor in dirty.values():
        tensor[:, :, first:] = poison
    result = run_ours(inputs.replace(**dirty), backend)
    for name in sorted(result.keys() - {"out", "lse"}):
        assert bool(result[name].isfinite().all()), name
        torch.testing.assert_close(result[name].float(), clean[name].float(), rtol=2e-2, atol=2e-2)
    assert bool((result["dk"][:, :, first:] == 0).all()) and bool((result["dv"][:, :, first:] == 0).all())
    return result


def synchronize(backend: Backend) -> None:
    """So that an error of a kernel is one of the test that launched it."""
    if not backend.is_cpu:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Answers:
    """What results of one problem are measured by: the float64 answer, PyTorch's, and the size of cancelling terms."""

    exact: Result
    yardstick: Result
    terms: dict[str, float]

    def compare(self, ours: Result) -> dict[str, Comparison]:
        return {
            name: compare(ours[name], self.yardstick[name], self.exact[name], self.terms.get(name, 0.0))
            for name in ours
        }


def answers_to(inputs: Inputs, backend: Backend) -> Answers:
    """With all gradients, whichever the inputs want. `backend`: whose dropout bits they go by."""
    inputs = inputs.replace(differentiable=DIFFERENTIABLE)
    keep = dropout_bits(inputs, backend) if inputs.case.dropout_p > 0 else None
    doubles = inputs.to(torch.float64)
    exact = run_reference(doubles, keep)
    return Answers(exact, run_yardstick(inputs, exact, keep), largest_terms(doubles, exact, keep))


def compare_with_pytorch(inputs: Inputs, backend: Backend, ours: Result) -> dict[str, Comparison]:
    """Errors of every output and gradient against float64, beside those of PyTorch."""
    check_results(inputs, ours)
    return answers_to(inputs, backend).compare(ours)


def check_on_sm_counts(
    numbers: tuple[int, ...],
    case: Case,
    dtype: torch.dtype,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    of: Callable[[Inputs], Inputs] = lambda inputs: inputs,
) -> None:
    """The rule for plans of a GPU of each of these numbers of SMs; `of` changes what is drawn."""
    check_draws_on_sm_counts(
        numbers,
        lambda seed: of(make_inputs(case, dtype, backend.device, seed, draw_on=backend.device)),
        backend,
        monkeypatch,
        run=lambda inputs: run_ours(inputs, backend),
        answers=lambda inputs: answers_to(inputs, backend),
    )


def check_draws_on_sm_counts(
    numbers: tuple[int, ...],
    draw: Callable[[int], Inputs],
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Inputs], Result],
    answers: Callable[[Inputs], Answers],
) -> None:
    """The rule for what `run` makes of inputs on each, measured by the inputs' `answers`."""

    def run_on_each(inputs: Inputs) -> dict[int, Result]:
        results = {}
        for number in numbers:
            with monkeypatch.context() as patch:
                patch.setenv(SM_COUNT_SWITCH, str(number))
                results[number] = run(inputs)
        return results

    def errors(inputs: Inputs, results: dict[int, Result]) -> dict[str, Comparison]:
        those = answers(inputs)
        return {
            f"{name} on {number} SMs": comparison
            for number, result in results.items()
            for name, comparison in those.compare(result).items()
        }

    check_draws(draw, backend, run_on_each, errors)


def check_packed_drawn(
    case: PackedCase,
    draw: Callable[[int], Inputs],
    backend: Backend,
    present: Callable[[Inputs], Inputs] = lambda inputs: inputs,
) -> None:
    """check_drawn for packed sequences."""
    check_draws(
        draw,
        backend,
        run=lambda inputs: run_packed(case, present(inputs), backend),
        errors=lambda inputs, ours: compare_packed_with_pytorch(case, inputs, backend, ours),
    )


def answers_to_packed(case: PackedCase, inputs: Inputs, backend: Backend) -> Answers:
    """Exact is each sequence on its own, and PyTorch is the plain formula."""
    inputs = inputs.replace(differentiable=DIFFERENTIABLE)
    keep = dropout_bits(inputs.replace(case=case.padded()), backend) if case.base.dropout_p > 0 else None
    doubles = inputs.to(torch.float64)
    exact, yardstick = (run_by_sequence(case, each, keep=keep) for each in (doubles, inputs))
    yardstick["lse"] = run_by_sequence(case, inputs.to(accumulate_dtype(inputs.q.dtype)), keep=keep)["lse"]
    return Answers(exact, yardstick, largest_terms_packed(case, doubles, exact, keep))


def compare_packed_with_pytorch(
    case: PackedCase, inputs: Inputs, backend: Backend, ours: Result
) -> dict[str, Comparison]:
    check_results(inputs, ours)
    return answers_to_packed(case, inputs, backend).compare(ours)


def check_results(inputs: Inputs, result: Result) -> None:
    """What there has to be, in which dtype and shape."""
    assert result.keys() == {"out", "lse", *(f"d{name}" for name in inputs.leaves())}
    assert result["out"].dtype == inputs.q.dtype
    assert result["lse"].dtype == accumulate_dtype(inputs.q.dtype)
    for name in inputs.differentiable:
        tensor = getattr(inputs, name)
        if tensor is not None:
            assert result[f"d{name}"].dtype == tensor.dtype, f"d{name}"
            assert result[f"d{name}"].shape == tensor.shape, f"d{name}"
