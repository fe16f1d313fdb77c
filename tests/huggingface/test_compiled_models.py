"""torch.compile of whole models, without a graph break, and of the decoding step of generate()."""

import pytest
import torch

from support.models.tiny import MODELS, outputs_and_gradients

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "llama4"])
def test_outputs_and_gradients(name, side):
    """Without a mask, compiled causal models see position_ids that may be packed: their values are unknown there."""
    inputs = MODELS[name].make_inputs(side)
    model = MODELS[name].build("fused_ext").train()
    model.config.use_cache = False
    expected = outputs_and_gradients(model, inputs)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    given = outputs_and_gradients(model, inputs)
    assert given.keys() == expected.keys()
    for output, tensor in given.items():
        scale = float(expected[output].abs().max())
        torch.testing.assert_close(tensor, expected[output], atol=2e-5 * scale, rtol=2e-5, msg=output)


def test_chunks_of_packed_rows(monkeypatch):
    """They are packed sequences, which takes no boolean mask."""
    from flash_attn_ext.integrations.transformers import masks

    def refuse(request):
        raise AssertionError("a boolean mask")

    monkeypatch.setattr(masks, "dense", refuse)
    inputs = MODELS["llama4"].make_inputs()
    inputs["position_ids"] = torch.cat([torch.arange(4), torch.arange(9)]).expand(3, -1)
    expected = MODELS["llama4"].build("eager")(**inputs, use_cache=False).logits
    model = MODELS["llama4"].build("fused_ext")
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_decoding_with_a_static_cache(name):
    from transformers import CompileConfig

    model, inputs = MODELS[name].build("fused_ext"), MODELS[name].make_inputs("left")
    options = dict(**inputs, max_new_tokens=4, do_sample=False)
    expected = model.generate(**options)
    compiled = CompileConfig(backend="aot_eager", fullgraph=True, mode=None, dynamic=False)
    compiled._compile_all_devices = True
    tokens = model.generate(**options, cache_implementation="static", compile_config=compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert torch.equal(tokens, expected)


def test_rows_of_one_token():
    """Whose positions may be packed, as far as a compiler can see."""
    ids = torch.tensor([[5], [7]])
    model = MODELS["llama"].build("fused_ext")
    expected = model(input_ids=ids, use_cache=False).logits
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
