"""Problems with a cache of keys and values as data, through attention_with_kvcache and its reference."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

import flash_attn_ext
from flash_attn_ext.reference import attention_with_kvcache_reference
from support.backends import Backend
from support.cases import Case, accumulate_dtype, make_inputs
from support.checks import check_draws
from support.errors import Comparison, compare
from support.runners import Result, poisoned_memory
from support.strides import integer_of

UNUSED_PAGES = 3
UNUSED_ENTRIES = 2
NO_PAGE = (-1, 2**31 - 1, -(2**31))  # what a table holds where a sequence has no keys yet


@dataclass(frozen=True)
class CacheCase:
    """`base` carries q and the features; its batch and sk follow from the lengths and the capacity."""

    lengths: tuple[int, ...]  # before the call
    new: int = 0
    capacity: int = 96
    page_size: int | None = None  # None: contiguous
    shared_pages: int = 0  # that every sequence begins with
    indexed: bool = False  # cache_batch_idx, into a cache with more entries
    rotary_dim: int = 0
    interleaved: bool = False
    base: Case = Case(sq=1, causal="bottom_right")

    def __str__(self) -> str:
        changed = ["len" + "_".join(map(str, self.lengths)), f"cap{self.capacity}"]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name not in ("lengths", "capacity", "base") and value != f.default:
                changed.append(f.name if value is True else f"{f.name}={value}")
        features = [part for part in str(self.base).split("-") if part[0] != "k" or not part[1:].isdigit()]
        return "-".join([*changed, *features])

    def dense(self) -> Case:
        """The case whose q, bias, mask, slopes and sink have the shapes of this one."""
        return dataclasses.replace(self.base, batch=len(self.lengths), sk=self.capacity)


@dataclass
class CacheInputs:
    """In (B, H, S, D) and (entries or pages, H, rows, D)."""

    case: CacheCase
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tensors: dict[str, torch.Tensor | None]  # all other tensors, by keyword

    def to(self, dtype: torch.dtype) -> CacheInputs:
        """Every floating tensor in one dtype."""

        def cast(tensor):
            return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor

        tensors = {name: cast(tensor) for name, tensor in self.tensors.items()}
        return CacheInputs(self.case, cast(self.q), cast(self.k_cache), cast(self.v_cache), tensors)

    def keywords(self) -> dict:
        case = self.case
        return dict(self.tensors, rotary_interleaved=case.interleaved, **case.base.options())


def make_cache_inputs(case: CacheCase, dtype: torch.dtype, device: str, seed: int = 0) -> CacheInputs:
    """Rows that no sequence has are NaN; pages lie in random order; tables hold no page where there are no keys."""
    dense, rng = case.dense(), random.Random(seed)
    inputs = make_inputs(dense, dtype, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(*shape: int, to: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, to)

    tensors = {name: getattr(inputs, name) for name in ("bias", "mask", "intervals", "alibi_slopes", "sink")}
    tensors["cache_seqlens"] = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    if case.new:
        tensors["k_new"] = normal(dense.batch, dense.num_kv_heads, case.new, dense.d)
        tensors["v_new"] = normal(dense.batch, dense.num_kv_heads, case.new, dense.head_dim_v)
    if case.rotary_dim:
        angles = torch.rand(case.capacity + dense.sq, case.rotary_dim // 2, generator=generator) * 2 * math.pi
        tensors["rotary_cos"], tensors["rotary_sin"] = (f(angles).to(device, dtype) for f in (torch.cos, torch.sin))
    if case.page_size is None:
        num_entries, rows = dense.batch + UNUSED_ENTRIES * case.indexed, case.capacity
        entries = rng.sample(range(num_entries), dense.batch) if case.indexed else range(dense.batch)
        used = [[(entry, length)] for entry, length in zip(entries, case.lengths, strict=True)]
        if case.indexed:
            tensors["cache_batch_idx"] = torch.tensor(list(entries), dtype=torch.int32, device=device)
    else:
        table, num_entries = _draw_table(case, rng)
        rows = case.page_size
        used = [
            [(page, min(rows, length - i * rows)) for i, page in enumerate(pages) if length > i * rows]
            for pages, length in zip(table, case.lengths, strict=True)
        ]
        tensors["block_table"] = torch.tensor(table, dtype=torch.int32, device=device)
    caches = [torch.full((num_entries, dense.num_kv_heads, rows, d), math.nan) for d in (dense.d, dense.head_dim_v)]
    caches = [cache.to(device, dtype) for cache in caches]
    for cache in caches:
        for entry, count in (place for places in used for place in places):
            cache[entry, :, :count] = normal(*cache[entry, :, :count].shape)
    return CacheInputs(case, inputs.q, *caches, tensors)


def _draw_table(case: CacheCase, rng: random.Random) -> tuple[list[list[int]], int]:
    pages_each = case.capacity // case.page_size
    assert pages_each * case.page_size == case.capacity
    own = pages_each - case.shared_pages
    num_pages = case.shared_pages + own * len(case.lengths) + UNUSED_PAGES
    pages = rng.sample(range(num_pages), num_pages)
    shared, pages = pages[: case.shared_pages], pages[case.shared_pages :]
    table = []
    for b, length in enumerate(case.lengths):
        row = shared + pages[b * own : (b + 1) * own]
        num_used = -(-(length + case.new) // case.page_size)
        table.append(row[:num_used] + [rng.choice(NO_PAGE) for _ in row[num_used:]])
    return table, num_pages


def call_with_cache(inputs: CacheInputs, backend: Backend, **more):
    """Returns (out, lse), and what `more` asks for, out in (B, H, S, Dv) whatever the layout; writes the caches."""
    q, k_cache, v_cache, keywords = inputs.q, inputs.k_cache, inputs.v_cache, inputs.keywords() | more
    layout = inputs.case.base.layout
    if layout == "bshd":
        q, k_cache, v_cache = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
        new = {n: t.transpose(1, 2) for n in ("k_new", "v_new") if (t := keywords.get(n)) is not None}
        keywords |= new
    out, *others = flash_attn_ext.attention_with_kvcache(
        q, k_cache, v_cache, **keywords, layout=layout, return_lse=True, backend=backend.name
    )
    return (out.transpose(1, 2) if layout == "bshd" else out), *others


def run_with_cache(inputs: CacheInputs, backend: Backend) -> Result:
    """out, lse and the caches after the call; the inputs stay as they are."""
    caches = inputs.k_cache.clone(), inputs.v_cache.clone()
    with poisoned_memory():
        out, lse = call_with_cache(dataclasses.replace(inputs, k_cache=caches[0], v_cache=caches[1]), backend)
    return {"out": out, "lse": lse, "k_cache": caches[0], "v_cache": caches[1]}


def run_reference_with_cache(inputs: CacheInputs) -> Result:
    results = attention_with_kvcache_reference(inputs.q, inputs.k_cache, inputs.v_cache, **inputs.keywords())
    return dict(zip(("out", "lse", "k_cache", "v_cache"), results, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(integer_of(tensor.dtype))


def assert_appended(inputs: CacheInputs, ours: Result, exact: Result) -> None:
    """Values are copied and keys rounded once; every other row of the caches has the bits that it had."""
    for name, given in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
        is_new = given.isnan() & ~exact[name].isnan()
        kept, before = (bits(cache).masked_fill(is_new, 0) for cache in (ours[name], given))
        assert torch.equal(kept, before), f"{name}: a row changed that is not new"
        written, expected = ours[name][is_new], exact[name][is_new]
        rounding = torch.finfo(given.dtype).eps if name == "k_cache" and inputs.case.rotary_dim else 0.0
        torch.testing.assert_close(
            written.double(), expected, rtol=rounding, atol=2 * rounding, msg=f"{name}: new rows"
        )


def check_cache_case(case: CacheCase, dtype: torch.dtype, backend: Backend) -> None:
    check_cache_drawn(lambda seed: make_cache_inputs(case, dtype, backend.device, seed), backend, run_with_cache)


def check_cache_drawn(
    draw: Callable[[int], CacheInputs], backend: Backend, run: Callable[[CacheInputs, Backend], Result]
) -> None:
    """The error rule for out and lse, and what the caches hold afterwards, for the inputs that `draw` makes."""

    def errors(inputs: CacheInputs, ours: Result) -> dict[str, Comparison]:
        dtype = inputs.q.dtype
        exact, yardstick = (run_reference_with_cache(each) for each in (inputs.to(torch.float64), inputs))
        if not inputs.case.rotary_dim:  # which rounds q and keys to their dtype, whatever scores are computed in
            yardstick["lse"] = run_reference_with_cache(inputs.to(accumulate_dtype(dtype)))["lse"]
        assert (ours["out"].dtype, ours["lse"].dtype) == (dtype, accumulate_dtype(dtype))
        assert_appended(inputs, ours, exact)
        return {name: compare(ours[name], yardstick[name], exact[name]) for name in ("out", "lse")}

    check_draws(draw, backend, run=lambda inputs: run(inputs, backend), errors=errors)
