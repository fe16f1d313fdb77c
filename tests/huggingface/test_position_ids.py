"""Packed sequences that only position_ids tell apart, where transformers does not look: beside an attention_mask, and
with a cache. Each sequence is what "eager" makes of it alone; what cannot be told apart is refused."""

import pytest
import torch

from support.models.packing import PADDING, PackedRows, assert_same, each_alone, logits_and_gradients
from support.models.tiny import LLAMA, MODELS, TinyModel, outputs_and_gradients

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TWO_ROWS = ((range(4), range(1), range(8)), (range(7), range(6)))
PACKED = {
    "a mask of ones": PackedRows(TWO_ROWS),
    "a boolean mask": PackedRows(TWO_ROWS, mask=torch.bool),
    "a float mask": PackedRows(TWO_ROWS, mask=torch.float32),
    "no mask": PackedRows(TWO_ROWS, mask=None),
    "one row": PackedRows(TWO_ROWS[:1]),
    "one row and a plain one": PackedRows((TWO_ROWS[0], (range(13),))),
    "padding on the right": PackedRows(((range(4), range(6), (PADDING, 3)), (range(9), (PADDING, 4)))),
    "padding on the left": PackedRows((((PADDING, 3), range(4), range(6)), (range(6), range(7))), padding_position=0),
    "padding at both ends": PackedRows((((PADDING, 2), range(4), range(5), (PADDING, 2)), (range(6), range(7)))),
    "padding between": PackedRows(((range(4), (PADDING, 2), range(7)), (range(6), range(7)))),
    "padding as tokens go on": PackedRows(((range(4), range(6), (PADDING, 3)),), padding_position=6),
    "one token each": PackedRows(((range(1), range(1), range(1), range(10)),)),
    "a first position of 2": PackedRows(((range(2, 6), range(2, 3), range(2, 10)),)),
    "a part of a text": PackedRows(((range(20, 25), range(8)),)),
    "a part that begins above the first": PackedRows(((range(7), range(3, 9)),)),
}
NAMES = ["llama", "mistral", "qwen3", "gemma2", "gpt_oss", "gpt2", "phi3", "deepseek_v3"]
CACHES = ["none", "dynamic", "static"]


def with_cache(kind: str, model, length: int) -> dict:
    if kind == "none":
        return {"use_cache": False}
    if kind == "dynamic":
        return {"use_cache": True}
    return {"past_key_values": transformers.StaticCache(config=model.config, max_cache_len=length)}


def check(name: str, packed: PackedRows, cache: str, device: str) -> None:
    model = MODELS[name].build("fused_ext", device=device)
    inputs = packed.inputs(device)
    given = logits_and_gradients(model, packed, inputs | with_cache(cache, model, 13))
    assert_same(given, each_alone(MODELS[name], packed, device, is_training=False))


@pytest.mark.parametrize("cache", CACHES[:2])
@pytest.mark.parametrize("form", PACKED)
def test_each_sequence_is_alone(form, cache, device):
    check("gemma2", PACKED[form], cache, device)  # a layer with a window and one without


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("form", ["a mask of ones", "padding at both ends"])
@pytest.mark.parametrize("name", NAMES)
def test_models_and_caches(name, form, cache, device):
    check(name, PACKED[form], cache, device)


UNTOLD = TinyModel("PersimmonForCausalLM", "PersimmonConfig", LLAMA | dict(num_key_value_heads=4))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("form", ["a mask of ones", "padding at both ends"])
def test_a_model_whose_layers_do_not_get_them(form, cache, device):
    """The mask function looks at them for these."""
    packed = PACKED[form]
    model = UNTOLD.build("fused_ext", device=device)
    given = logits_and_gradients(model, packed, packed.inputs(device) | with_cache(cache, model, 20))
    assert_same(given, each_alone(UNTOLD, packed, device, is_training=False))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_transformers_itself_mixes_them(implementation):
    """Why position_ids are looked at here. When this fails, transformers has mended it."""
    packed = PACKED["a mask of ones"]
    model = MODELS["llama"].build(implementation)
    given = logits_and_gradients(model, packed, packed.inputs() | {"use_cache": False})["logits"]
    assert (given - each_alone(MODELS["llama"], packed, is_training=False)["logits"]).abs().max() > 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, device):
    packed = PACKED["padding on the right"]
    model = MODELS["llama"].build("fused_ext", device=device).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    logits = model(**packed.inputs(device), use_cache=False).logits
    assert_same(gradients_of(model, packed, logits), each_alone(MODELS["llama"], packed, device))


