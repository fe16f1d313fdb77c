"""The mask function: whatever it returns says what transformers' own boolean mask says, without being one."""

import itertools

import pytest
import torch

masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")

from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from flash_attn_ext.integrations.transformers import mask_form, masks  # noqa: E402
from flash_attn_ext.integrations.transformers.attention import fused_attention  # noqa: E402
from support.models.asked import (  # noqa: E402
    BATCH,
    LENGTHS,
    PADDING,
    UNALIGNED,
    WINDOWS,
    ask,
    num_bytes,
    packed_function,
)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("window", WINDOWS)
def test_causal_and_windows_are_intervals(window, padding):
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    for lengths, as_tensor in itertools.product(LENGTHS, (False, True)):
        q_length, kv_length, q_offset, kv_offset = lengths
        if as_tensor:  # as static caches count
            lengths = (q_length, kv_length, torch.tensor(q_offset), kv_offset)
        mask = ask(function, lengths, padding, local_size=window)
        window_in_static_cache = window is not None and q_offset + q_length < kv_length
        if q_length > 1 and not window_in_static_cache:
            assert mask.dtype == torch.uint8
            assert mask.shape[1:3].numel() <= 6


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("window", WINDOWS)
def test_bidirectional(window, padding):
    function = bidirectional_mask_function if window is None else sliding_window_bidirectional_mask_function(window)
    for lengths in LENGTHS + UNALIGNED:
        mask = ask(function, lengths, padding, local_size=window, allow_is_bidirectional_skip=True)
        q_length, kv_length, q_offset, kv_offset = lengths
        if window is None or (q_length == kv_length and q_offset == kv_offset):
            assert mask is None or mask.dtype == torch.uint8


def test_packed_sequences_of_older_releases_are_cumulative_lengths():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4], [5, 6, 0, 1, 2, 3, 4, 5, 6]])
    for window in WINDOWS:
        function = packed_function(positions, window, is_remapped=False)
        mask = ask(function, (9, 9, 0, 0), local_size=window, allow_is_causal_skip=False)
        assert mask.dtype == torch.uint32


@pytest.mark.parametrize("window", WINDOWS)
def test_packed_sequences_are_cumulative_lengths(window):
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4], [5, 6, 0, 1, 2, 3, 4, 5, 6]])
    mask = ask(packed_function(positions, window), (9, 9, 0, 0), local_size=window, allow_is_causal_skip=False)
    assert mask.dtype == torch.uint32
    if window is None or window > 1:
        assert mask[:, 0, 0, 0].view(torch.int32).tolist() == [0, 3, 4, 9, 11, 18]


