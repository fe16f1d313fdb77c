"""Which masks the layers of each architecture get, and that making them takes linear memory, at 8192 tokens.

Values at few tokens: test_models.py and test_packing.py. Attention itself is left out here, or it would take minutes.
"""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from flash_attn_ext.masks import converters
from support.largest_tensor import largest_of
from support.models.tiny import MODELS, VOCAB

TOKENS = 8192
LIMIT = TOKENS * TOKENS // 2  # bytes. A boolean mask has one for each pair. The largest other tensor has 16 MiB.
LENGTHS = ("max_position_embeddings", "n_positions")


class Forms(NamedTuple):
    """What `attention` gets of the masks of all layers, or that sequences are packed: without padding, with padding on
    the left, and where position_ids begin again. None: the model is not causal, or keeps no sequences apart."""

    plain: set[str]
    padded: set[str]
    packed: set[str] | None = None


CAUSAL = Forms({"causal"}, {"causal flags"}, {"packed"})
CAUSAL_WINDOW = Forms({"causal window"}, {"causal window flags"}, {"packed window"})
BOTH = Forms(*(one | other for one, other in zip(CAUSAL, CAUSAL_WINDOW, strict=True)))
INTERVALS = Forms(*[{"intervals"}] * 3)
WITH_INTERVALS = Forms(*(forms | {"intervals"} for forms in CAUSAL))
BOTH_WAYS = Forms({"everything"}, {"flags"})
FORMS = {
    "llama": CAUSAL,
    "deepseek_v3": CAUSAL,
    "gpt2": CAUSAL,
    "opt": CAUSAL,
    "mistral": CAUSAL_WINDOW,
    "phi3": CAUSAL_WINDOW,
    "qwen3": BOTH,
    "gemma2": BOTH,  # with a softcap
    "gemma3": BOTH,
    "gpt_oss": BOTH,  # with sinks
    "llama4": WITH_INTERVALS,  # of chunks
    "gemma3 with images": INTERVALS,
    "gemma4 with images": WITH_INTERVALS,
    "gemma3 both ways": INTERVALS._replace(packed=None),  # by a function of the model's own
    "hrm_text": INTERVALS,  # a prefix
    "paligemma": INTERVALS,
    "bert": BOTH_WAYS,
    "roberta": BOTH_WAYS,
    "esm": BOTH_WAYS,
    "modernbert": Forms({"everything", "window"}, {"flags", "window flags"}),
    "bart": Forms({"causal", "everything"}, {"causal", "flags"}),
    "t5gemma": Forms(
        {"causal", "causal window", "everything", "window"}, {"causal", "causal window", "flags", "window flags"}
    ),
}
PREFIXES = ("hrm_text", "paligemma")


def build(name: str) -> torch.nn.Module:
    model = MODELS[name]
    return dataclasses.replace(model, options=_lengthened(model.options)).build("fused_ext")


def _lengthened(options: dict) -> dict:
    changed = {name: TOKENS + 8 if name in LENGTHS else value for name, value in options.items()}
    return {name: _lengthened(value) if isinstance(value, dict) else value for name, value in changed.items()}


def make_inputs(name: str, form: str) -> dict:
    model = MODELS[name]
    at = torch.arange(TOKENS)[None]
    given = {"input_ids": 3 + at % (VOCAB - 4)}
    if form == "padded":
        given["attention_mask"] = (at >= TOKENS // 3).long()
    if form == "packed":
        given |= {"position_ids": at % (TOKENS // 3), "use_cache": False}
    types = at < 300 if name in PREFIXES else at % 1000 < 300
    if model.inputs in ("blocks", "images"):
        given["token_type_ids" if model.inputs == "blocks" else "mm_token_type_ids"] = types.long()
    if model.inputs == "pair":
        given["decoder_input_ids"] = given["input_ids"][:, : TOKENS // 2]
    return given


@pytest.fixture
def forms(monkeypatch) -> set[str]:
    """What the layers pass to `attention` and `attention_varlen`, which are not computed."""
    from flash_attn_ext.integrations.transformers import attention

    found = set()

    def dense(q, k, v, **options):
        parts = ["causal"] * (options["causal"] is not None) + ["window"] * (options["window"] is not None)
        parts += ["intervals"] * (options["intervals"] is not None)
        if options["mask"] is not None:
            parts.append("pairs" if options["mask"].shape[2] > 1 else "flags")
        found.add(" ".join(parts) or "everything")
        return q.new_zeros(*q.shape[:3], v.shape[3])

    def varlen(q, k, v, *lengths, **options):
        found.add("packed" + " window" * (options["window"] is not None))
        return q.new_zeros(*q.shape[:2], v.shape[2])

    monkeypatch.setattr(attention, "attention", dense)
    monkeypatch.setattr(attention, "attention_varlen", varlen)
    return found


@pytest.mark.parametrize("form", Forms._fields)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, form, forms, monkeypatch):
    expected = getattr(FORMS[name], form)
    if expected is None:
        pytest.skip("no packed rows: see Forms")
    monkeypatch.setattr(converters, "BLOCK_PAIRS", 2**20)  # of a function of the model's own
    model, given = build(name), make_inputs(name, form)
    with torch.no_grad():
        largest = largest_of(lambda: model(**given))
    assert forms == expected
    assert largest <= LIMIT
