"""register() and unregister(), what is said of calls, and what happens without transformers."""

import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from support.forks import run_forked
from support.models.tiny import MODELS, outputs_of


def tables():
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping


def test_unregister_leaves_no_trace():
    from flash_attn_ext.integrations import transformers as fused

    fused.unregister()
    before = [dict(table) for table in tables()]
    assert not any(fused.NAME in table for table in before)
    for _ in range(2):
        fused.register()
    assert all(set(table) - set(old) == {fused.NAME} for table, old in zip(tables(), before, strict=True))
    model = MODELS["llama"].build(fused.NAME)
    for _ in range(2):
        fused.unregister()
    assert [dict(table) for table in tables()] == before
    with pytest.raises(KeyError, match="fused_ext"):
        outputs_of(model, MODELS["llama"].make_inputs())
    with pytest.raises(ValueError, match="fused_ext"):
        MODELS["llama"].build(fused.NAME)
    model.set_attn_implementation("sdpa")
    outputs_of(model, MODELS["llama"].make_inputs())


def test_a_name_that_is_taken_is_left_alone():
    from flash_attn_ext.integrations import transformers as fused

    fused.unregister()
    attention_functions, _ = tables()
    attention_functions[fused.NAME] = print
    try:
        with pytest.raises(RuntimeError, match="another package has registered attn_implementation='fused_ext'"):
            fused.register()
        fused.unregister()
        assert attention_functions[fused.NAME] is print
    finally:
        del attention_functions[fused.NAME]


def test_the_name_is_not_one_of_transformers_flash_packages():
    from transformers.utils.generic import is_flash_attention_requested

    from flash_attn_ext.integrations.transformers import NAME

    assert not is_flash_attention_requested(requested_attention_implementation=NAME)


def test_a_model_changes_over_and_back():
    model, inputs = MODELS["mistral"].build("eager"), MODELS["mistral"].make_inputs("left")
    expected = outputs_of(model, inputs)["logits"]
    model.set_attn_implementation("fused_ext")
    torch.testing.assert_close(outputs_of(model, inputs)["logits"], expected, atol=1e-4, rtol=1e-4)
    model.set_attn_implementation("eager")
    assert torch.equal(outputs_of(model, inputs)["logits"], expected)


def test_attention_weights_are_refused():
    inputs = MODELS["llama"].make_inputs() | {"output_attentions": True}
    with pytest.raises(ValueError, match=r"output_attentions"):
        MODELS["llama"].build("fused_ext")(**inputs)


def test_calls_are_said_once(caplog):
    from flash_attn_ext.integrations.transformers import attention

    attention._said.clear()
    model = MODELS["qwen3"].build("fused_ext")
    with caplog.at_level(logging.INFO, logger="flash_attn_ext"):
        for _ in range(2):
            outputs_of(model, MODELS["qwen3"].make_inputs())
    assert len(caplog.messages) == 2  # one layer has a window, one has none
    said = caplog.messages[0]
    assert said.startswith("transformers.models.qwen3.modeling_qwen3.Qwen3Attention calls attention(q (3, 4, 13, 8) ")
    assert "causal='bottom_right', window=(4, 0)" in said and "backend: cpu" in said and "forward:" in said
    assert "arguments of the layer without a meaning here: use_cache" in said


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.14.1", "5.9"])
def test_an_old_transformers_is_refused(version, monkeypatch):
    import transformers

    from flash_attn_ext.integrations import transformers as fused

    fused.unregister()
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", version)
        message = f"needs transformers {fused.OLDEST} or later, but {version} is installed: pip install 'transformers>="
        with pytest.raises(ImportError, match=re.escape(message)):
            fused.register()
    assert not any(fused.NAME in table for table in tables())


@pytest.mark.parametrize("version", ["5.15.0", "5.15.0.dev0", "5.24.0", "5.100", "6.0.0rc1"])
def test_later_releases_are_tried(version, monkeypatch):
    import transformers

    from flash_attn_ext.integrations import transformers as fused

    monkeypatch.setattr(transformers, "__version__", version)
    fused.register()


def test_a_release_that_lacks_a_name_is_refused(monkeypatch):
    from transformers import masking_utils

    from flash_attn_ext.integrations import transformers as fused

    fused.unregister()
    with monkeypatch.context() as patch:
        patch.delattr(masking_utils, "sdpa_mask")
        patch.delitem(sys.modules, "flash_attn_ext.integrations.transformers.private_names")
        with pytest.raises(ImportError, match=r"does not offer what .*sdpa_mask.*was tested with 5\.15 to 5\.\d+: pip"):
            fused.register()
    assert not any(fused.NAME in table for table in tables())


def test_one_range_of_releases_is_named_everywhere():
    from flash_attn_ext.integrations import transformers as fused

    root = Path(__file__).resolve().parents[2]
    text = {
        name: (root / name).read_text(encoding="utf-8")
        for name in ("README.md", "docs/transformers.md", "pyproject.toml")
    }
    assert f'transformers = ["transformers>={fused.OLDEST}"]' in text["pyproject.toml"]
    assert f"Hugging Face transformers** {fused.OLDEST} or later" in text["README.md"]
    assert f"transformers {fused.OLDEST} or later" in text["docs/transformers.md"]
    assert f"{fused.OLDEST} and {fused.NEWEST}" in text["docs/transformers.md"]


def test_without_transformers_the_message_says_what_to_install():
    code = """
import sys
sys.modules["transformers"] = None
from flash_attn_ext.integrations import transformers as fused
try:
    fused.register()
except ImportError as error:
    print(error)
"""
    process = run_forked(code)
    assert "needs transformers 5.15 or later, which cannot be imported" in process.stdout, process.stderr
    assert "pip install 'transformers>=5.15'" in process.stdout


def test_importing_the_package_imports_nothing_of_transformers():
    code = "import sys, flash_attn_ext.integrations.transformers; print('transformers' in sys.modules)"
    process = run_forked(code)
    assert process.stdout == "False\n", process.stderr
