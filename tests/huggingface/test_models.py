"""Tiny models with our attention against transformers' "eager", under the error rule."""

import pytest

from support.models.checks import check_model
from support.models.tiny import MODELS

CASES = [
    (name, side) for name, model in MODELS.items() for side in (None, "left", "right") if not side or model.has_text
]


@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("name", "side"), CASES, ids=str)
def test_outputs_and_gradients(name, side, is_training, device):
    model = MODELS[name]
    check_model(model, lambda seed: model.make_inputs(side, seed=seed), is_training, device)
