"""Models of transformers in a few thousand random weights, and inputs for them. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BATCH, LENGTH, VOCAB = 3, 13, 61
PADDING = (0, 4, 9)  # of each row
BLOCKS = (((0, 7),), ((1, 3), (5, 11)), ())  # of each row, the tokens of each block
TEXT = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=None, eos_token_id=None)
LLAMA = dict(
    **TEXT,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
BERT = dict(
    TEXT,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=16,
    patch_size=4,
)
SLIDING = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])


@dataclass(frozen=True)
class TinyModel:
    """A class of transformers, how its configuration is made, and which inputs it takes: "text", "blocks" (text with
    tokens of images or of a prefix), "images" (the same by another name), "pair" (text in, text out), "audio", "image",
    or "image and text"."""

    model: str
    config: str
    options: dict = field(default_factory=dict)
    inputs: str = "text"
    generates: bool = False
    static_cache_since: tuple[int, int] = (0, 0)  # the release of transformers before which "eager" itself fails

    @property
    def takes_static_cache(self) -> bool:
        import transformers

        return tuple(map(int, transformers.__version__.split(".")[:2])) >= self.static_cache_since

    @property
    def has_text(self) -> bool:
        return self.inputs not in ("image", "audio")

    def build(self, implementation: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
        """The same weights for every implementation and dtype, large enough for attention to be uneven."""
        import transformers

        options = dict(self.options)
        for part in ("text_config", "vision_config"):
            if part in options:
                options[part] = dict(options[part])
        config = getattr(transformers, self.config)(**options)
        torch.manual_seed(0)
        model = getattr(transformers, self.model)._from_config(
            config, attn_implementation=implementation, experts_implementation="eager"
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                size = 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
                noise = size * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
        return model.to(device, dtype).eval()

    def make_inputs(self, side: str | None = None, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        """`side`: where rows have padding, "left" or "right"; None: they have none, and there is no mask."""
        generator = torch.Generator().manual_seed(seed)
        given = MAKE_INPUTS[self.inputs](self.options, generator)
        if side is not None and "input_ids" in given:
            mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
            for row, padding in enumerate(PADDING):
                if padding:
                    mask[row, slice(0, padding) if side == "left" else slice(-padding, None)] = 0
            given["input_ids"] = given["input_ids"] * mask
            given["attention_mask"] = mask
        return {name: tensor.to(device) for name, tensor in given.items()}


def _text(_, generator) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)}


def _blocks(_, generator) -> dict[str, Tensor]:
    types = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for row, blocks in enumerate(BLOCKS):
        for begin, end in blocks:
            types[row, begin:end] = 1
    return _text(_, generator) | {"token_type_ids": types}


def _images(options, generator) -> dict[str, Tensor]:
    given = _blocks(options, generator)
    return {"input_ids": given["input_ids"], "mm_token_type_ids": given["token_type_ids"]}


def _pair(_, generator) -> dict[str, Tensor]:
    return _text(_, generator) | {"decoder_input_ids": torch.randint(3, VOCAB, (BATCH, 7), generator=generator)}


def _audio(_, generator) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(BATCH, 8, 40, generator=generator),
        "decoder_input_ids": torch.randint(3, VOCAB, (BATCH, 7), generator=generator),
    }


def _image(_, generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}


def _image_and_text(_, generator) -> dict[str, Tensor]:
    return _image(_, generator) | _text(_, generator)


MAKE_INPUTS: dict[str, Callable] = {
    "text": _text,
    "blocks": _blocks,
    "images": _images,
    "pair": _pair,
    "audio": _audio,
    "image": _image,
    "image and text": _image_and_text,
}


def _decoder(family: str, **options) -> TinyModel:
    return TinyModel(f"{family}ForCausalLM", f"{family}Config", LLAMA | options, generates=True)


def _masked(family: str, **options) -> TinyModel:
    return TinyModel(f"{family}ForMaskedLM", f"{family}Config", BERT | options)


MODELS = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=5),
    "qwen3": _decoder("Qwen3", head_dim=8, use_sliding_window=True, **SLIDING),
    "gemma2": _decoder("Gemma2", head_dim=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=3, **SLIDING),
    "gemma3": TinyModel("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA | dict(head_dim=8, **SLIDING), generates=True),
    "gemma3 with images": TinyModel(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        dict(text_config=LLAMA | dict(head_dim=8, **SLIDING), vision_config=VISION, mm_tokens_per_image=4),
        inputs="blocks",
        generates=True,
        static_cache_since=(5, 20),
    ),
    "gemma3 both ways": TinyModel(
        "Gemma3TextModel", "Gemma3TextConfig", LLAMA | dict(head_dim=8, use_bidirectional_attention=True, **SLIDING)
    ),
    "llama4": TinyModel(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        LLAMA
        | dict(
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=2,
            moe_layers=[],
            attention_chunk_size=5,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 1],
            use_qk_norm=False,
        ),
        generates=True,
        static_cache_since=(5, 20),
    ),
    "hrm_text": TinyModel("HrmTextForCausalLM", "HrmTextConfig", LLAMA, inputs="blocks", generates=True),
    "paligemma": TinyModel(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        dict(
            text_config=LLAMA | dict(head_dim=8, model_type="gemma"),
            vision_config=VISION | dict(projection_dim=32, model_type="siglip_vision_model"),
            projection_dim=32,
            image_token_index=VOCAB - 1,
        ),
        inputs="blocks",
    ),
    "gemma4 with images": TinyModel(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        dict(
            text_config=LLAMA
            | dict(
                head_dim=8,
                global_head_dim=16,
                num_global_key_value_heads=2,
                hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=VOCAB,
                num_kv_shared_layers=0,
                use_bidirectional_attention="vision",
                **SLIDING,
            ),
            vision_config=VISION | dict(num_hidden_layers=1, num_key_value_heads=4, head_dim=8),
            audio_config=None,
        ),
        inputs="images",
    ),
    "gpt_oss": _decoder("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1, **SLIDING),
    "deepseek_v3": _decoder(
        "DeepseekV3",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "phi3": _decoder("Phi3", sliding_window=6),
    "gpt2": TinyModel(
        "GPT2LMHeadModel",
        "GPT2Config",
        TEXT | dict(n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        generates=True,
    ),
    "opt": TinyModel(
        "OPTForCausalLM",
        "OPTConfig",
        TEXT
        | dict(
            hidden_size=32,
            ffn_dim=48,
            word_embed_proj_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            dropout=0.0,
        ),
        generates=True,
    ),
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "modernbert": _masked(
        "ModernBert",
        local_attention=6,
        layer_types=["full_attention", "sliding_attention"],
        cls_token_id=1,
        sep_token_id=2,
    ),
    "t5gemma": TinyModel(
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        dict(
            encoder=LLAMA | dict(head_dim=8, query_pre_attn_scalar=3, **SLIDING),
            decoder=LLAMA | dict(head_dim=8, query_pre_attn_scalar=3, cross_attention_hidden_size=32, **SLIDING),
            vocab_size=VOCAB,
            dropout_rate=0.0,
            classifier_dropout_rate=0.0,
            decoder_start_token_id=1,
        ),
        inputs="pair",
    ),
    "t5": TinyModel(
        "T5ForConditionalGeneration",
        "T5Config",
        TEXT
        | dict(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
            decoder_start_token_id=1,
        ),
        inputs="pair",
        generates=True,
    ),
    "bart": TinyModel(
        "BartForConditionalGeneration",
        "BartConfig",
        TEXT
        | dict(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            dropout=0.0,
            eos_token_id=None,
            forced_eos_token_id=None,
            decoder_start_token_id=1,
        ),
        inputs="pair",
        generates=True,
    ),
    "whisper": TinyModel(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        TEXT
        | dict(
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=20,
            max_target_positions=64,
            dropout=0.0,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        inputs="audio",
        generates=True,
    ),
    "vit": TinyModel("ViTForImageClassification", "ViTConfig", VISION, inputs="image"),
    "clip": TinyModel(
        "CLIPModel",
        "CLIPConfig",
        dict(
            text_config=TEXT
            | dict(
                eos_token_id=2,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=64,
            ),
            vision_config=VISION,
            projection_dim=16,
        ),
        inputs="image and text",
    ),
    "siglip": TinyModel(
        "SiglipModel",
        "SiglipConfig",
        dict(
            text_config=TEXT
            | dict(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=64,
                projection_size=32,
            ),
            vision_config=VISION,
        ),
        inputs="image and text",
    ),
    "esm": _masked("Esm", mask_token_id=2, position_embedding_type="rotary", token_dropout=False),
}


class InFloat64(TorchFunctionMode):
    """Models compute some things in float32 whatever their dtype (norms, softmax): inside, these are float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def outputs_of(model: nn.Module, inputs: dict) -> dict[str, Tensor]:
    """What the model is for, without what it says of padding."""
    result = model(**inputs)
    outputs = {}
    for name in ("logits", "logits_per_image", "text_embeds", "image_embeds", "last_hidden_state"):
        if result.get(name) is not None:
            outputs[name] = result[name]
    mask = inputs.get("attention_mask")
    for name in ("logits", "last_hidden_state"):
        if mask is not None and name in outputs and outputs[name].shape[:2] == mask.shape:
            outputs[name] = outputs[name][mask.bool()]
    return outputs


def outputs_and_gradients(model: nn.Module, inputs: dict) -> dict[str, Tensor]:
    """Gradients of all weights (and of images and sound), for a fixed gradient of the outputs."""
    signals = {name: given for name, given in inputs.items() if isinstance(given, Tensor) and given.is_floating_point()}
    signals = {name: signal.to(model.dtype).requires_grad_() for name, signal in signals.items()}
    outputs = outputs_of(model, inputs | signals)
    loss = 0.0
    for tensor in outputs.values():
        weights = torch.linspace(-1, 1, tensor.numel(), dtype=torch.float64).cos().reshape(tensor.shape)
        loss = loss + (tensor * (5 * weights).sin().to(tensor.device, tensor.dtype)).sum()
    leaves = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad} | signals
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    given = {f"d {name}": grad for name, grad in zip(leaves, gradients, strict=True) if grad is not None}
    return {name: tensor.detach() for name, tensor in (outputs | given).items()}
