"""Masks that transformers composes of several functions: intervals that say what its own boolean mask says."""

import itertools

import pytest
import torch

masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")

import transformers  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    find_packed_sequence_indices,
    or_masks,
    packed_sequence_mask_function,
    padding_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from flash_attn_ext.integrations.transformers import composed, masks  # noqa: E402
from flash_attn_ext.integrations.transformers.attention import fused_attention  # noqa: E402
from flash_attn_ext.masks import converters  # noqa: E402
from support.largest_tensor import largest_of  # noqa: E402
from support.models.asked import BATCH, LENGTHS, PADDING, REMAPS, UNALIGNED, ask  # noqa: E402

IMAGES = torch.tensor([[0, 0, -1, 1, 1, 1, -1, -1, 2, 2, 2, -1, 3, 3, 3, 3], [-1] * 5 + [0] * 9 + [-1] * 2])
TWICE = IMAGES.masked_fill(IMAGES == 2, 0)  # two images of one number, which see each other
STARTS = torch.tensor([0, 3])
CACHED = {
    "chunks": chunked_causal_mask_function(3, torch.zeros(BATCH, dtype=torch.int64)),
    "chunks behind padding": chunked_causal_mask_function(3, STARTS),
    "images": or_masks(causal_mask_function, blockwise_overlay(IMAGES)),
    "images in a window": and_masks(
        or_masks(causal_mask_function, blockwise_overlay(IMAGES)), sliding_window_overlay(3)
    ),
    "images and a window": or_masks(sliding_window_causal_mask_function(3), blockwise_overlay(IMAGES)),
    "chunks and a window": or_masks(
        chunked_causal_mask_function(4, STARTS), sliding_window_bidirectional_mask_function(1)
    ),
    "padding inside": and_masks(causal_mask_function, padding_mask_function(IMAGES >= 0)),
}
EVALUATED = {
    "two images of one number": or_masks(causal_mask_function, blockwise_overlay(TWICE)),
    "global tokens": or_masks(sliding_window_causal_mask_function(2), lambda b, h, q, kv: (kv < 2) & (kv <= q)),
    "a table": and_masks(causal_mask_function, lambda b, h, q, kv: IMAGES[b, kv] >= IMAGES[b, q]),
}
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4], [5, 6, 0, 1, 2, 3, 4, 5, 6]])


@pytest.fixture
def no_pairs(monkeypatch):
    """Fails where a mask function is evaluated for pairs."""

    def evaluate(*_):
        raise AssertionError("a mask of transformers' own builders is evaluated")

    monkeypatch.setattr(composed, "_evaluated", evaluate)


@pytest.mark.parametrize("padding", [kind for kind in PADDING if kind != "holes"])
@pytest.mark.parametrize("name", CACHED)
def test_what_transformers_builds_is_intervals(name, padding, no_pairs):
    for lengths, as_tensor in itertools.product(LENGTHS + UNALIGNED, (False, True)):
        q_length, kv_length, q_offset, kv_offset = lengths
        if as_tensor:  # as static caches count
            lengths = (q_length, kv_length, torch.tensor(q_offset), kv_offset)
        mask = ask(CACHED[name], lengths, padding)
        if q_length > 1:
            if name == "padding inside" and kv_length <= 8:  # its four intervals take as many numbers
                continue
            assert mask.dtype == torch.uint32
            assert mask.shape[1:3] == (1, q_length + 1) and mask.shape[3] <= 8


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", CACHED | EVALUATED)
def test_any_function_says_what_it_says(name, padding):
    """Whatever form it takes: padding with holes may need too many intervals."""
    for lengths in LENGTHS + UNALIGNED:
        ask((CACHED | EVALUATED)[name], lengths, padding, use_vmap=name in EVALUATED)


@pytest.mark.parametrize("block_pairs", [1, 40, converters.BLOCK_PAIRS])
@pytest.mark.parametrize("name", EVALUATED)
def test_other_functions_are_evaluated_a_block_at_a_time(name, block_pairs, monkeypatch):
    monkeypatch.setattr(converters, "BLOCK_PAIRS", block_pairs)
    for lengths, padding in itertools.product(LENGTHS, (None, "left")):
        mask = ask(EVALUATED[name], lengths, padding, use_vmap=True)
        assert lengths[0] == 1 or mask.dtype == torch.uint32


def packed(inner, is_remapped):
    if is_remapped:
        inner = masking_utils.remap_positions_for_packed_sequence(inner, POSITIONS)
    return and_masks(packed_sequence_mask_function(find_packed_sequence_indices(POSITIONS)), inner)


