"""Names of transformers that nothing promises, one by one: what each is taken to be is what it is."""

import importlib
import types

import pytest
import torch

masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")

import transformers  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

from flash_attn_ext.integrations.transformers import private_names as names  # noqa: E402
from flash_attn_ext.integrations.transformers.patterns import Pattern, builders_of, pattern_of  # noqa: E402
from support.models.tiny import MODELS  # noqa: E402

POSITIONS = torch.tensor([[0, 1, 2, 0, 1]])
TESTED = {}


def of(name):
    def note(test):
        TESTED[name] = test
        return test

    return note


def caught(monkeypatch, make, **given) -> dict:
    """What transformers passes to a registered mask function."""
    calls = []

    def catch(**request):
        calls.append(request | {"position_ids of the caller": names.position_ids_of_the_caller(1)})
        return torch.ones(1, 1, 5, 5, dtype=torch.bool)

    config = transformers.LlamaConfig(sliding_window=3, is_causal=given.pop("is_causal", True))
    config._attn_implementation = "caught"
    monkeypatch.setitem(names.table_of(AttentionMaskInterface), "caught", catch)
    getattr(masking_utils, make)(config, torch.zeros(1, 5, 8), None, None, **given)
    return calls[0]


@of("table_of")
def test_what_is_registered_is_in_the_table_of_the_class():
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface.register("registered for a test", print)
        assert names.table_of(interface).pop("registered for a test") is print
        assert "registered for a test" not in interface()


@of("causal_mask_function")
@of("bidirectional_mask_function")
def test_plain_patterns_are_these_functions(monkeypatch):
    assert caught(monkeypatch, "create_causal_mask")["mask_function"] is names.causal_mask_function
    both_ways = caught(monkeypatch, "create_causal_mask", is_causal=False)
    assert both_ways["mask_function"] is names.bidirectional_mask_function


@of("sdpa_mask")
def test_sdpa_mask_is_boolean_and_true_where_a_key_is_seen():
    mask = names.sdpa_mask(batch_size=1, q_length=3, kv_length=3, allow_is_causal_skip=False)
    assert torch.equal(mask[0, 0], torch.ones(3, 3, dtype=torch.bool).tril())


@of("is_tracing")
def test_is_tracing_says_where_values_cannot_be_read():
    from torch._subclasses import FakeTensorMode

    found = []
    x = torch.zeros(2)
    torch.compile(lambda x: found.append(names.is_tracing(x)) or x + 1, backend="eager")(x)
    with FakeTensorMode() as mode:
        found.append(names.is_tracing(mode.from_tensor(x)))
    assert found == [True, True] and not names.is_tracing(x)


@of("AND_MASKS")
@of("WINDOW")
def test_windows(monkeypatch):
    function = caught(monkeypatch, "create_sliding_window_causal_mask")["mask_function"]
    builder, (parts,) = names.built_of(function)
    assert builder == names.AND_MASKS
    assert (names.WINDOW, (3,)) in [names.built_of(part) for part in parts]
    assert pattern_of(function) == Pattern(left=2, right=0)


@of("BIDIRECTIONAL_WINDOW")
def test_windows_on_both_sides(monkeypatch):
    function = caught(monkeypatch, "create_sliding_window_causal_mask", is_causal=False)["mask_function"]
    _, (parts,) = names.built_of(function)
    assert (names.BIDIRECTIONAL_WINDOW, (3,)) in [names.built_of(part) for part in parts]
    assert pattern_of(function) == Pattern(left=3, right=3)


@of("PACKED")
def test_packed_sequences(monkeypatch):
    function = caught(monkeypatch, "create_sliding_window_causal_mask", position_ids=POSITIONS)["mask_function"]
    expected = {names.AND_MASKS, names.PACKED, names.WINDOW}
    is_remapped = hasattr(masking_utils, names.REMAPPED)
    assert builders_of(function) == expected | ({names.REMAPPED} if is_remapped else set())
    assert pattern_of(function) == Pattern(left=2, right=0, is_packed=True)


