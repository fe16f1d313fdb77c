"""Lengths, tables and indices in a GPU's memory are not looked at before the kernels run: wrong ones stay harmless."""

import pytest
import torch

from flash_attn_ext import attention_with_kvcache
from support.params import computes_in

pytestmark = computes_in(torch.bfloat16)

GARBAGE = (-(2**31), -1, 7, 95, 96, 1000, 2**31 - 1)
CAPACITY, PAGE_SIZE, PAGES = 96, 16, 12
SPARE = 3  # pages before and after those that the call gets


class Garbled:
    """Sequences whose lengths, and pages or entries, are garbage, in caches with other memory around them."""

    def __init__(self, is_paged: bool, device: str):
        self.device = device
        self.buffers = [self.normal(PAGES + 2 * SPARE, 2, PAGE_SIZE, 64) for _ in range(2)]
        self.caches = [buffer[SPARE:-SPARE] for buffer in self.buffers]
        if is_paged:
            rows = [(GARBAGE[i:] + GARBAGE[:i])[: CAPACITY // PAGE_SIZE] for i in range(len(GARBAGE))]
            self.name, self.places = "block_table", self.integers(rows)
        else:  # two entries in the same memory
            self.caches = [cache.reshape(-1).view(2, 2, CAPACITY, 64) for cache in self.caches]
            self.name, self.places = "cache_batch_idx", self.integers(GARBAGE)
        self.lengths = self.integers(GARBAGE)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def integers(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def call(self, q: torch.Tensor, lengths: torch.Tensor, places: torch.Tensor, **options) -> torch.Tensor:
        return attention_with_kvcache(q, *self.caches, cache_seqlens=lengths, **{self.name: places}, **options)


@pytest.fixture(params=["contiguous", "paged"])
def garbled(request, backend) -> Garbled:
    if backend.is_cpu:
        pytest.skip("checked there, and an error")
    return Garbled(request.param == "paged", backend.device)


@pytest.mark.parametrize("queries", [1, 40])  # of which Hopper has kernels of its own for the larger
def test_values_are_clamped(queries, garbled, backend):
    q = garbled.normal(len(GARBAGE), 4, queries, 64)
    out = garbled.call(q, garbled.lengths, garbled.places, backend=backend.name)
    clamped = garbled.lengths.clamp(0, CAPACITY), garbled.places.clamp(0, len(garbled.caches[0]) - 1)
    assert torch.equal(out, garbled.call(q, *clamped, backend=backend.name))


@pytest.mark.parametrize("new", [1, 40])
def test_nothing_else_is_written(new, garbled, backend):
    """New tokens go to rows of the caches or are dropped, also where positions are past the rotary tables."""
    before = [buffer.clone() for buffer in garbled.buffers]
    q, table = garbled.normal(len(GARBAGE), 4, new, 64), garbled.normal(50, 16)
    options = {name: garbled.normal(len(GARBAGE), 2, new, 64) for name in ("k_new", "v_new")}
    options |= dict(rotary_cos=table, rotary_sin=table)
    garbled.call(q, garbled.lengths, garbled.places, **options, backend=backend.name)
    torch.cuda.synchronize()
    for buffer, old in zip(garbled.buffers, before, strict=True):
        assert torch.equal(buffer[:SPARE], old[:SPARE])
        assert torch.equal(buffer[-SPARE:], old[-SPARE:])


def test_the_switch_asks_for_the_checks(garbled, backend, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_CHECK", "1")
    with pytest.raises(RuntimeError, match=r"cache_seqlens\[0\] is -2147483648, expected 0 to 96"):
        garbled.call(garbled.normal(len(GARBAGE), 4, 1, 64), garbled.lengths, garbled.places, backend=backend.name)
