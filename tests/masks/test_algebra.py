"""The algebra of intervals by brute force over pairs: any order, overlap and empty intervals, batch and heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_attn_ext.masks import Intervals, from_mask

KEYS = 12
numbers = st.integers(0, KEYS)


@st.composite
def bounds(draw, queries: int | None = None, packed: bool | None = None) -> torch.Tensor:
    """Of intervals as a user may have them, batch and heads 1 or full."""
    queries = draw(st.integers(0, 4)) if queries is None else queries
    packed = draw(st.booleans()) if packed is None else packed
    rows = [draw(st.sampled_from([1, full])) for full in ((3,) if packed else (2, 3))]
    shape = (*rows, queries, 2 * draw(st.integers(1, 4)))
    return (
        torch.tensor(draw(st.lists(numbers, min_size=(n := torch.Size(shape).numel()), max_size=n))).int().view(shape)
    )


@st.composite
def pairs(draw) -> tuple[Intervals, Intervals]:
    queries, packed = draw(st.integers(0, 4)), draw(st.booleans())
    return tuple(Intervals(draw(bounds(queries, packed))) for _ in range(2))


def needed(seen: torch.Tensor) -> torch.Tensor:
    """Runs of True in each row."""
    edges = torch.nn.functional.pad(seen, (1, 0)).int().diff(dim=-1)
    return (edges == 1).sum(-1)


def brute_force(table: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(*table.shape[:-1], KEYS, dtype=torch.bool)
    for row in torch.cartesian_prod(*map(torch.arange, table.shape[:-1])).tolist():
        for begin, end in table[tuple(row)].view(-1, 2).tolist():
            seen[(*row, slice(begin, max(begin, end)))] = True
    return seen


def assert_merged(result: Intervals, seen: torch.Tensor) -> None:
    """The mask, with sorted intervals that do not touch, and empty ones at the end of the last."""
    assert torch.equal(result.dense(KEYS), seen)
    table = result.tensor
    assert table.dtype == torch.int32 and bool((table.diff(dim=-1) >= 0).all())
    begin, end = table[..., 0::2], table[..., 1::2]
    assert torch.equal((begin < end).sum(-1), needed(seen))
    is_behind = torch.arange(begin.shape[-1]) >= needed(seen)[..., None]
    last = table.amax(-1, keepdim=True)
    assert torch.equal(torch.where(is_behind, begin, last), last.expand_as(begin))


@given(bounds())
def test_dense(table):
    assert torch.equal(Intervals(table).dense(KEYS), brute_force(table))


@given(bounds())
def test_merged_needs_no_more_than_its_rows(table):
    merged = Intervals(table).merged()
    seen = brute_force(table)
    assert_merged(merged, seen)
    assert merged.tensor.shape[-1] == 2 * max(1, int(needed(seen).max()) if needed(seen).numel() else 1)
    assert torch.equal(merged.merged().tensor, merged.tensor)


@given(bounds(packed=False))
def test_a_mask_and_back(table):
    """The intervals of the boolean mask are the merged ones, number by number."""
    assert torch.equal(from_mask(Intervals(table).dense(KEYS)).tensor, Intervals(table).merged().tensor)


@pytest.mark.parametrize("operation", [torch.logical_and, torch.logical_or])
@given(pairs())
def test_both_and_either(operation, sides):
    one, other = sides
    seen = operation(one.dense(KEYS), other.dense(KEYS))
    combine = {torch.logical_and: Intervals.__and__, torch.logical_or: Intervals.__or__}[operation]
    most = int(needed(seen).max()) if needed(seen).numel() else 0
    if most <= 4:
        assert_merged(combine(one, other), seen)
        assert torch.equal(combine(one, other).tensor, combine(other, one).tensor)
        return
    row = (needed(seen) == most).nonzero()[0].tolist()
    names = ("batch", "head", "query") if len(row) == 3 else ("head", "token")
    said = ", ".join(f"{name} {i}" for name, i in zip(names, row, strict=True))
    with pytest.raises(ValueError, match=f"^{said} needs {most} intervals of keys"):
        combine(one, other)


def test_numbers_of_intervals_that_need_not_be_read():
    """What is known before any value: no more than a row can have."""
    one, two = Intervals(torch.tensor([[[[0, 9]]]]).int()), Intervals(torch.tensor([[[[0, 2, 4, 6]]]]).int())
    assert (one & one).tensor.shape[-1] == 2
    assert (one & two).tensor.tolist() == [[[[0, 2, 4, 6]]]]
    assert (one | two).tensor.tolist() == [[[[0, 9, 9, 9, 9, 9]]]]
    assert (two | two).tensor.shape[-1] == 8
    assert (two | two | one).tensor.shape[-1] == 2


def test_any_bound_of_int32():
    """Also the largest, for no bound, and what is negative."""
    largest = 2**31 - 1
    wide = Intervals(torch.tensor([[[[3, largest, -5, 1]]]]).int())
    assert wide.merged().tensor.tolist() == [[[[-5, 1, 3, largest]]]]
    assert (wide & wide).dense(6).int().tolist() == [[[[1, 0, 0, 1, 1, 1]]]]


def test_rows_and_devices(device):
    intervals = Intervals(torch.arange(12).int().view(1, 1, 6, 2))
    moved = intervals.to(device)
    assert moved.tensor.device.type == device and intervals.tensor.device.type == "cpu"
    for begin, end in ((0, 2), (-2, None), (3, 3), (1, 99)):
        assert torch.equal(moved.rows(begin, end).tensor.cpu(), intervals.tensor[:, :, begin:end])


def test_other_values_are_left_to_python():
    intervals = Intervals(torch.zeros(1, 1, 2, 2, dtype=torch.int32))
    for operation in (lambda: intervals & 3, lambda: intervals | torch.ones(2, 2, dtype=torch.bool)):
        with pytest.raises(TypeError):
            operation()


@given(st.data())
def test_packed_sequences(device, data):
    """Each sequence has the square of its batch entry's mask; packed and dense masks are the same there."""
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    rows = (data.draw(st.sampled_from([1, len(lengths)])), data.draw(st.sampled_from([1, 2])), 4)
    table = data.draw(st.lists(numbers, min_size=(n := torch.Size(rows).numel() * 4), max_size=n))
    intervals = Intervals(torch.tensor(table).int().view(*rows, 4).to(device))
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    tokens = data.draw(st.sampled_from([None, sum(lengths)]))
    packed = intervals.packed(ends, tokens=tokens)
    assert packed.tensor.shape == (rows[1], sum(lengths), 4)
    seen = intervals.dense(KEYS).expand(len(lengths), *rows[1:], KEYS)
    for mine, length, begin in zip(seen, lengths, ends.tolist(), strict=False):
        expected = mine[:, :length].clone()
        expected[..., length:] = False
        assert torch.equal(packed.rows(begin, begin + length).dense(KEYS), expected)