def gradients_of(model, packed, logits) -> dict:
    """By backward(), the only way for reentrant checkpoints."""
    outputs = torch.cat([logits[row, tokens] for row, tokens in packed.sequences()])
    weights = torch.linspace(-9, 9, outputs.numel(), device=outputs.device).sin().view_as(outputs)
    (outputs * weights).sum().backward()
    found = {f"d {name}": leaf.grad for name, leaf in model.named_parameters() if leaf.grad is not None}
    return {"logits": outputs.detach()} | found


def test_positions_may_come_once_for_all_rows(device):
    """(1, tokens), as models make them."""
    packed = PackedRows((TWO_ROWS[0], TWO_ROWS[0]))
    model, inputs = MODELS["llama"].build("fused_ext", device=device), packed.inputs(device)
    given = logits_and_gradients(model, packed, inputs | {"position_ids": inputs["position_ids"][:1]})
    assert_same(given, each_alone(MODELS["llama"], packed, device, is_training=False))


def test_other_positions_in_the_same_tensor():
    """Answers are kept for the layers of a forward pass, and a tensor may be written to between two."""
    first, second = PackedRows(((range(4), range(9)),)), PackedRows(((range(9), range(4)),))
    expected = [each_alone(MODELS["llama"], packed, is_training=False)["logits"] for packed in (first, second)]
    model, inputs = MODELS["llama"].build("fused_ext"), first.inputs()
    assert torch.equal(inputs["input_ids"], second.inputs()["input_ids"])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            given = {name: tensor.clone() for name, tensor in inputs.items()}
            for packed, exact in zip((first, second), expected, strict=True):
                given["position_ids"].copy_(packed.inputs()["position_ids"])
                torch.testing.assert_close(model(**given).logits[0], exact, atol=1e-4, rtol=1e-4)


ORDINARY = {
    "left padding, ones": ((PADDING, 4), range(9), 1),
    "left padding, zeros": ((PADDING, 4), range(9), 0),
    "left padding, below zero": ((PADDING, 4), range(9), -1),
    "left padding, above all": ((PADDING, 4), range(9), 50),
    "left padding, counted from 4": ((PADDING, 4), range(4, 13), 0),
    "right padding, ones": (range(9), (PADDING, 4), 1),
    "right padding, zeros": (range(9), (PADDING, 4), 0),
    "right padding, the last again": (range(9), (PADDING, 4), 8),
    "a leap": (range(5), range(9, 17), 0),
    "one position for all": ([3] * 13, 0),
    "a picture has one position": ([0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 6, 7, 8], 0),
    "padding inside, counted on": (range(5), (PADDING, 3), range(5, 10), 0),
    "padding inside, counted too": (range(5), (PADDING, 3), range(8, 13), 0),
}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("form", ORDINARY)
def test_ordinary_rows_are_not_taken_for_packed(form, use_cache, monkeypatch, device):
    from flash_attn_ext.integrations.transformers import attention

    def refuse(*_, **__):
        raise AssertionError("an ordinary row was taken for a packed one")

    monkeypatch.setattr(attention, "attention_varlen", refuse)
    *row, padding_position = ORDINARY[form]
    inputs = PackedRows((tuple(row), (range(13),)), padding_position=padding_position).inputs(device)
    given, expected = (
        outputs_and_gradients(MODELS["gemma2"].build(implementation, device=device), inputs | {"use_cache": use_cache})
        for implementation in ("fused_ext", "eager")
    )
    assert_same(given, expected)


