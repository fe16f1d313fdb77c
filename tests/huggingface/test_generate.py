"""Greedy generation token by token: the same tokens as transformers' "eager", and nobody waits for the device."""

import pytest
import torch

from support.tiny_models import MODELS

NEW_TOKENS = 9  # past the windows of all models
GENERATING = [name for name, model in MODELS.items() if model.generates]


def generate(name: str, implementation: str, side: str | None, cache: str | None, device: str = "cpu", **options):
    model = MODELS[name]
    inputs = model.make_inputs(side, device)
    inputs.pop("decoder_input_ids", None)
    built = model.build(implementation, device=device)
    # transformers compiles by itself on a GPU where the cache is static; that is test_compile.py's.
    return built.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_greedy_tokens_are_those_of_eager(name, cache, side):
    theirs = generate(name, "eager", side, cache)
    ours = generate(name, "fused_ext", side, cache)
    assert ours.sequences.shape[1] >= NEW_TOKENS
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("options", [dict(num_beams=2), dict(prefill_chunk_size=5)], ids=["beams", "prefill in chunks"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_beams_and_prompts_in_chunks(name, cache, options):
    theirs = generate(name, "eager", "left", cache, **options)
    assert torch.equal(generate(name, "fused_ext", "left", cache, **options).sequences, theirs.sequences)
