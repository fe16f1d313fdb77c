"""Sequences that lie one after the other in a row: by position_ids only, and by a collator's cumulative lengths."""

import pytest
import torch

from support.models.checks import check_model
from support.models.tiny import MODELS, VOCAB

LENGTHS = ((4, 1, 8), (7, 6))  # of each row


def packed_rows(rows, seed: int) -> dict:
    positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]
    ids = torch.randint(3, VOCAB, (len(rows), sum(rows[0])), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "position_ids": torch.stack(positions), "use_cache": False}


# Of gpt_oss and opt, "eager" itself lets sequences see each other. test_position_ids.py has gpt_oss.
PACKED = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "deepseek_v3", "phi3", "gpt2"]


@pytest.mark.parametrize("name", PACKED)
def test_position_ids(name, device, monkeypatch):
    calls = count_calls(monkeypatch)
    check_model(MODELS[name], lambda seed: packed_rows(LENGTHS, seed), True, device)
    assert set(calls) == {"attention_varlen"}


@pytest.mark.parametrize("name", ["llama4", "gemma3 with images", "gemma4 with images", "hrm_text", "paligemma"])
def test_position_ids_and_composed_masks(name, device, intervals_instead):
    """Chunks, images and prefixes of each sequence."""

    def make_inputs(seed):
        given = MODELS[name].make_inputs(seed=seed)
        return {key: tensor[:2] for key, tensor in given.items()} | packed_rows(LENGTHS, seed)

    check_model(MODELS[name], make_inputs, True, device)


def flattened(seed: int) -> dict:
    from transformers import DataCollatorWithFlattening

    ids = packed_rows(LENGTHS[:1], seed)["input_ids"][0]
    texts = [{"input_ids": part.tolist()} for part in ids.split(list(LENGTHS[0]))]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(texts)
    del batch["labels"]
    return dict(batch, use_cache=False)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_flattening_collator(name, use_cache, device, monkeypatch):
    """It says where sequences begin, which the masks do not know when the model keeps a cache."""
    calls = count_calls(monkeypatch)
    check_model(MODELS[name], flattened, True, device, use_cache=use_cache)
    assert set(calls) == {"attention_varlen"}


def count_calls(monkeypatch) -> list[str]:
    """Names of the functions that the layers call."""
    from flash_attn_ext.integrations.transformers import attention

    calls = []

    def counting(name, function):
        def call(*args, **options):
            calls.append(name)
            return function(*args, **options)

        return call

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(attention, name, counting(name, getattr(attention, name)))
    return calls
