"""Visible intervals and their inverse, as the kernels compute them, against brute force over all pairs."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flash_attn_ext import _C
from support.cases import Case
from support.masks import visible

lengths = st.integers(0, 40)
bounds = st.none() | st.integers(0, 45)
alignments = st.sampled_from([None, "top_left", "bottom_right"])


def table_of(intervals: torch.Tensor, length: int) -> torch.Tensor:
    """(N, 2) intervals [begin, end) as an (N, length) table; begin >= end is empty."""
    positions = torch.arange(length)
    return (positions >= intervals[:, :1]) & (positions < intervals[:, 1:])


@given(lengths, lengths, alignments, bounds, bounds)
@example(5, 0, "bottom_right", None, None)
@example(40, 3, "bottom_right", 0, 0)
@example(3, 40, "top_left", None, 2)
def test_keys_of_each_query(sq, sk, causal, left, right):
    intervals = _C.visible_keys(sq, sk, causal, left, right)
    assert intervals.dtype == torch.int64 and intervals.shape == (sq, 2)
    expected = visible(Case(sq=sq, sk=sk, causal=causal, window=(left, right)))
    assert torch.equal(table_of(intervals, sk), expected)


@given(lengths, lengths, alignments, bounds, bounds)
@example(0, 5, "bottom_right", None, None)
@example(40, 3, "bottom_right", 0, 0)
def test_queries_of_each_key(sq, sk, causal, left, right):
    intervals = _C.visible_queries(sq, sk, causal, left, right)
    assert intervals.dtype == torch.int64 and intervals.shape == (sk, 2)
    expected = visible(Case(sq=sq, sk=sk, causal=causal, window=(left, right)))
    assert torch.equal(table_of(intervals, sq), expected.T)


@given(lengths, lengths, alignments, bounds, bounds)
def test_both_ends_only_grow(sq, sk, causal, left, right):
    """Loop bounds of tiles rely on it: the union over a tile is [begin of the first, end of the last)."""
    for intervals in (
        _C.visible_keys(sq, sk, causal, left, right),
        _C.visible_queries(sq, sk, causal, left, right),
    ):
        assert bool((intervals.diff(dim=0) >= 0).all())


def test_bounds_near_the_integer_limit():
    huge = 2**62
    assert torch.equal(_C.visible_keys(7, 9, None, huge, huge), _C.visible_keys(7, 9, None, None, None))
    assert torch.equal(_C.visible_keys(7, 9, "top_left", huge, None), _C.visible_keys(7, 9, "top_left", None, None))
