"""Bad input: every error names the argument, what it got, what is allowed, and what to do."""

from collections.abc import Callable

import pytest
import torch

from flash_attn_ext import masks
from support.refusals import assert_says

ids = torch.tensor([0, 0, 1])
two = masks.causal(2)


def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


TYPES: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (lambda: masks.Intervals([[0, 1]]), ("intervals", "int32 tensor", "list")),
    (lambda: masks.causal(2.5), ("tokens", "an int", "2.5", "float")),
    (lambda: masks.causal(True), ("tokens", "an int", "True", "bool")),
    (lambda: masks.window(3, (1, "2")), ("a side of window", "an int", "'2'")),
    (lambda: masks.documents(), ("ids or cu_seqlens", "neither")),
    (lambda: masks.documents(ids, cu_seqlens=ids), ("ids or cu_seqlens", "both")),
    (lambda: masks.documents(ids, tokens=3), ("tokens", "cu_seqlens")),
    (lambda: masks.documents([0, 1]), ("ids", "integer tensor", "list")),
    (lambda: masks.prefix_lm(3, None), ("lengths", "an int", "None")),
    (lambda: masks.tree([-1]), ("parents", "integer tensor", "list")),
    (lambda: masks.from_mask([[True]]), ("mask", "bool tensor", "list")),
    (lambda: masks.from_flashmask(table(1, 1, 3, 1), causal=1), ("causal", "True or False", "1", "int")),
    (lambda: masks.from_mask_mod(lambda b, h, i, j: i >= j, 1, 1, 2.0, 2), ("queries", "an int", "2.0")),
    (lambda: two.dense(None), ("keys", "an int", "None")),
]
VALUES: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (lambda: masks.causal(-1), ("tokens", "at least 0", "-1")),
    (lambda: masks.window(3, (1, -1)), ("a side of window", "at least 0", "-1")),
    (lambda: masks.window(3, (1, 2, 3)), ("window", "(left, right)", "(1, 2, 3)")),
    (lambda: masks.chunked(3, 0), ("size", "at least 1", "0")),
    (lambda: masks.chunked(3, 1, offset=-2), ("offset", "at least 0", "-2")),
    (lambda: masks.block_causal(3, 0), ("size", "at least 1", "0")),
    (lambda: masks.block_diffusion(3, 0), ("size", "at least 1", "0")),
    (lambda: masks.global_and_window(3, -1, 1), ("num_global", "at least 0", "-1")),
    (lambda: masks.padding(3, 2, "both"), ("side", "'left' or 'right'", "'both'")),
    (lambda: masks.tree(torch.tensor([-1, 1])), ("token 1", "-1 (a root) to 0", "got 1")),
    (lambda: masks.tree(torch.tensor([[-1, 0], [-2, 0]])), ("token 0", "-1", "got -2")),
    (lambda: masks.from_mask_mod(lambda b, h, i, j: i >= j, 0, 1, 2, 2), ("batch", "at least 1", "0")),
    (
        lambda: masks.from_mask(torch.tensor([[True, False] * 5])),
        ("batch 0, head 0, query 0", "5 intervals", "at most 4", "causal=, window= or mask="),
    ),
    (
        lambda: masks.from_magi(table(1, 2), torch.tensor([[0, 4]]), queries=3, keys=3),
        ("k_ranges[0]", "[begin, end) inside 0 to 3", "[0, 4]"),
    ),
    (
        lambda: masks.from_magi(torch.tensor([[2, 1]]), table(1, 2), queries=3, keys=3),
        ("q_ranges[0]", "[begin, end) inside 0 to 3", "[2, 1]"),
    ),
    (
        lambda: masks.from_magi(table(1, 2), table(1, 2), torch.tensor([4]), queries=3, keys=3),
        ("attn_type_map", "0 (full), 1 (causal), 2 (inverse) or 3 (both)", "[4]"),
    ),
]
TENSORS: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (lambda: masks.Intervals(table(1, 1, 3, 2, dtype=torch.int64)), ("intervals", "int32", "torch.int64", ".int()")),
    (lambda: masks.Intervals(table(3, 2)), ("(batch or 1, heads or 1, queries, 2n)", "(3, 2)", "size 1")),
    (lambda: masks.Intervals(table(1, 1, 3, 3)), ("2n", "from 1 to 4", "(1, 1, 3, 3)")),
    (lambda: masks.Intervals(table(1, 1, 3, 10)), ("2n", "from 1 to 4", "(1, 1, 3, 10)")),
    (lambda: masks.Intervals(table(1, 1, 3, 0)), ("2n", "from 1 to 4", "(1, 1, 3, 0)")),
    (lambda: masks.Intervals(table(1, 1, 2, 3).mT), ("contiguous in the last dimension", "strides", ".contiguous()")),
    (lambda: two & masks.causal(3), ("same number of queries", "(1, 1, 2, 2) and (1, 1, 3, 2)", "rows()")),
    (lambda: two | masks.causal(1), ("same number of queries", "(1, 1, 2, 2) and (1, 1, 1, 2)")),
    (lambda: two & masks.Intervals(table(1, 2, 2)), ("(1, 1, 2, 2) and (1, 2, 2)",)),
    (
        lambda: masks.Intervals(table(2, 1, 2, 2)) | masks.Intervals(table(3, 1, 2, 2)),
        ("same batch and heads or 1", "(2, 1, 2, 2) and (3, 1, 2, 2)"),
    ),
    (lambda: two & two.to("meta"), ("one device", "cpu and meta", "to()")),
    (lambda: masks.documents(ids.float()), ("ids", "integer tensor", "torch.float32", ".int()")),
    (lambda: masks.documents(ids > 0), ("ids", "integer tensor", "torch.bool", ".int()")),
    (lambda: masks.documents(ids[None, None]), ("ids", "(tokens,) or (batch, tokens)", "(1, 1, 3)")),
    (lambda: masks.documents(cu_seqlens=ids[None]), ("cu_seqlens", "(documents + 1,)", "(1, 3)")),
    (lambda: masks.documents(cu_seqlens=ids[:0]), ("cu_seqlens", "(documents + 1,)", "(0,)")),
    (lambda: masks.prefix_lm(3, ids[None]), ("lengths", "an int or (batch,)", "(1, 3)")),
    (lambda: masks.blocks_within_causal(ids.float()), ("ids", "integer tensor", "torch.float32")),
    (lambda: masks.shared_prefix(ids.float()), ("branches", "integer tensor", "torch.float32")),
    (lambda: masks.tree(ids.float()), ("parents", "integer tensor", "torch.float32")),
    (lambda: two.packed(ids[:1]), ("cu_seqlens (batch + 1,)", "(1, 1, 2, 2) and (1,)")),
    (lambda: masks.Intervals(table(1, 2, 2)).packed(ids), ("(batch or 1, heads or 1, queries, 2n)", "(1, 2, 2)")),
    (lambda: two.packed(torch.tensor([0, 3])), ("3 tokens", "2 rows")),
    (lambda: masks.from_mask(table(2, 2)), ("mask", "bool, True = seen", "torch.int32", "mask.bool()")),
    (lambda: masks.from_mask(torch.ones(3, dtype=torch.bool)), ("mask", "queries, keys", "(3,)")),
    (
        lambda: masks.from_flashmask(table(1, 1, 3, 4), causal=True),
        ("startend_row_indices", "1 or 2", "causal=True", "(1, 1, 3, 4)"),
    ),
    (
        lambda: masks.from_flashmask(table(1, 1, 3, 1), causal=False),
        ("startend_row_indices", "2 or 4", "causal=False", "(1, 1, 3, 1)"),
    ),
    (lambda: masks.from_flashmask(table(3, 1), causal=True), ("startend_row_indices", "(3, 1)")),
    (lambda: masks.from_cudnn(table(1, 2, 3)), ("mask_func", "an odd number of bounds", "(1, 2, 3)")),
    (lambda: masks.from_cudnn(table(3, 3)), ("mask_func", "an odd number of bounds", "(3, 3)")),
    (lambda: masks.from_cudnn(table(1, 1, 3), batch=2), ("mask_func", "3 queries", "batch=2")),
    (lambda: masks.from_magi(table(2), table(1, 2), queries=3, keys=3), ("q_ranges", "(slices, 2)", "(2,)")),
    (lambda: masks.from_magi(table(1, 3), table(1, 2), queries=3, keys=3), ("q_ranges", "(slices, 2)", "(1, 3)")),
    (lambda: masks.from_magi(table(1, 2), table(2, 2), queries=3, keys=3), ("same slices", "1, 2 and 1")),
    (lambda: masks.documents(cu_seqlens=torch.tensor([0, 4, 2, 6])), ("cu_seqlens decreases", "running sum")),
    (lambda: masks.documents(cu_seqlens=torch.tensor([-3, 4])), ("cu_seqlens begins with -3", "0 or more")),
    (lambda: masks.causal(6).packed(torch.tensor([0, 4, 2, 6])), ("cu_seqlens decreases", "running sum")),
    (lambda: masks.causal(6).packed(torch.tensor([2, 4])), ("cu_seqlens begins with 2", "begins with 0")),
    (
        lambda: masks.from_mask_mod(lambda b, h, i, j: (i >= j).int() + 1, 1, 1, 3, 3),
        ("mask_mod returns torch.int32", "expected torch.bool", ".bool()"),
    ),
]


@pytest.mark.parametrize(
    ("exception", "call", "says"),
    [
        (exception, *case)
        for exception, cases in ((TypeError, TYPES), (ValueError, VALUES), (RuntimeError, TENSORS))
        for case in cases
    ],
)
def test_bad_input_is_refused(exception, call, says):
    with pytest.raises(exception) as caught:
        call()
    assert type(caught.value) is exception
    assert_says(caught.value, says)