def test_packed_sequences_whose_values_cannot_be_read():
    """As while a CUDA graph is captured."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        positions = mode.from_tensor(torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4], [5, 6, 0, 1, 2, 3, 4, 5, 6]]))
        mask = masks.fused_mask(BATCH, 9, 9, mask_function=packed_function(positions, None), allow_is_causal_skip=False)
    assert mask.dtype == torch.uint32 and mask.shape[0] == BATCH * 9 + 1


@pytest.mark.parametrize("function", [causal_mask_function, bidirectional_mask_function], ids=["causal", "both ways"])
def test_a_model_that_looks_into_its_mask_gets_a_boolean_one(function):
    skips = {"allow_is_causal_skip": False} | (
        {"allow_is_bidirectional_skip": False} if function is bidirectional_mask_function else {}
    )
    mask = ask(function, (7, 7, 0, 0), **skips)
    assert mask.dtype == torch.bool and mask.shape == (BATCH, 1, 7, 7)


def test_masks_grow_with_the_length_not_with_its_square():
    length = 32768
    padding = torch.ones(1, length, dtype=torch.bool)
    padding[:, :5] = False
    positions = torch.arange(length)[None] % 1000
    for window in (None, 1024):
        function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        request = dict(batch_size=1, q_length=length, kv_length=length, local_size=window)
        assert num_bytes(masks.fused_mask(**request, mask_function=function, attention_mask=padding)) < 40 * length
        packed = masks.fused_mask(**request, mask_function=packed_function(positions, window))
        assert packed.untyped_storage().nbytes() < 8 * length


@pytest.mark.parametrize("name", ["Bloom", "MPNet"])
def test_models_with_an_attention_of_their_own_are_refused(name):
    import transformers

    config = getattr(transformers, f"{name}Config")(hidden_size=32, n_layer=1, num_hidden_layers=1, n_head=2)
    config.num_attention_heads = 2
    model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="fused_ext")
    ids = torch.arange(6).view(2, 3)
    with pytest.raises(ValueError, match=f"does not reach transformers.models.{name.lower()}.modeling_.*eager"):
        model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7])
def test_masks_cannot_be_added_to_scores(length):
    """A model that is not found out by its modules must not go on with a wrong sum."""
    padding = torch.tensor([[False] + [True] * 6] * BATCH)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0, 1]] * BATCH)
    forms = [
        (masks.fused_mask(BATCH, length, 7, 7 - length, attention_mask=padding), length),
        (masks.fused_mask(BATCH, length, 9, 7 - length, attention_mask=padding), length),
        (masks.fused_mask(BATCH, length, 7, mask_function=bidirectional_mask_function, attention_mask=padding), length),
        (masks.fused_mask(BATCH, 7, 7, mask_function=packed_function(positions, None)), 7),
    ]
    for mask, queries in forms:
        for heads in (1, 4):
            with pytest.raises(RuntimeError):
                torch.zeros(BATCH, heads, queries, 7) + mask


def test_a_mask_of_another_layer_is_refused():
    mask = masks.fused_mask(1, 7, 7)
    with pytest.raises(ValueError, match="made for 7 keys, but there are 5"):
        mask_form.read(mask, 5)
    of_a_cache = masks.fused_mask(1, 3, 10, q_offset=3)  # 6 of 10 keys
    assert mask_form.read(of_a_cache, 10).num_keys == 6
    for num_keys in (6, 7, 14, 20):
        with pytest.raises(ValueError, match=f"made for 1. keys, but there are {num_keys}"):
            mask_form.read(of_a_cache, num_keys)
    for num_keys in (8, 12):  # only the mask function knows
        q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, num_keys, 8)
        with pytest.raises(ValueError, match=f"made for 10 keys, but there are {num_keys}"):
            fused_attention(torch.nn.Module(), q, k, k, of_a_cache)
    with pytest.raises(ValueError, match="attention_mask has shape \\(2, 7\\), expected a tensor of 4 dimensions"):
        mask_form.read(torch.ones(2, 7), 7)
    with pytest.raises(ValueError, match=r"dtype torch\.int64"):
        mask_form.read(torch.ones(2, 1, 7, 7, dtype=torch.int64), 7)
    for shape in ((2, 1, 7, 7), (2, 3, 4, 7)):  # the user's own, and not flags
        with pytest.raises(ValueError, match=r"dtype torch\.uint8 .*attention_mask\.bool\(\)"):
            mask_form.read(torch.ones(shape, dtype=torch.uint8), 7)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("queries", [2, 3, 4, 5, 6, 7, 30])
def test_a_mask_that_was_cut_is_refused(queries, window):
    """To the keys of a layer, as some models cut it, or to fewer queries than the form has rows."""
    padding = torch.ones(1, queries, dtype=torch.bool)
    padding[:, 0] = queries == 2
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    for attention_mask in (None, padding):
        request = dict(mask_function=function, local_size=window, attention_mask=attention_mask)
        mask = masks.fused_mask(1, queries, queries, **request)
        assert mask_form.read(mask, queries).is_causal
        for cut in [mask[..., :queries], *(mask[:, :, -count:] for count in range(1, mask.shape[2]))]:
            with pytest.raises(ValueError, match="without slicing"):
                mask_form.read(cut, queries)


def test_a_mask_of_ones_and_zeros_in_bytes_is_refused():
    for length in range(2, 9):
        with pytest.raises(ValueError, match=r"attention_mask\.bool\(\)"):
            mask_form.read(torch.ones(1, 1, length, length, dtype=torch.uint8).tril(), length)


@pytest.mark.usefixtures("fresh_compiler")
def test_masks_of_other_kinds_in_compiled_layers():
    """As between a prompt and the tokens after it, where layers are compiled and the model is not."""
    compiled = torch.compile(lambda mask, x: x * mask_form.read(mask, x.shape[0]).is_causal, backend="eager")
    for kind in (mask_form.CAUSAL, mask_form.KEYS, mask_form.CAUSAL):
        mask = mask_form.flags_form(kind, 30, None, "cpu")
        assert bool(compiled(mask, torch.ones(30)).all()) == (kind == mask_form.CAUSAL)
