"""Models whose masks are intervals, as they are used: cached, generated from, packed, and without a boolean mask."""

import pytest
import torch

from support.models.tiny import BATCH, LENGTH, MODELS, VOCAB

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

COMPOSED = ["llama4", "gemma3 with images", "hrm_text"]


def skip_unless_taken(name: str, cache: str | None) -> None:
    if cache in ("static", "StaticCache") and not MODELS[name].takes_static_cache:
        pytest.skip('"eager" itself fails in this release of transformers')


def texts(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", COMPOSED)
def test_a_forward_pass_has_no_boolean_mask(name, side, device, intervals_instead):
    MODELS[name].build("fused_ext", device=device)(**MODELS[name].make_inputs(side, device))


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", COMPOSED)
def test_generation_has_no_boolean_mask(name, cache, side, device, request):
    skip_unless_taken(name, cache)
    request.getfixturevalue("intervals_instead")
    model = MODELS[name].build("fused_ext", device=device)
    inputs = MODELS[name].make_inputs(side, device)
    model.generate(**inputs, max_new_tokens=3, do_sample=False, cache_implementation=cache, disable_compile=True)


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("parts", [[4, 5, 1, 3], [7, 6], [1, 12]], ids=str)
def test_chunks_of_a_text_that_comes_in_parts(parts, cache, device):
    """Parts begin and end inside chunks, and are longer than one."""
    model = MODELS["llama4"].build("fused_ext", device=device)
    room = {} if cache == "DynamicCache" else {"max_cache_len": 20}
    past = getattr(transformers, cache)(config=model.config, **room)
    ids = texts().to(device)
    given = [model(input_ids=part, past_key_values=past).logits for part in ids.split(parts, dim=1)]
    whole = MODELS["llama4"].build("eager", device=device)(input_ids=ids).logits
    torch.testing.assert_close(torch.cat(given, dim=1), whole, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", COMPOSED)
def test_parts_beside_eager(name, cache, device):
    """The same parts by "eager", with padding at the left."""
    skip_unless_taken(name, cache)
    logits = []
    inputs = MODELS[name].make_inputs("left", device)
    for implementation in ("eager", "fused_ext"):
        model = MODELS[name].build(implementation, device=device)
        room = {} if cache == "DynamicCache" else {"max_cache_len": 20}
        past = getattr(transformers, cache)(config=model.config, **room)
        found = []
        for begin, end in ((0, 7), (7, 9), (9, 10), (10, 13)):
            given = dict(input_ids=inputs["input_ids"][:, begin:end], attention_mask=inputs["attention_mask"][:, :end])
            if begin == 0 and "token_type_ids" in inputs:
                given["token_type_ids"] = inputs["token_type_ids"][:, :end]
            found.append(model(**given, past_key_values=past).logits)
        logits.append(torch.cat(found, 1)[inputs["attention_mask"].bool()])
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama4", "gemma3 with images"])
def test_packed_rows(name, device, intervals_instead):
    """transformers tells the mask function about sequences where there is neither an attention_mask nor a cache."""
    positions = torch.stack([torch.cat([torch.arange(4), torch.arange(9)]), torch.arange(13)])
    inputs = dict(input_ids=texts()[:2], position_ids=positions, use_cache=False)
    if name == "gemma3 with images":
        inputs["token_type_ids"] = torch.zeros(2, LENGTH, dtype=torch.int64)
        inputs["token_type_ids"][0, [1, 2, 6, 7, 8]] = 1
    inputs = {name: given.to(device) if isinstance(given, torch.Tensor) else given for name, given in inputs.items()}
    theirs, ours = (MODELS[name].build(kind, device=device)(**inputs).logits for kind in ("eager", "fused_ext"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("has_padding", [False, True])
def test_a_model_that_reads_its_composed_mask(has_padding, device):
    """It asks for no boolean mask. "eager" takes its own additive mask for a boolean one, so "sdpa" is compared."""
    if not hasattr(transformers, "NemotronAsrStreamingEncoder"):
        pytest.skip("transformers has no such model")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_mel_bins=16)
    shapes = dict(subsampling_conv_channels=8, subsampling_factor=4, sliding_window=4, default_num_lookahead_tokens=2)
    config = transformers.NemotronAsrStreamingEncoderConfig(**sizes, **shapes)
    torch.manual_seed(0)
    sound = torch.randn(2, 80, 16, device=device)
    lengths = torch.tensor([80, 50 if has_padding else 80])
    mask = (torch.arange(80) < lengths[:, None]).long().to(device)
    outputs = []
    for implementation in ("sdpa", "fused_ext"):
        torch.manual_seed(1)
        model = transformers.NemotronAsrStreamingEncoder._from_config(config, attn_implementation=implementation)
        result = model.to(device).eval()(input_features=sound, attention_mask=mask)
        outputs.append(result.last_hidden_state[result.attention_mask.bool()])
    torch.testing.assert_close(*outputs, atol=2e-4, rtol=2e-4)
