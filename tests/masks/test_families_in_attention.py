"""``attention`` takes intervals of each family in place of a tensor, and answers as with the boolean mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_ext import attention, attention_varlen, masks
from flash_attn_ext.reference import attention_reference
from support.mask_families import FAMILIES, draw_family

TOLERANCE = 2e-4  # float32 on a GPU is made of TF32 products


def leaves(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20)
@given(st.data())
def test_each_family(name, backend, data):
    drawn = draw_family(name, data.draw, backend.device)
    q, k, v = leaves(
        backend.device, (drawn.batch, 4, drawn.queries, 16), *[(drawn.batch, 2, drawn.keys, 16) for _ in range(2)]
    )
    out = attention(q, k, v, intervals=drawn.intervals, backend=backend.name)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected, _ = attention_reference(*exact, mask=drawn.intervals.dense(drawn.keys))
    for result, answer in zip(
        (out, *gradients), (expected, *torch.autograd.grad(expected, exact, dout.double())), strict=True
    ):
        torch.testing.assert_close(result.double(), answer, rtol=TOLERANCE, atol=TOLERANCE)


def test_packed_sequences(backend):
    """A prefix of its own length in each sequence."""
    lengths = torch.tensor([5, 0, 9, 1])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(backend.device)
    prefixes = masks.prefix_lm(9, torch.tensor([3, 1, 20, 0]), device=backend.device)
    q, k, v = leaves(backend.device, *[(15, 2, 16)] * 3)
    out = attention_varlen(q, k, v, ends, ends, intervals=prefixes.packed(ends), backend=backend.name)
    for index, (begin, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        sequence = [t[begin:end].transpose(0, 1).double() for t in (q, k, v)]
        seen = prefixes.dense(end - begin)[index, :, : end - begin]
        expected, _ = attention_reference(*sequence, mask=seen)
        torch.testing.assert_close(out[begin:end].double(), expected.transpose(0, 1), rtol=TOLERANCE, atol=TOLERANCE)


def test_rows_of_new_tokens(backend):
    """The last queries of a mask, behind the keys of a cache."""
    intervals = masks.global_and_window(12, 2, (3, 0), device=backend.device) & masks.causal(12, device=backend.device)
    q, k, v = leaves(backend.device, *[(1, 2, 12, 16)] * 3)
    whole = attention(q, k, v, intervals=intervals, backend=backend.name)
    last = attention(q[:, :, -3:], k, v, intervals=intervals.rows(-3), backend=backend.name)
    torch.testing.assert_close(last, whole[:, :, -3:], rtol=TOLERANCE, atol=TOLERANCE)