def test_a_text_in_parts_is_not_taken_for_packed(device):
    """Chunks of a prompt with padding on the left: each goes on where the one before it ended."""
    expected = MODELS["llama"].make_inputs("left", device)
    mask = expected["attention_mask"]
    position_ids = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    whole = MODELS["llama"].build("eager", device=device)(**expected, position_ids=position_ids).logits
    model = MODELS["llama"].build("fused_ext", device=device)
    past, parts = transformers.DynamicCache(config=model.config), []
    for start, end in ((0, 5), (5, 9), (9, 13)):
        given = dict(input_ids=expected["input_ids"][:, start:end], attention_mask=mask[:, :end])
        parts.append(model(**given, position_ids=position_ids[:, start:end], past_key_values=past).logits)
    kept = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[kept], whole[kept], atol=2e-4, rtol=2e-4)


def test_generate_with_position_ids_of_its_own(device):
    inputs = MODELS["llama"].make_inputs("left", device)
    mask = inputs["attention_mask"]
    for padding in (0, 1):
        position_ids = (mask.cumsum(1) - 1).masked_fill(mask == 0, padding)
        theirs, ours = (
            MODELS["llama"]
            .build(implementation, device=device)
            .generate(**inputs, position_ids=position_ids, max_new_tokens=5, do_sample=False)
            for implementation in ("eager", "fused_ext")
        )
        assert torch.equal(ours, theirs)


