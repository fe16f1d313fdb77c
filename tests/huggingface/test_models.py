"""Tiny models with our attention against transformers' "eager", under the error rule."""

import pytest
import torch

from support.errors import assert_rule, compare, scale_of
from support.tiny_models import MODELS, InFloat64, outputs_and_gradients

# What adding one number to all scores of a row does is nothing, so the gradient of a key's bias cancels to nothing.
CANCELS = ("k_proj.bias", "key.bias")


def compare_models(model, inputs, is_training: bool, device: str = "cpu"):
    answers = {}
    for name, implementation, dtype in (
        ("exact", "eager", torch.float64),
        ("theirs", "eager", torch.float32),
        ("ours", "fused_ext", torch.float32),
    ):
        built = model.build(implementation, dtype, device).train(is_training)
        if name == "exact":
            with InFloat64():
                answers[name] = outputs_and_gradients(built, inputs)
        else:
            answers[name] = outputs_and_gradients(built, inputs)
    ours, theirs, exact = answers["ours"], answers["theirs"], answers["exact"]
    assert ours.keys() == theirs.keys() == exact.keys()
    comparisons = {}
    for name, answer in ours.items():
        terms = scale_of(exact[name.replace(".bias", ".weight")]) if name.endswith(CANCELS) else 0.0
        comparisons[name] = compare(answer, theirs[name], exact[name], terms)
    return comparisons


CASES = [
    (name, side) for name, model in MODELS.items() for side in (None, "left", "right") if side is None or model.has_text
]


@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("name", "side"), CASES, ids=lambda value: str(value))
def test_outputs_and_gradients(name, side, is_training):
    model = MODELS[name]
    assert_rule(compare_models(model, model.make_inputs(side), is_training))
