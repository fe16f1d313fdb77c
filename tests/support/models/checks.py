"""A tiny model with our attention against the same with transformers' "eager", and against that in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from support.errors import Comparison, assert_rule_over_draws, compare, scale_of
from support.models.tiny import InFloat64, TinyModel, outputs_and_gradients

# What adding one number to all scores of a row does is nothing, so the gradient of a key's bias cancels to nothing.
CANCELS = ("k_proj.bias", "key.bias")


def check_model(
    model: TinyModel,
    make_inputs: Callable[[int], dict],
    is_training: bool,
    device: str = "cpu",
    **ours,
) -> None:
    """Outputs and all gradients, by the error rule. `make_inputs` takes a seed; `ours` goes to our side too."""
    assert_rule_over_draws(lambda seed: compare_models(model, make_inputs(seed), is_training, device, ours))


def compare_models(model: TinyModel, inputs: dict, is_training: bool, device: str, ours: dict) -> dict[str, Comparison]:
    inputs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}

    def answers(implementation: str, dtype: torch.dtype, more: dict) -> dict[str, torch.Tensor]:
        built = model.build(implementation, dtype, device).train(is_training)
        return outputs_and_gradients(built, inputs | more)

    with InFloat64():
        exact = answers("eager", torch.float64, {})
    theirs, results = answers("eager", torch.float32, {}), answers("fused_ext", torch.float32, ours)
    assert results.keys() == theirs.keys() == exact.keys()
    comparisons = {}
    for name, result in results.items():
        terms = scale_of(exact[name.replace(".bias", ".weight")]) if name.endswith(CANCELS) else 0.0
        comparisons[name] = compare(result, theirs[name], exact[name], terms)
    return comparisons
