"""Lists of blocks, and FlexAttention's block masks as lists and intervals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flash_attn_ext
from flash_attn_ext.masks import BlockLists, from_block_mask, from_blocks
from flash_attn_ext.reference import attention_reference


def by_loops(lists: BlockLists, queries: int, keys: int) -> torch.Tensor:
    seen = torch.zeros(*lists.counts.shape[:-1], queries, keys, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, lists.counts.shape)).tolist():
        *before, row = at
        for listed in lists.indices[tuple(at)][: int(lists.counts[tuple(at)])].tolist():
            rows = slice(row * lists.query_block, (row + 1) * lists.query_block)
            seen[(*before, rows, slice(listed * lists.key_block, (listed + 1) * lists.key_block))] = True
    return seen


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from((64, 128)),
    st.sampled_from((64, 128)),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_dense_is_what_the_lists_say(seed, query_block, key_block, queries, keys):
    generator = torch.Generator().manual_seed(seed)
    rows, width = -(-queries // query_block), -(-keys // key_block)
    counts = torch.randint(0, 5, (2, 1, rows), generator=generator)
    indices = torch.randint(0, width, (2, 1, rows, 4), generator=generator)
    lists = BlockLists(counts, indices, query_block=query_block, key_block=key_block)
    assert torch.equal(lists.dense(queries, keys), by_loops(lists, queries, keys))
    again = from_blocks(lists.blocks(keys), query_block=query_block, key_block=key_block)
    assert torch.equal(again.dense(queries, keys), lists.dense(queries, keys))


def test_blocks_that_do_not_exist_are_left_out():
    lists = BlockLists(torch.tensor([9, -1]), torch.tensor([[0, -3, 7], [1, 1, 1]]))
    assert lists.blocks(300).tolist() == [[True, False, False], [False, False, False]]


def test_moving_and_showing():
    lists = BlockLists(torch.tensor([[1]]), torch.tensor([[[0]]]), query_block=64)
    assert lists.to("meta").counts.is_meta and lists.to("meta").query_block == 64
    assert repr(lists) == "BlockLists((1, 1) lists of at most 1 blocks, each of 64 queries x 128 keys, on cpu)"


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i >= j) & (i - j < 150)


def of_heads(b, h, i, j):
    return (i >= j) & ((i - j < 100) | (j < 130 * h))


def documents_and_first(b, h, i, j):
    return (i // 200 == j // 200) | (j < 40)


def far_and_near(b, h, i, j):
    return ((i - j).abs() < 70) | ((j > 300) & (j < 420)) | (j < 10)


def nothing_for_some(b, h, i, j):
    return (i >= j) & (i > 300)


RULES = (causal, window, of_heads, documents_and_first, far_and_near, nothing_for_some)


def dense_of(block_mask: BlockMask) -> torch.Tensor:
    """What FlexAttention shows: full blocks, and what mask_mod leaves inside partial ones."""
    queries, keys = block_mask.seq_lengths
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    b, h, i, j = (torch.arange(size) for size in (batch, heads, queries, keys))
    seen = block_mask.mask_mod(b[:, None, None, None], h[:, None, None], i[:, None], j)
    seen = seen.expand(batch, heads, queries, keys)
    rows, columns = (at // size for at, size in zip((i, j), block_mask.BLOCK_SIZE, strict=True))

    def listed(counts, indices):
        if counts is None:
            return torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
        is_listed = torch.arange(indices.shape[-1]) < counts[..., None]
        table = (torch.where(is_listed, indices, -1)[..., None] == torch.arange(columns[-1] + 1)).any(-2)
        return table[:, :, rows][..., columns]

    full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return full | (listed(block_mask.kv_num_blocks, block_mask.kv_indices) & seen)


def shown(converted, queries: int, keys: int) -> torch.Tensor:
    seen = converted.block_lists.dense(queries, keys)
    return seen if converted.intervals is None else seen & converted.intervals.dense(keys)


@pytest.mark.parametrize("size", [64, 128, (128, 64), 256, (64, 192)], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_block_masks_of_rules(rule, size):
    block_mask = create_block_mask(rule, 1, 3, 500, 600, device="cpu", BLOCK_SIZE=size)
    converted = from_block_mask(block_mask)
    assert torch.equal(shown(converted, 500, 600), dense_of(block_mask))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from(RULES), st.booleans())
def test_block_masks_of_lists(seed, rule, has_full):
    """Of chosen blocks, of which some are full although the rule hides pairs of them, and some both."""
    generator = torch.Generator().manual_seed(seed)
    partial, full = (torch.rand(2, 1, 4, 5, generator=generator) < 0.4 for _ in range(2))
    lists, full_lists = from_blocks(partial), from_blocks(full)
    block_mask = BlockMask.from_kv_blocks(
        lists.counts, lists.indices, *((full_lists.counts, full_lists.indices) if has_full else ()),
        BLOCK_SIZE=64, mask_mod=rule, seq_lengths=(250, 310), compute_q_blocks=False,
    )  # fmt: skip
    expected = dense_of(block_mask)
    listed = (
        (partial | full if has_full else partial).repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :250, :310]
    )
    # Between keys that a row sees, those that it must not see count; blocks of no list do not.
    order = torch.where(listed, torch.arange(310), 1000).argsort(-1)
    visible = torch.nn.functional.pad((expected & listed).gather(-1, order), (1, 0)).int()
    needed = int((visible.diff(dim=-1) == 1).sum(-1).max())
    if needed > 4:
        with pytest.raises(ValueError, match=f"{needed} intervals"):
            from_block_mask(block_mask)
        return
    converted = from_block_mask(block_mask)
    assert torch.equal(shown(converted, 250, 310), expected)


def test_full_blocks_alone_need_no_intervals():
    lists = from_blocks(torch.eye(3, dtype=torch.bool)[None, None])
    empty = torch.zeros_like(lists.counts), torch.zeros_like(lists.indices)
    block_mask = BlockMask.from_kv_blocks(
        *empty, lists.counts, lists.indices, BLOCK_SIZE=64, mask_mod=causal, seq_lengths=(180, 180)
    )
    assert from_block_mask(block_mask).intervals is None


def test_scattered_blocks_with_a_causal_rule_need_one_interval():
    """As MoBA has them: the own block, and some earlier ones."""
    table = torch.eye(9, dtype=torch.bool) | (torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) < 0.4).tril()
    lists = from_blocks(table[None, None])
    block_mask = BlockMask.from_kv_blocks(
        lists.counts, lists.indices, BLOCK_SIZE=64, mask_mod=causal, seq_lengths=(550, 550)
    )
    converted = from_block_mask(block_mask)
    assert converted.intervals.tensor.shape == (1, 1, 550, 2)
    assert torch.equal(shown(converted, 550, 550), dense_of(block_mask))


def test_another_rule():
    block_mask = create_block_mask(causal, 1, 1, 200, 200, device="cpu")
    converted = from_block_mask(block_mask, window)
    at = torch.arange(200)
    listed = converted.block_lists.dense(200, 200)
    assert torch.equal(shown(converted, 200, 200), listed & window(0, 0, at[:, None], at))


def test_in_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, 16, generator=generator) for heads, length in ((4, 300), (2, 400), (2, 400))
    )
    block_mask = create_block_mask(documents_and_first, 1, 1, 300, 400, device="cpu")
    converted = from_block_mask(block_mask)
    out = flash_attn_ext.attention(q, k, v, **converted._asdict())
    expected, _ = attention_reference(q, k, v, mask=dense_of(block_mask))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_too_many_intervals_are_counted():
    block_mask = create_block_mask(lambda b, h, i, j: j % 10 == 0, 1, 1, 64, 128, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match="13 intervals"):
        from_block_mask(block_mask)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="block_mask must be a BlockMask of FlexAttention, got Tensor"):
        from_block_mask(torch.ones(2, 2))
    block_mask = create_block_mask(causal, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=32)
    with pytest.raises(ValueError, match="blocks of 32 queries x 32 keys, expected multiples of 64"):
        from_block_mask(block_mask)
    block_mask = create_block_mask(causal, 1, 1, 512, 512, device="cpu")
    with pytest.raises(ValueError, match="1 rows of blocks of 128 queries, but its seq_lengths say 512 queries"):
        from_block_mask(block_mask[:, :, 2:3])
    with pytest.raises(RuntimeError, match=r"mask_mod returns torch.int32, expected torch.bool"):
        from_block_mask(block_mask, mask_mod=lambda b, h, i, j: (i >= j).int())
    with pytest.raises(TypeError, match=r"blocks must be a bool tensor .* got list"):
        from_blocks([[True]])
    with pytest.raises(RuntimeError, match=r"blocks must be bool, .* got torch.int64 \(2, 2\)"):
        from_blocks(torch.ones(2, 2, dtype=torch.int64))