@of("REMAPPED")
@pytest.mark.skipif(not hasattr(masking_utils, names.REMAPPED), reason="before transformers 5.23")
def test_positions_of_packed_sequences():
    function = masking_utils.remap_positions_for_packed_sequence(names.causal_mask_function, POSITIONS)
    assert names.built_of(function) == (names.REMAPPED, (names.causal_mask_function, POSITIONS))


@of("CHUNKS")
def test_chunks(monkeypatch):
    monkeypatch.setattr(transformers.LlamaConfig, "attention_chunk_size", 2, raising=False)
    function = caught(monkeypatch, "create_chunked_causal_mask")["mask_function"]
    builder, ((overlay, plain),) = names.built_of(function)
    assert builder == names.AND_MASKS
    assert plain is names.causal_mask_function
    builder, (size, left_padding) = names.built_of(overlay)
    assert builder == names.CHUNKS and size == 2 and left_padding.tolist() == [0]


@of("BLOCKS")
@of("OR_MASKS")
def test_blocks(monkeypatch):
    ids = torch.tensor([[-1, 0, 0, -1, -1]])
    function = caught(monkeypatch, "create_causal_mask", block_sequence_ids=ids)["mask_function"]
    builder, ((plain, overlay),) = names.built_of(function)
    assert builder == names.OR_MASKS
    assert plain is names.causal_mask_function
    assert names.built_of(overlay) == (names.BLOCKS, (ids,))


@of("PADDING")
def test_padding():
    keep = torch.tensor([[True, False]])
    assert names.built_of(masking_utils.padding_mask_function(keep)) == (names.PADDING, (keep,))


@of("AND_MASK")
def test_what_and_masks_builds_has_this_name():
    assert masking_utils.and_masks(names.causal_mask_function).__name__ == names.AND_MASK
    assert masking_utils.or_masks(names.causal_mask_function).__name__ != names.AND_MASK


@of("reads_its_mask")
def test_models_that_read_a_composed_mask_have_these_types():
    """Those that this transformers has."""
    named = names._READS_ITS_MASK | names._READS_ITS_MASK_IN_SHARED_LAYERS
    assert named & set(CONFIG_MAPPING_NAMES)
    for model_type in named:
        config = types.SimpleNamespace(model_type=model_type, num_kv_shared_layers=2)
        assert names.reads_its_mask(config)
    assert not names.reads_its_mask(types.SimpleNamespace(model_type="gemma4_text", num_kv_shared_layers=0))
    assert not names.reads_its_mask(None)


@of("built_of")
def test_functions_that_transformers_did_not_build_are_not_known():
    def sliding_window_overlay():
        return lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx > q_idx - 3

    for function in (print, sliding_window_overlay(), names.causal_mask_function):
        assert names.built_of(function) is None


@of("position_ids_of_the_caller")
@pytest.mark.parametrize(
    "make", ["create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"]
)
def test_functions_that_make_masks_have_position_ids(make, monkeypatch):
    monkeypatch.setattr(transformers.LlamaConfig, "attention_chunk_size", 2, raising=False)
    assert caught(monkeypatch, make, position_ids=POSITIONS)["position_ids of the caller"] is POSITIONS
    assert caught(monkeypatch, make)["position_ids of the caller"] is None


@of("asks_for_an_implementation")
def test_modules_of_models_ask_for_an_implementation_by_one_name():
    for name, model in MODELS.items():
        module = importlib.import_module(getattr(transformers, model.model).__module__)
        assert names.asks_for_an_implementation(module) == (name != "paligemma"), name  # whose layers are Gemma's
    assert not names.asks_for_an_implementation(importlib.import_module("transformers.models.bloom.modeling_bloom"))


def test_each_name_has_a_test():
    assert set(TESTED) == set(names.__all__)
