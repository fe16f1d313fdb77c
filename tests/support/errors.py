"""The error rule of flash_attn_ext/cli/error_rule.py, applied to results of tests.

Some gradients cancel to nothing in exact arithmetic (that of a bias which is constant along a row; q's where a query
sees one key). Such an output has no scale of its own: it gets the scale of the terms that cancel.
"""

from collections.abc import Callable

import torch

from flash_attn_ext.cli.error_rule import Comparison, Errors, errors_of, scale_of, slack_share
from support.backends import Backend

# Of a float32 result's scale: what two answers of ours may differ by on a GPU, where other code made each.
FLOAT32_DIFFERENCE = 2e-5
CANCELLED = 1e-3  # an output below this fraction of its terms
# The largest error of a small tensor is that of one element, which PyTorch may have by luck and we may not.
REDRAWS = 8


def own_scale(exact: torch.Tensor, terms: float) -> float:
    """That of the terms where they cancel."""
    scale = scale_of(exact)
    return terms if scale < CANCELLED * terms else scale


def rounding_of_a_copy(dtype: torch.dtype, backend: Backend) -> float:
    """The relative error of a product with exactly 1.

    None, except in float32 on a GPU: there a factor is the sum of two TF32 numbers of 11 bits each, and its last two
    bits are lost.
    """
    return 2.0**-21 if dtype == torch.float32 and not backend.is_cpu else 0.0


def assert_same_answer(
    result: torch.Tensor, expected: torch.Tensor, backend: Backend, name: str, where=..., terms: float = 0.0
) -> None:
    """Two calls of ours that have one exact answer; NaN is in neither. `where`: the elements that are compared, and
    `terms`: the largest sum of absolute terms of an element, where these cancel.

    On a GPU the two may come from different code. A row in which a tensor-core product met NaN is computed again
    without tensor cores (csrc/kernels/common/rows/attention_rows.cuh), so

    - in 16 bits its P and dS are not rounded before the second product, and the delta of other kernels reads an out
      that rounded differently: up to eps / 2 of each weight and of out, hence of the result's scale, not of an element;
    - in float32 products, tanh and exp2 are other ones: FLOAT32_DIFFERENCE.
    """
    options = {}
    scale = own_scale(expected, terms)
    if not backend.is_cpu and result.dtype.itemsize == 2:
        eps = torch.finfo(result.dtype).eps
        options = dict(rtol=2 * eps, atol=eps * scale)
    elif not backend.is_cpu and result.dtype == torch.float32:
        options = dict(rtol=1.3e-6, atol=max(1e-5, FLOAT32_DIFFERENCE * scale))
    result, expected = result[where], expected[where]
    # -inf is the LSE of a row without keys.
    assert not bool((result.isnan() | result.isposinf()).any()), f"{name}: NaN or Inf"
    torch.testing.assert_close(result, expected, **options, msg=lambda text: f"{name}: {text}")


def slack_of(result: torch.Tensor, exact: torch.Tensor) -> float:
    """What is allowed on top of the yardstick, for a result that has a scale of its own."""
    return slack_share(result) * scale_of(exact)


def compare(result: torch.Tensor, yardstick: torch.Tensor, exact: torch.Tensor, terms: float = 0.0) -> Comparison:
    """`yardstick` is PyTorch's answer in the same dtype, `terms` the largest sum of absolute terms of an element."""
    slack = slack_share(result) * own_scale(exact, terms)
    return Comparison(errors_of(result, exact), errors_of(yardstick, exact), slack)


def pooled(draws: list[dict[str, Comparison]]) -> dict[str, Comparison]:
    """As if the outputs of all draws of one problem were one tensor."""

    def together(errors: list[Errors]) -> Errors:
        return Errors(max(e.largest for e in errors), sum(e.mean for e in errors) / len(errors))

    return {
        name: Comparison(
            together([draw[name].ours for draw in draws]),
            together([draw[name].theirs for draw in draws]),
            max(draw[name].slack for draw in draws),
        )
        for name in draws[0]
    }


def assert_rule_over_draws(compare_draw: Callable[[int], dict[str, Comparison]]) -> None:
    """The rule for draw 0. Where it breaks the rule, for the errors of several draws together."""
    draws = [compare_draw(0)]
    if not all(comparison.keeps_rule() for comparison in draws[0].values()):
        draws += [compare_draw(seed) for seed in range(1, 1 + REDRAWS)]
    assert_rule(pooled(draws))


def assert_rule(comparisons: dict[str, Comparison]) -> None:
    broken = []
    for name, c in comparisons.items():
        for kind in ("largest", "mean"):
            ours, theirs, allowed = (getattr(errors, kind) for errors in (c.ours, c.theirs, c.allowed()))
            if not ours <= allowed:
                because = f"PyTorch {theirs:.3g}, slack {c.slack:.3g}"
                broken.append(f"{name}: {kind} error {ours:.3g}, allowed {allowed:.3g} ({because})")
    assert not broken, "; ".join(broken)
