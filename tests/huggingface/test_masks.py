"""The mask function: whatever it returns says what transformers' own boolean mask says, without being one."""

import itertools

import pytest
import torch

masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")

from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from flash_attn_ext.integrations.transformers import mask_form, masks  # noqa: E402

BATCH = 2
LENGTHS = [  # queries, keys, the first query's position, the first key's: as caches of transformers have them
    (7, 7, 0, 0),
    (1, 7, 6, 0),
    (3, 7, 4, 0),
    (4, 9, 0, 0),  # a static cache at its beginning
    (4, 9, 2, 0),
    (1, 9, 2, 0),
    (1, 4, 9, 6),  # sliding caches that are full
    (3, 6, 9, 6),
    (9, 9, 0, 0),
]
UNALIGNED = [(5, 5, 0, 4), (5, 5, 2, 4), (5, 5, 2, 3)]  # as many keys as queries, but other tokens
WINDOWS = [None, 1, 3, 4, 20]
PADDING = {
    None: None,
    "none": [[1] * 16, [1] * 16],
    "left": [[0, 0, 0] + [1] * 13, [1] * 16],
    "right": [[1] * 16, [1] * 2 + [0] * 14],
    "holes": [[1, 0] * 8, [0, 1, 1, 0] * 4],
    "short": [[1] * 3, [0, 1, 1]],
}


def shown(mask: torch.Tensor | None, q_length: int, kv_length: int) -> torch.Tensor:
    """(BATCH, 1, q_length, kv_length) bool, of what was returned."""
    if mask is None:
        return torch.ones(BATCH, 1, q_length, kv_length, dtype=torch.bool)
    visible = mask_form.read(mask, kv_length)
    query, key = torch.arange(q_length)[:, None], torch.arange(kv_length)[None]
    if visible.cu_seqlens is not None:
        assert q_length == kv_length and int(visible.cu_seqlens.diff().max()) <= visible.max_seqlen
        token = torch.arange(BATCH * q_length).view(BATCH, q_length)
        sequence = torch.bucketize(token, visible.cu_seqlens[1:], right=True)
        seen = sequence[:, :, None] == sequence[:, None, :]
        query = query + 0
    else:
        num_keys = kv_length if visible.num_keys is None else visible.num_keys
        query = query + (num_keys - q_length)
        seen = (key < num_keys)[None]
    if visible.is_causal:
        seen = seen & (key <= query)
    if visible.window is not None:
        left, right = visible.window
        seen = seen & (key >= query - left) & (key <= query + right)
    if visible.mask is not None:
        keep = visible.mask[:, 0]
        seen = seen & torch.nn.functional.pad(keep, (0, kv_length - keep.shape[-1]))
    return seen.expand(BATCH, q_length, kv_length)[:, None]


def ask(mask_function, lengths, padding=None, **options):
    q_length, kv_length, q_offset, kv_offset = lengths
    given = None if PADDING[padding] is None else torch.tensor(PADDING[padding], dtype=torch.bool)
    request = dict(
        batch_size=BATCH,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=given,
    )
    mask = masks.fused_mask(**request, **options)
    expected = sdpa_mask(**request, allow_is_causal_skip=False, use_vmap=options.get("use_vmap", False))
    assert torch.equal(shown(mask, q_length, kv_length), expected)
    return mask


def num_bytes(mask: torch.Tensor | None) -> int:
    """As much as it has when generate() has made it contiguous."""
    return 0 if mask is None else mask.numel() * mask.element_size()


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
            assert mask.shape[1:3].numel() <= 5


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("window", WINDOWS)
def test_bidirectional(window, padding):
    function = bidirectional_mask_function if window is None else sliding_window_bidirectional_mask_function(window)
    for lengths in LENGTHS + UNALIGNED:
        mask = ask(function, lengths, padding, local_size=window, allow_is_bidirectional_skip=True)
        q_length, kv_length, q_offset, kv_offset = lengths
        if window is None or (q_length == kv_length and q_offset == kv_offset):
            assert mask is None or mask.dtype == torch.uint8


# Before transformers 5.23 windows of packed sequences are counted by the tokens of the row.
REMAPS = hasattr(masking_utils, "remap_positions_for_packed_sequence")


def packed_function(position_ids, window, is_remapped=REMAPS):
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    if is_remapped:
        function = masking_utils.remap_positions_for_packed_sequence(function, position_ids)
    return and_masks(packed_sequence_mask_function(find_packed_sequence_indices(position_ids)), function)


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


OTHERS = {
    "chunks": chunked_causal_mask_function(3, torch.zeros(BATCH, dtype=torch.int64)),
    "blocks": masking_utils.or_masks(
        causal_mask_function, blockwise_overlay(torch.tensor([[0, 0, 1, 1, -1, 2, 2]] * 2))
    ),
    "the user's": and_masks(causal_mask_function, lambda b, h, q, kv: (q + kv) % 2 == 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_patterns_are_boolean_masks_and_said_once(name, caplog):
    masks._said.clear()
    with caplog.at_level("WARNING", logger="flash_attn_ext"):
        for _ in range(2):
            mask = ask(OTHERS[name], (7, 7, 0, 0), "left", use_vmap=name == "the user's")
    assert mask.dtype == torch.bool and mask.shape == (BATCH, 1, 7, 7)
    assert len(caplog.messages) == 1
    assert "boolean mask of shape (2, 1, 7, 7)" in caplog.messages[0]


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
        assert num_bytes(masks.fused_mask(**request, mask_function=function, attention_mask=padding)) < 5 * length
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
    with pytest.raises(ValueError, match="made for 7 keys or more, but there are 5"):
        mask_form.read(mask, 5)
    with pytest.raises(ValueError, match="attention_mask has shape \\(2, 7\\), expected a tensor of 4 dimensions"):
        mask_form.read(torch.ones(2, 7), 7)
    with pytest.raises(ValueError, match=r"dtype torch\.int64"):
        mask_form.read(torch.ones(2, 1, 7, 7, dtype=torch.int64), 7)
    for shape in ((2, 1, 7, 7), (2, 3, 4, 7)):  # the user's own, and not flags
        with pytest.raises(ValueError, match=r"dtype torch\.uint8 .*attention_mask\.bool\(\)"):
            mask_form.read(torch.ones(shape, dtype=torch.uint8), 7)
