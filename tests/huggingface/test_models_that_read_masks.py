"""Models that cut, slice, join or reshape their masks before layers get them: outputs are those of "eager"."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from flash_attn_ext.integrations.transformers import register  # noqa: E402

TOKENS = dict(vocab_size=64, pad_token_id=0, initializer_range=0.2)
LAYERS = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=32, intermediate_size=32)
LAYER_TYPES = ["sliding_attention", "full_attention"]
IMAGES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=4)


def gemma4():
    config = transformers.Gemma4TextConfig(
        **TOKENS,
        **LAYERS | dict(num_hidden_layers=4),
        head_dim=16,
        global_head_dim=16,
        sliding_window=64,
        layer_types=LAYER_TYPES * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
    )
    return transformers.Gemma4ForCausalLM(config)


def pix2struct():
    config = dict(hidden_size=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, is_decoder=True)
    return transformers.Pix2StructTextModel(transformers.Pix2StructTextConfig(**TOKENS, **config))


def doge():
    return transformers.DogeForCausalLM(transformers.DogeConfig(**TOKENS, **LAYERS))


def t5gemma2():
    text = TOKENS | LAYERS | dict(head_dim=16, sliding_window=4, layer_types=LAYER_TYPES, query_pre_attn_scalar=16)
    encoder = dict(
        text_config=text, vision_config=IMAGES | dict(image_size=16), mm_tokens_per_image=4, image_token_index=63
    )
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=63)
    return transformers.T5Gemma2ForConditionalGeneration(config)


def siglip2():
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**IMAGES, num_patches=16))


def generate(model, ids, **inputs):
    model.generation_config.eos_token_id = None
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    return torch.stack(model.generate(input_ids=ids, **inputs, **options).logits)


def left_padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return mask


def of_the_encoder(ids):
    states = torch.randn(2, 7, 32)
    return dict(encoder_hidden_states=states, encoder_attention_mask=left_padded(ids[:, :7]))


def of_patches():
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    pixels = torch.randn(2, 16, 48)
    return dict(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=torch.tensor([[4, 4], [3, 4]]))


def generate_behind_padding(model, ids):
    return generate(model, ids, attention_mask=left_padded(ids))


def first_token_of_pix2struct(model, ids):
    return model(input_ids=ids[:, :1], **of_the_encoder(ids)).logits


CALLS = {
    "gemma4, the last logits": ("Gemma4ForCausalLM", gemma4, lambda model, ids: model(ids, logits_to_keep=2).logits),
    "gemma4, generate": ("Gemma4ForCausalLM", gemma4, generate),
    "pix2struct": ("Pix2StructTextModel", pix2struct, lambda model, ids: model(ids, **of_the_encoder(ids)).logits),
    "pix2struct, one token": ("Pix2StructTextModel", pix2struct, first_token_of_pix2struct),
    "doge, generate": ("DogeForCausalLM", doge, generate_behind_padding),
    "t5gemma2, generate": ("T5Gemma2ForConditionalGeneration", t5gemma2, generate),
    "siglip2, padded": ("Siglip2VisionModel", siglip2, lambda model, ids: model(**of_patches()).pooler_output),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_eager(name):
    class_name, build, call = CALLS[name]
    if not hasattr(transformers, class_name):
        pytest.skip(f"this transformers has no {class_name}")
    model = build().eval()
    register()
    outputs = {}
    for implementation in ("eager", "fused_ext"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(1)
        ids = torch.randint(3, 60, (2, 9))
        with torch.no_grad():
            outputs[implementation] = call(model, ids)
    torch.testing.assert_close(outputs["fused_ext"], outputs["eager"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["BigBirdPegasus", "DeepseekV4"])
def test_models_with_masks_of_their_own_are_refused(name):
    from flash_attn_ext.integrations.transformers.own_attention import refuse_own_attention

    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    with pytest.raises(ValueError, match="attn_implementation='fused_ext' does not reach its"):
        refuse_own_attention(config)
