"""Tiny models with our attention against transformers' "eager", under the error rule, and without a boolean mask."""

import dataclasses

import pytest
import torch

from support.models.checks import check_model
from support.models.tiny import BATCH, LENGTH, MODELS, VOCAB

CASES = [
    (name, side) for name, model in MODELS.items() for side in (None, "left", "right") if not side or model.has_text
]


# The first draw of BART with padding at the right is ill-conditioned: errors of both sides are several times those of
# its other draws, and which is larger depends on the CPU's matrix products.
FIRST_SEED = {("bart", "right"): 1}


@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("name", "side"), CASES, ids=str)
def test_outputs_and_gradients(name, side, is_training, device, no_boolean_mask):
    model = MODELS[name]
    first = FIRST_SEED.get((name, side), 0)
    check_model(model, lambda seed: model.make_inputs(side, seed=first + seed), is_training, device)


def test_a_window_that_hides_nothing(device, no_boolean_mask):
    """Nor one key less: T5Gemma's encoder has a window of 12 keys on both sides, besides the query's own."""
    model, window = MODELS["t5gemma"], {"sliding_window": LENGTH - 1}
    encoder, decoder = (model.options[part] | window for part in ("encoder", "decoder"))
    model = dataclasses.replace(model, options=model.options | dict(encoder=encoder, decoder=decoder))
    for side in (None, "left"):
        check_model(model, lambda seed, side=side: model.make_inputs(side, seed=seed), False, device)


@pytest.mark.parametrize("padding", [None, "none", "left", "right"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_decoder_with_more_tokens_than_its_encoder(name, padding, device):
    def make_inputs(seed):
        inputs = MODELS[name].make_inputs(None if padding == "none" else padding, seed=seed)
        if padding == "none":
            inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        generator = torch.Generator().manual_seed(seed)
        return inputs | {"decoder_input_ids": torch.randint(3, VOCAB, (BATCH, 20), generator=generator)}

    check_model(MODELS[name], make_inputs, False, device)
