"""Each family of masks against its definition in flash_attn_ext.reference, and that against FlexAttention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_mask

from flash_attn_ext import masks, reference
from support.mask_families import FAMILIES, INTERVALS_OF_TWO, dense, draw_family


def test_every_family_is_tested():
    classes = {"Intervals", "BlockLists", "BlocksAndIntervals"}
    made = {name for name in masks.__all__ if not name.startswith("from_")} - classes
    assert {name.removesuffix("_left").removesuffix("_right") for name in FAMILIES} == made
    assert set(FAMILIES) == set(reference.MASKS)


@pytest.mark.parametrize("name", FAMILIES)
@given(st.data())
def test_intervals_are_the_definition(name, device, data):
    drawn = draw_family(name, data.draw, device)
    bounds = drawn.intervals.tensor
    assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.device.type == device
    assert bounds.shape[:-1] == (drawn.batch, 1, drawn.queries)
    seen = dense(drawn.definition, drawn.batch, drawn.queries, drawn.keys, device)
    assert torch.equal(drawn.intervals.dense(drawn.keys), seen)
    assert bool((bounds >= 0).all() and (bounds <= drawn.keys).all())
    assert bool((bounds.diff(dim=-1) >= 0).all())
    if name != "tree":
        assert bounds.shape[-1] == (4 if name in INTERVALS_OF_TWO else 2)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(st.data())
def test_definitions_are_mask_mods_of_flexattention(name, device, data):
    drawn = draw_family(name, data.draw, device, least=1)
    seen = create_mask(drawn.definition, drawn.batch, 1, drawn.queries, drawn.keys, device)
    assert torch.equal(drawn.intervals.dense(drawn.keys), seen)


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 4))
def test_documents_of_cu_seqlens(device, lengths, behind):
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    ids = torch.cat([ids, ids.new_full((behind,), -1)]).to(device)
    expected = masks.documents(ids).dense(len(ids))
    assert torch.equal(masks.documents(cu_seqlens=ends, tokens=len(ids)).dense(len(ids)), expected)
    if not behind:
        assert torch.equal(masks.documents(cu_seqlens=ends).dense(len(ids)), expected)


def test_fewer_tokens_than_cu_seqlens_cut_the_last_document():
    cut = masks.documents(cu_seqlens=torch.tensor([0, 2, 6]), tokens=4)
    assert cut.tensor[0, 0].tolist() == [[0, 2], [0, 2], [2, 4], [2, 4]]


def test_lengths_are_those_of_the_tokens_at_most():
    assert masks.prefix_lm(3, 2**30).tensor.tolist() == [[[[0, 3]] * 3]]
    assert masks.padding(3, torch.tensor([-1, 9])).tensor[:, 0, 0].tolist() == [[0, 0], [0, 3]]


def test_images_of_gemma_in_a_window():
    """The mask of its local layers: causal in a window, and the tokens of an image see one another."""
    ids = torch.tensor([-1, -1, 0, 0, 0, -1, 1, 1, -1])
    i, j = torch.arange(9)[:, None], torch.arange(9)
    local = (j <= i) & (j > i - 3)
    image = (ids[:, None] == ids) & (ids >= 0)
    assert torch.equal((masks.window(9, (2, 0)) | masks.documents(ids)).dense(9)[0, 0], local | image)


def test_a_tree_says_how_many_intervals_it_needs():
    """Each level has two tokens, and the second is the parent of the next: an interval for each ancestor."""
    parents = torch.tensor([-1, -1, 1, 1, 3, 3, 5, 5, 7, 7])
    assert masks.tree(parents[:8]).tensor.shape == (1, 1, 8, 8)
    with pytest.raises(ValueError, match="query 9 needs 5 intervals of keys"):
        masks.tree(parents)
    with pytest.raises(ValueError, match="query 9 needs 6 intervals of keys"):
        masks.tree(parents, prefix=3)


def test_one_compiled_function_makes_intervals_of_any_length(fresh_compiler):
    def local(ids):
        tokens = ids.shape[-1]
        packed = masks.documents(ids) & masks.window(tokens, (3, 0))
        return (packed | masks.global_and_window(tokens, 2, 1)).tensor

    compiler = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(local, backend=compiler, fullgraph=True, dynamic=True)
    for tokens in (9, 14, 33):
        ids = torch.arange(tokens) // 4
        assert torch.equal(compiled(ids), local(ids))
    assert compiler.frame_count == 1