INNER = {
    "chunks": chunked_causal_mask_function(2, torch.zeros(BATCH, dtype=torch.int64)),
    "both ways": bidirectional_mask_function,
    "a window both ways": sliding_window_bidirectional_mask_function(1),
    "images": or_masks(causal_mask_function, blockwise_overlay(IMAGES)),
    "images in a window": and_masks(
        or_masks(causal_mask_function, blockwise_overlay(IMAGES)), sliding_window_overlay(2)
    ),
    "chunks or a window": or_masks(
        chunked_causal_mask_function(3, torch.zeros(BATCH, dtype=torch.int64)),
        sliding_window_causal_mask_function(2),
    ),
}


@pytest.mark.parametrize(
    "is_remapped", [False, pytest.param(True, marks=pytest.mark.skipif(not REMAPS, reason="5.23"))]
)
@pytest.mark.parametrize("name", INNER)
def test_packed_sequences(name, is_remapped, no_pairs):
    """Before transformers 5.23 chunks of packed sequences are counted by the tokens of the row."""
    function = packed(INNER[name], is_remapped)
    for whole in (function, or_masks(function, blockwise_overlay(IMAGES[:, :9]))):
        assert ask(whole, (9, 9, 0, 0), allow_is_causal_skip=False).dtype == torch.uint32


@pytest.mark.parametrize("padding", [None, "left"])
def test_sequences_of_the_users_own_ids(padding):
    """These may lie in several pieces, and need no causality."""
    ids = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, -1], [-1, -1, 3, 3, 3, -1, -1, -1, 3]])
    for inner in (causal_mask_function, bidirectional_mask_function):
        function = and_masks(inner, packed_sequence_mask_function(ids))
        mask = ask(function, (9, 9, 0, 0), padding, use_vmap=True, allow_is_causal_skip=False)
        assert mask.dtype == torch.uint32


@pytest.mark.skipif(not REMAPS, reason="5.23")
def test_positions_alone_do_not_keep_sequences_apart():
    function = masking_utils.remap_positions_for_packed_sequence(causal_mask_function, POSITIONS)
    assert ask(function, (9, 9, 0, 0), allow_is_causal_skip=False).dtype == torch.bool


@pytest.mark.skipif(not REMAPS, reason="5.23")
@pytest.mark.parametrize("is_causal_alone", [True, False])
@pytest.mark.parametrize("ids", [[[0] * 9, [1] * 9], [[0] * 5 + [1] * 4] * 2, [[0, 0, 0, 1, 1, 0, 0, 0, 0]] * 2])
def test_positions_that_begin_again_within_a_users_sequence(ids, is_causal_alone):
    """Position 0 of such a sequence's second part is seen by the first part too."""
    inner = causal_mask_function if is_causal_alone else INNER["images"]
    function = and_masks(
        packed_sequence_mask_function(torch.tensor(ids)),
        masking_utils.remap_positions_for_packed_sequence(inner, POSITIONS),
    )
    for whole in (function, or_masks(function, blockwise_overlay(IMAGES[:, :9]))):
        ask(whole, (9, 9, 0, 0), allow_is_causal_skip=False)