def test_a_mask_of_the_users_own_rules(device):
    """A tree: both continuations of a beginning see it, and not each other."""
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 3, 4, 5]], device=device)
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    mask[5:, 3:5] = False
    added = torch.zeros(1, 1, 8, 8, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    inputs = dict(input_ids=torch.arange(3, 11, device=device)[None], position_ids=position_ids, use_cache=False)
    expected = MODELS["llama"].build("eager", device=device)(**inputs, attention_mask=added).logits
    model = MODELS["llama"].build("fused_ext", device=device)
    for given in (mask[None, None], added):
        torch.testing.assert_close(model(**inputs, attention_mask=given).logits, expected, atol=1e-4, rtol=1e-4)


def test_cumulative_lengths_rule(device):
    """They may join what position_ids take apart."""
    inputs = PACKED["one row"].inputs(device)
    lengths = torch.tensor([0, 5, 13], dtype=torch.int32, device=device)
    given = dict(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=8, max_length_k=8)
    logits = MODELS["llama"].build("fused_ext", device=device)(**inputs, **given).logits
    alone = MODELS["llama"].build("eager", device=device)
    parts = [
        alone(inputs["input_ids"][:, part], attention_mask=ones, position_ids=inputs["position_ids"][:, part]).logits
        for part, ones in ((slice(0, 5), torch.ones(1, 5)), (slice(5, 13), torch.ones(1, 8)))
    ]
    torch.testing.assert_close(logits, torch.cat(parts, 1), atol=1e-4, rtol=1e-4)


def text_model_with_three_positions(implementation: str, device: str):
    config = transformers.Qwen2VLConfig(
        text_config=dict(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        )
    ).text_config
    torch.manual_seed(0)
    return transformers.Qwen2VLTextModel._from_config(config, attn_implementation=implementation).to(device).eval()


@pytest.mark.parametrize("mask", [torch.int64, None])
def test_positions_of_pictures(mask, device):
    """Three rows of positions say nothing of sequences: those of a picture fall where none begins. A fourth row, which
    comes first, does."""
    packed = PackedRows((TWO_ROWS[0],), mask=mask)
    inputs = packed.inputs(device)
    three = inputs.pop("position_ids").expand(3, 1, 13).clone()
    three[1:, :, 6:9] = torch.tensor([[9, 9, 7], [3, 8, 3]], device=device)[:, None]
    plain = torch.arange(13, device=device).expand(1, 1, 13)
    model = text_model_with_three_positions("fused_ext", device)
    eager = text_model_with_three_positions("eager", device)

    def states(of, position_ids, tokens=slice(None), **given):
        ids = inputs["input_ids"][:, tokens]
        return of(input_ids=ids, position_ids=position_ids[..., tokens], use_cache=False, **given).last_hidden_state

    given = {name: tensor for name, tensor in inputs.items() if name == "attention_mask"}
    for position_ids in (three, torch.cat([plain, three])):
        torch.testing.assert_close(
            states(model, position_ids, **given), states(eager, position_ids), atol=1e-4, rtol=1e-4
        )
    text = torch.cat([PackedRows((TWO_ROWS[0],)).inputs(device)["position_ids"][None], three])
    alone = [states(eager, text, tokens) for _, tokens in packed.sequences()]
    torch.testing.assert_close(states(model, text, **given), torch.cat(alone, 1), atol=1e-4, rtol=1e-4)


REFUSED = {
    "a cache holds 3 keys from before": "cache",
    "a sequence has padding between its tokens": "gap",
    "the layer's mask is neither causality, a window nor padding alone": "chunks",
    "the layer is not causal": "encoder",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_told_apart_is_refused(reason):
    inputs = PACKED["one row"].inputs() | {"use_cache": False}
    model = MODELS["llama"].build("fused_ext")
    if REFUSED[reason] == "cache":
        inputs["past_key_values"] = transformers.DynamicCache(config=model.config)
        model(input_ids=torch.tensor([[3, 4, 5]]), past_key_values=inputs["past_key_values"])
        inputs |= {"use_cache": True, "attention_mask": torch.ones(1, 16, dtype=torch.long)}
    if REFUSED[reason] == "gap":
        inputs["attention_mask"][0, 8] = 0
    if REFUSED[reason] == "chunks":
        model = MODELS["llama4"].build("fused_ext")
    if REFUSED[reason] == "encoder":
        model.config.is_causal = False
    with pytest.raises(ValueError, match=f"position_ids begin again at token 4 of row 0.*{reason}: leave out"):
        model(**inputs)


def test_chunks_take_padding_on_the_left():
    inputs = PackedRows((((PADDING, 4), range(9)), (range(13),))).inputs() | {"use_cache": False}
    given, expected = (
        outputs_and_gradients(MODELS["llama4"].build(implementation), inputs)
        for implementation in ("fused_ext", "eager")
    )
    assert_same(given, expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "backend"), [("llama", "aot_eager"), ("gemma2", "aot_eager"), ("llama", "inductor")])
def test_compiled_models_refuse_them_beside_a_mask(name, backend, device):
    """Values cannot be read there, so the question is asked as the graph runs. Ordinary rows run."""
    model = MODELS[name].build("fused_ext", device=device)
    model.config.use_cache = False
    forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    plain = PackedRows((((PADDING, 4), range(9)), (range(13),))).inputs(device)
    kept = plain["attention_mask"].bool()
    with torch.set_grad_enabled(backend != "inductor"):  # which would compile a backward pass that nothing asks for
        torch.testing.assert_close(forward(**plain).logits[kept], model(**plain).logits[kept], atol=1e-4, rtol=1e-4)
        if device == "cpu":  # a GPU has to be left alone after an assertion
            with pytest.raises(RuntimeError, match="position_ids begin again, as those of packed sequences do"):
                forward(**PACKED["a mask of ones"].inputs(device))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_compiled_models_keep_them_apart_without_a_mask(name, device):
    packed = PACKED["no mask"]
    model = MODELS[name].build("fused_ext", device=device)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    given = logits_and_gradients(model, packed, packed.inputs(device) | {"use_cache": False})
    assert_same(given, each_alone(MODELS[name], packed, device, is_training=False))
