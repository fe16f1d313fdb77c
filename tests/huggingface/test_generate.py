"""Generation: greedily the same tokens as transformers' "eager", whatever the cache, without waiting for a GPU."""

import pytest
import torch

from support.models.tiny import MODELS

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
    if cache == "static" and not MODELS[name].takes_static_cache:
        pytest.skip('"eager" itself fails in this release of transformers')
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


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_a_text_that_comes_in_parts_is_the_whole_text(name, cache, device):
    """As a chat does: several queries over keys that are there already. Gradients are on."""
    import transformers

    model = MODELS[name].build("fused_ext", device=device)
    ids = MODELS[name].make_inputs(device=device)["input_ids"]
    room = {} if cache == "DynamicCache" else {"max_cache_len": 20}
    past = getattr(transformers, cache)(config=model.config, **room)
    parts = [model(input_ids=part, past_key_values=past).logits for part in ids.split([4, 5, 1, 3], dim=1)]
    whole = MODELS[name].build("eager", device=device)(input_ids=ids).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_that_are_guessed_from_the_prompt(name):
    tokens = []
    for implementation in ("eager", "fused_ext"):
        model = MODELS[name].build(implementation)
        ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
        given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        tokens.append(model.generate(**given, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3))
    assert torch.equal(*tokens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to wait for")
def test_one_query_waits_for_no_gpu():
    """Masks over dynamic and static caches, with padding, and the attention that reads them."""
    import types

    from flash_attn_ext.integrations.transformers.attention import fused_attention
    from flash_attn_ext.integrations.transformers.masks import fused_mask

    padding = torch.ones(2, 8, dtype=torch.bool, device="cuda")
    padding[1, :3] = False
    q, k, v = torch.randn(2, 4, 1, 16, device="cuda"), *torch.randn(2, 2, 2, 9, 16, device="cuda")
    position = torch.tensor(7, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_keys, offset in ((8, 7), (9, position)):
            mask = fused_mask(2, 1, num_keys, offset, attention_mask=padding, device="cuda")
            fused_attention(types.SimpleNamespace(), q, k[:, :, :num_keys], v[:, :, :num_keys], mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