def parity(b, h, q, kv):
    return (q // 2 + kv // 2) % 2 == 0


def other_parity(b, h, q, kv):
    return (q // 2 + kv // 2) % 2 == 1


def test_a_mask_of_too_many_intervals_is_boolean_and_said_once(caplog):
    masks._said.clear()
    function = and_masks(causal_mask_function, parity)
    with caplog.at_level("WARNING", logger="flash_attn_ext"):
        assert ask(function, (16, 16, 0, 0), use_vmap=True).dtype == torch.uint32
        assert not caplog.messages
        for _ in range(2):
            mask = ask(function, (17, 17, 0, 0), use_vmap=True)
    assert mask.dtype == torch.bool and mask.shape == (BATCH, 1, 17, 17)
    assert len(caplog.messages) == 1
    assert "more than 4 intervals" in caplog.messages[0] and "shape (2, 1, 17, 17)" in caplog.messages[0]
    assert "causal_mask_function and parity" in caplog.messages[0]
    with caplog.at_level("WARNING", logger="flash_attn_ext"):
        ask(or_masks(sliding_window_bidirectional_mask_function(0), other_parity), (19, 19, 0, 0), use_vmap=True)
    assert len(caplog.messages) == 2 and "other_parity" in caplog.messages[1]


def test_padding_that_a_chunk_hides_counts_for_no_interval():
    """The padding alone needs eight intervals, and a row of the whole mask two."""
    mask = ask(INNER["chunks"], (9, 9, 0, 0), "holes")
    assert mask.dtype == torch.uint32 and mask.shape[3] <= 4


def test_errors_of_a_users_function_are_the_users():
    def wrong(b, h, q, kv):
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        ask(and_masks(causal_mask_function, wrong), (7, 7, 0, 0))


def test_a_model_that_reads_its_chunks_gets_a_boolean_mask():
    mask = ask(CACHED["chunks"], (7, 7, 0, 0), allow_is_causal_skip=False)
    assert mask.dtype == torch.bool


def call(mask, num_queries, num_keys):
    query, key = torch.zeros(BATCH, 1, num_queries, 8), torch.zeros(BATCH, 1, num_keys, 8)
    return fused_attention(torch.nn.Module(), query, key, key, mask)


def test_intervals_of_another_layer_are_refused():
    mask = ask(CACHED["chunks"], (7, 9, 2, 0))
    call(mask, 7, 9)
    with pytest.raises(ValueError, match="made for 9 keys, but there are 20: it is that of another layer"):
        call(mask, 7, 20)
    with pytest.raises(ValueError, match="made for 7 queries and a batch of 2, but query has 6 and 2"):
        call(mask, 6, 9)


@pytest.mark.parametrize("num_keys", [8, 10, 20])
def test_copies_of_intervals_of_another_layer_are_refused(num_keys):
    """Where nothing is recorded about a mask, as behind a copy to another device."""
    copy = ask(CACHED["chunks"], (7, 9, 2, 0)).clone()
    call(copy, 7, 9)
    with pytest.raises(ValueError, match=f"made for 9 keys, but there are {num_keys}: it is that of another layer"):
        call(copy, 7, num_keys)


def test_compiled_layers_refuse_intervals_of_another_layer(fresh_compiler):
    copy = ask(CACHED["chunks"], (7, 9, 2, 0)).clone()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    compiled(copy, 7, 9)
    with pytest.raises(RuntimeError, match="made for another number of keys than there are"):
        compiled(copy, 7, 20)


def test_intervals_cut_to_one_query_are_refused():
    """They have the shape of packed sequences."""
    mask = ask(CACHED["images and a window"], (9, 9, 0, 0))
    for cut in (mask[:, :, -1:], ask(packed(causal_mask_function, REMAPS), (9, 9, 0, 0))[:, :, -1:]):
        with pytest.raises(ValueError, match=r"cut to one query.* make a mask for this call"):
            call(cut, 1, 9)


@pytest.mark.parametrize("size", [1, 3, 10])
def test_intervals_cut_at_other_places_are_refused(size):
    mask = torch.zeros(BATCH, 1, 10, size, dtype=torch.uint32)
    with pytest.raises(ValueError, match=f"uint32 and shape \\(2, 1, 10, {size}\\), .* without slicing them"):
        call(mask, 9, 9)


@pytest.mark.parametrize("keys", range(2, 17))
def test_intervals_cut_to_the_keys_lose_nothing(keys):
    """As some models cut every mask."""
    for function in (CACHED["chunks"], CACHED["images and a window"], and_masks(causal_mask_function, parity)):
        mask = ask(function, (keys, keys, 0, 0), use_vmap=True)
        assert torch.equal(mask[..., :keys], mask)


@pytest.mark.parametrize("keys", range(2, 17))
def test_intervals_cannot_be_added_to_scores(keys):
    """Also where there are few more keys than numbers of intervals."""
    for function in (CACHED["chunks"], CACHED["images and a window"], and_masks(causal_mask_function, parity)):
        mask = ask(function, (keys, keys, 0, 0))
        if mask.dtype == torch.uint32:
            with pytest.raises(RuntimeError):
                torch.zeros(BATCH, 4, keys, keys) + mask


LONG = 131072


def long_masks(name: str, padding: torch.Tensor | None, positions: torch.Tensor | None) -> list[torch.Tensor | None]:
    """All masks of a forward pass over one row, by transformers' own functions."""
    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
    if name == "gemma3":
        config = transformers.Gemma3TextConfig(**sizes)
    else:
        config = transformers.Llama4TextConfig(**sizes, attention_chunk_size=8192)
    config._attn_implementation = "fused_ext"
    given = (config, torch.zeros(1, LONG, 1), padding, None, positions)  # None: there is no cache
    plain = masking_utils.create_causal_mask
    if name == "llama4":
        return [plain(*given), masking_utils.create_chunked_causal_mask(*given)]
    images = torch.arange(LONG)[None] // 300
    images = images.masked_fill(images % 3 > 0, -1)
    overlays = dict(or_mask_function=blockwise_overlay(images), and_mask_function=sliding_window_overlay(1024))
    return [plain(*given, block_sequence_ids=images), plain(*given, **overlays)]


@pytest.mark.parametrize("form", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_masks_of_131072_tokens_take_linear_memory(name, form):
    padding = positions = None
    if form == "padded":
        padding = (torch.arange(LONG) >= 10000)[None]
    if form == "packed":
        positions = torch.arange(LONG)[None] % 30000
    found = []
    largest = largest_of(lambda: found.extend(long_masks(name, padding, positions)))
    assert largest <= 8 * 8 * LONG  # eight int64 for a query; a boolean mask would take 16 GiB
    assert any(mask is not None and mask.dtype == torch.uint32 and mask.shape[2] == LONG + 1 for mask in found)
