"""Masks of other libraries against what their own conventions say, pair by pair."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from flash_attn_ext import masks
from flash_attn_ext.masks import converters
from support.mask_families import FAMILIES, draw_family

small = st.integers(0, 9)


def random_table(data, values: st.SearchStrategy, *shape: int) -> torch.Tensor:
    numbers = data.draw(st.lists(values, min_size=(n := torch.Size(shape).numel()), max_size=n))
    return torch.tensor(numbers, dtype=torch.int64).view(shape)


def most_needed(seen: torch.Tensor) -> int:
    """The largest number of runs of True in a row."""
    runs = (torch.nn.functional.pad(seen, (1, 0)).int().diff(dim=-1) == 1).sum(-1)
    return int(runs.max()) if runs.numel() else 0


def assert_same_or_too_many(convert, seen: torch.Tensor) -> None:
    if (most := most_needed(seen)) > 4:
        with pytest.raises(ValueError, match=f"needs {most} intervals of keys, and a row has at most 4"):
            convert()
        return
    result = convert()
    assert result.tensor.shape == (*seen.shape[:-1], 2 * max(most, 1))
    assert torch.equal(result.dense(seen.shape[-1]).cpu(), seen)


@pytest.fixture(params=[1, 40, converters.BLOCK_PAIRS])
def block_pairs(request, monkeypatch):
    """Blocks of one row, of some, and of all."""
    monkeypatch.setattr(converters, "BLOCK_PAIRS", request.param)


@given(st.data())
def test_boolean_masks(device, block_pairs, data):
    shape = [data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(small), data.draw(small)]
    seen = random_table(data, st.integers(0, 1), *shape).bool()
    monotone = data.draw(st.booleans())  # half of the masks: few intervals
    seen = seen.cummax(-1).values if monotone else seen
    dims = data.draw(st.sampled_from([dims for dims in (2, 3, 4) if shape[: 4 - dims] == [1] * (4 - dims)]))
    given = seen[(0,) * (4 - dims)].to(device)
    # Rows of several blocks may need too many, and the first of these blocks is named.
    if converters.BLOCK_PAIRS < 2**20:
        assume(most_needed(seen) <= 4)
    assert_same_or_too_many(lambda: masks.from_mask(given), seen)


def test_the_row_that_needs_too_many_is_named(block_pairs):
    seen = torch.ones(2, 3, 6, 12, dtype=torch.bool)
    seen[1, 2, 4, 0::2] = False
    with pytest.raises(ValueError, match=r"^batch 1, head 2, query 4 needs 6 intervals of keys"):
        masks.from_mask(seen)


def test_strides_of_a_mask_do_not_matter():
    seen = torch.rand(5, 4) > 0.5
    assert torch.equal(masks.from_mask(seen.T).dense(5)[0, 0], seen.T)
    assert torch.equal(masks.from_mask(seen[:1].expand(3, 2, 6, 4)).dense(4), seen[:1].expand(3, 2, 6, 4))


def test_a_block_of_rows_has_a_bound(monkeypatch):
    evaluated = []

    def evaluate(begin: int, end: int) -> torch.Tensor:
        evaluated.append((begin, end))
        return torch.ones(2, 3, end - begin, 50, dtype=torch.bool)

    monkeypatch.setattr(converters, "BLOCK_PAIRS", 1000)
    result = converters.by_blocks(evaluate, (2, 3, 20, 50), torch.device("cpu"))
    assert result.dense(50).all() and result.tensor.shape == (2, 3, 20, 2)
    assert max(end - begin for begin, end in evaluated) * 2 * 3 * 50 <= 1000
    assert [end for _, end in evaluated[:-1]] == [begin for begin, _ in evaluated[1:]] and evaluated[-1][1] == 20


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8)
@given(st.data())
def test_mask_mods_of_every_family(name, device, block_pairs, data):
    drawn = draw_family(name, data.draw, device, least=1)
    intervals = masks.from_mask_mod(drawn.definition, drawn.batch, 1, drawn.queries, drawn.keys, device=device)
    assert torch.equal(intervals.tensor, drawn.intervals.merged().tensor)


def test_mask_mods_that_flexattention_composes(device):
    def first_head_only(b, h, i, j):
        return (h == 0) | (i == j)

    def causal(b, h, i, j):
        return i >= j

    both = flex_attention.and_masks(causal, first_head_only)
    either = flex_attention.or_masks(causal, first_head_only)
    for mask_mod in (both, either, flex_attention.noop_mask):
        seen = flex_attention.create_mask(mask_mod, 2, 3, 7, 9, device)
        intervals = masks.from_mask_mod(mask_mod, 2, 3, 7, 9, device=device)
        assert torch.equal(intervals.dense(9), seen)
    with pytest.raises(ValueError, match="query 0 needs 5 intervals"):
        masks.from_mask_mod(lambda b, h, i, j: j % 2 == 0, 1, 1, 3, 9, device=device)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_evaluate(queries, keys):
    intervals = masks.from_mask_mod(lambda b, h, i, j: i >= j, 2, 1, queries, keys)
    assert intervals.tensor.shape == (2, 1, queries, 2) and not intervals.tensor.any()


@pytest.mark.parametrize(("causal", "size"), [(True, 1), (True, 2), (False, 2), (False, 4)])
@given(st.data())
def test_flashmask(causal, size, device, data):
    batch, heads, keys = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(small)
    table = random_table(data, st.integers(0, keys), batch, heads, keys, size)
    seen = torch.ones(batch, heads, keys, keys, dtype=torch.bool)
    for b, h, j in torch.cartesian_prod(*map(torch.arange, (batch, heads, keys))).tolist():
        rows = table[b, h, j].tolist()
        if causal:
            seen[b, h, :j, j] = False
            seen[b, h, rows[0] : (rows[1] if size == 2 else keys), j] = False
        elif size == 2:
            seen[b, h, rows[0] :, j] = False
            seen[b, h, : rows[1], j] = False
        else:
            seen[b, h, rows[0] : rows[1], j] = False
            seen[b, h, rows[2] : rows[3], j] = False
    given = table.to(device, data.draw(st.sampled_from([torch.int32, torch.int64])))
    assert_same_or_too_many(lambda: masks.from_flashmask(given, causal=causal), seen)


@given(st.data())
def test_cudnn(device, data):
    heads, batch, queries = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    half = data.draw(st.integers(0, 5))
    table = random_table(data, small, heads, 2 * half + 1, batch * queries)
    seen = torch.zeros(heads, batch * queries, 9, dtype=torch.bool)
    for h, row in torch.cartesian_prod(torch.arange(heads), torch.arange(batch * queries)).tolist():
        bounds = [0, *table[h, :, row].tolist()]
        for begin, end in zip(bounds[0::2], bounds[1::2], strict=True):
            seen[h, row, begin : max(begin, end)] = True
    for given_batch, expected in ((None, seen), (batch, seen.unflatten(1, (batch, queries)).transpose(0, 1))):
        if (most := most_needed(seen)) > 4:
            with pytest.raises(ValueError, match=f"needs {most} intervals"):
                masks.from_cudnn(table.int().to(device), batch=given_batch)
            continue
        intervals = masks.from_cudnn(table.int().to(device), batch=given_batch)
        assert torch.equal(intervals.dense(9).cpu(), expected)
        assert intervals.tensor.shape[-1] == 2 * (half + 1 if half < 4 else max(most, 1))


@given(st.data())
def test_magi(device, data):
    queries, keys, slices = data.draw(small), data.draw(small), data.draw(st.integers(0, 6))
    q_ranges = random_table(data, st.integers(0, queries), slices, 2).sort(-1).values
    k_ranges = random_table(data, st.integers(0, keys), slices, 2).sort(-1).values
    types = random_table(data, st.integers(0, 3), slices)
    seen = torch.zeros(1, 1, queries, keys, dtype=torch.bool)
    for (q_begin, q_end), (k_begin, k_end), kind in zip(
        *(t.tolist() for t in (q_ranges, k_ranges, types)), strict=True
    ):
        i, j = torch.arange(q_end - q_begin)[:, None], torch.arange(k_end - k_begin)
        part = torch.ones(q_end - q_begin, k_end - k_begin, dtype=torch.bool)
        if kind in (1, 3):
            part &= (k_end - k_begin) - j >= (q_end - q_begin) - i
        if kind in (2, 3):
            part &= j >= i
        seen[0, 0, q_begin:q_end, k_begin:k_end] |= part
    given = [table.int().to(device) for table in (q_ranges, k_ranges, types)]
    assert_same_or_too_many(lambda: masks.from_magi(*given, queries=queries, keys=keys), seen)


def test_slices_are_full_by_default():
    ranges = torch.tensor([[0, 1], [1, 3]])
    full = masks.from_magi(ranges, ranges, torch.zeros(2, dtype=torch.int32), queries=3, keys=3)
    assert torch.equal(masks.from_magi(ranges, ranges, queries=3, keys=3).tensor, full.tensor)
