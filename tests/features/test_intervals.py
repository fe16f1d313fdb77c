"""Intervals of keys for each query: a mask of O(S) memory, which obeys every rule of a boolean mask."""

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.reference import attention_reference
from support.cases import Case, Inputs, make_inputs
from support.checks import check_case, check_inputs, check_packed_drawn
from support.errors import assert_same_answer
from support.packed import PackedCase, make_packed
from support.params import FOR_GPUS, computes_in, for_gpus, over_cases, over_dtypes
from support.runners import run_ours

POISON = float("nan")
PATTERNS = ("11", "1h", "b1", "bh")
CASES = [
    Case(sq=140, sk=270, d=16, batch=3, heads=4, kv_heads=2, intervals=pattern, num_intervals=count)
    for pattern, count in zip(PATTERNS, (1, 2, 3, 4), strict=True)
]
# Neighbouring queries with the same intervals hide whole tiles, and leave whole tiles.
BLOCKS = [
    Case(sq=330, sk=700, d=16, intervals="b1", num_intervals=n, interval_rows=rows) for n, rows in ((1, 64), (3, 90))
]
SHAPE = dict(sq=140, sk=270, d=16, heads=4, kv_heads=2, intervals="1h", num_intervals=2, interval_rows=50)
COMBINED = [
    Case(**SHAPE, causal="top_left", dlse=True),
    Case(**SHAPE, causal="bottom_right", window=(60, None)),
    Case(**SHAPE, window=(40, 30), sink=True, dlse=True),
    Case(**SHAPE, mask="bhqk"),
    Case(**SHAPE, mask="b11k", padding=True, causal="bottom_right"),
    Case(**SHAPE, mask="11q1", softcap=5.0),
    Case(**SHAPE, bias="1hqk", dlse=True),
    Case(**SHAPE, bias="b11k", bias_float32=True, mask="11qk"),
    Case(**SHAPE, alibi="bh", softcap=5.0, sink=True),
    Case(**SHAPE, dropout_p=0.3, causal="top_left"),
    Case(**SHAPE, dropout_p=0.2, bias="bhqk", alibi="h", softcap=3.0, sink=True, mask="b11k", dlse=True),
]


def long_cases(d: int) -> list[Case]:
    return [
        Case(sq=sq, sk=sk, d=d, heads=4, kv_heads=2, causal=causal, dlse=d == 64, intervals=pattern, **more)
        for sq, sk, causal, pattern, more in (
            (500, 500, "bottom_right", "11", dict(interval_rows=100)),
            (500, 500, "bottom_right", "bh", dict(interval_rows=70)),
            (500, 730, None, "bh", dict(interval_rows=64, num_intervals=2)),
            (410, 640, None, "1h", dict(num_intervals=4)),
        )
    ]


# The kernels of a GPU for each head dim, with as many tiles as they loop over. The CPU has the same tiles for all.
LONG = [*long_cases(64), *for_gpus(case for d in (96, 128, 192, 256) for case in long_cases(d))]
LONG_BIASED = [
    Case(sq=400, sk=640, d=d, intervals="11", interval_rows=64, num_intervals=2, bias=bias)
    for d in (64, 128)
    for bias in ("1hqk", "b11k")
]
# Few queries on long sequences, whose keys several CTAs share; one tile of queries.
FEW = [
    Case(sq=2, sk=4200, d=64, heads=4, kv_heads=2, intervals="b1", num_intervals=3, bias=bias, mask=mask)
    for bias, mask in ((None, None), ("1hqk", None), (None, "b11k"), ("b11k", "1hqk"))
]
PACKED = [
    PackedCase((65, 0, 130, 33), (65, 7, 200, 33), Case(d=16, heads=4, kv_heads=2, intervals="1h", num_intervals=2)),
    PackedCase((65, 130, 33), (65, 200, 40), Case(d=64, intervals="11", causal="bottom_right", dlse=True)),
    PackedCase((300, 129, 64), (300, 257, 64), Case(d=128, intervals="11", num_intervals=4, window=(100, None))),
    PackedCase((65, 130), (65, 200), Case(d=16, intervals="1h", mask="b1qk", bias="1hqk", dropout_p=0.2)),
]


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(CASES + BLOCKS)
def test_every_broadcast_shape(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float64, torch.float32, torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(COMBINED)
def test_with_every_other_feature(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(LONG + LONG_BIASED)
def test_kernels_of_each_head_dim(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(FEW)
def test_few_queries(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


def rows(*bounds) -> torch.Tensor:
    """(1, 1, Sq, 2 n) of columns (Sq,)."""
    columns = torch.broadcast_tensors(*(torch.as_tensor(bound) for bound in bounds))
    return torch.stack(columns, -1).int()[None, None]


S = 700
QUERY = torch.arange(S)
DOCUMENTS = QUERY // 150 * 150
FAMILIES = {
    "documents": rows(DOCUMENTS, (DOCUMENTS + 150).clamp(max=S)),
    "causal documents": rows(DOCUMENTS, QUERY + 1),
    "prefix": rows(0, torch.maximum(QUERY + 1, torch.tensor(200))),
    "image blocks": rows(0, torch.where(QUERY % 200 < 100, QUERY // 200 * 200 + 100, QUERY + 1).clamp(max=S)),
    "chunks": rows(QUERY // 256 * 256, QUERY + 1),
    "global and window": rows(0, torch.minimum(QUERY + 1, torch.tensor(64)), (QUERY - 100).clamp(min=0), QUERY + 1),
    "secretly causal": rows(0, QUERY + 1),
    "in parts that touch": rows(0, QUERY // 2, QUERY // 2, QUERY + 1),
    "reversed and overlapping": rows((QUERY - 30).clamp(min=0), QUERY + 1, 0, 100, 50, 60, 90, 20),
    "of one key": rows(QUERY, QUERY + 1, 3, 4),
}


def of_family(name: str, dtype: torch.dtype, device: str, d: int = 64) -> Inputs:
    inputs = make_inputs(Case(sq=S, sk=S, d=d, heads=4, kv_heads=2), dtype, device)
    return inputs.replace(intervals=FAMILIES[name].to(device))


@over_dtypes((torch.float32, *for_gpus([torch.bfloat16])))
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_masks(name, d, dtype, backend):
    check_inputs(of_family(name, dtype, backend.device, d), backend)


@FOR_GPUS
@computes_in(torch.bfloat16)
@pytest.mark.parametrize("d", [64, 128])
def test_many_tiles(d, backend):
    """More key tiles than a warp has lanes. Some are seen by all queries, some by those of their document."""
    s = 4700
    query = torch.arange(s)
    documents = query // 1500 * 1500
    intervals = rows(0, torch.where(query < 2900, 20, 70), documents, query + 1)
    inputs = make_inputs(Case(sq=s, sk=s, d=d, heads=3, kv_heads=1), torch.bfloat16, backend.device)
    check_inputs(inputs.replace(intervals=intervals.to(backend.device)), backend)


@FOR_GPUS
@computes_in(torch.bfloat16)
def test_far_apart(backend):
    """More hidden tiles lie between intervals than a tile's flags can count. A boolean mask gives the same results."""
    keys, query = 70_000, torch.arange(150)
    intervals = rows(query, query + 40, 3000 + query, 3040, 4000, 4001 + query, keys - 70, keys - query % 3)
    inputs = make_inputs(Case(sq=150, sk=keys, d=64, heads=1, batch=1), torch.bfloat16, backend.device)
    inputs = inputs.replace(intervals=intervals.to(backend.device))
    masked = run_ours(inputs.replace(mask=inputs.whole_mask, intervals=None), backend)
    for result, found in run_ours(inputs, backend).items():
        torch.testing.assert_close(found.float(), masked[result].float(), rtol=2e-2, atol=2e-2)


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", FAMILIES)
def test_same_as_the_boolean_mask(name, dtype, backend):
    inputs = of_family(name, dtype, backend.device)
    masked = run_ours(inputs.replace(mask=inputs.whole_mask, intervals=None), backend)
    for result, found in run_ours(inputs, backend).items():
        torch.testing.assert_close(found.float(), masked[result].float(), rtol=2e-2, atol=2e-2)


@over_dtypes()
@pytest.mark.parametrize("empty", [[0], [127, 128], list(range(140)), list(range(128, 140))], ids=str)
def test_rows_without_keys(empty, dtype, backend):
    """Output 0, LSE -inf, gradients 0; the other rows as if the empty ones were not there."""
    inputs = make_inputs(Case(sq=140, sk=270, intervals="11", num_intervals=2, dlse=True), dtype, backend.device)
    inputs.intervals[:, :, empty] = torch.tensor([5, 5, 200, 100], dtype=torch.int32, device=backend.device)
    result = check_inputs(inputs, backend)
    assert bool((result["out"][:, :, empty] == 0).all())
    assert bool((result["lse"][:, :, empty] == -float("inf")).all())
    assert bool((result["dq"][:, :, empty] == 0).all())


@over_dtypes((torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("d", [16, 64, 128])
def test_what_hidden_keys_hold_reaches_nothing(d, dtype, backend):
    inputs = make_inputs(Case(sq=300, sk=400, d=d, intervals="11", num_intervals=2), dtype, backend.device)
    inputs.intervals[..., :] = torch.tensor([10, 190, 260, 390], dtype=torch.int32, device=backend.device)
    hidden = ~inputs.whole_mask[0, 0, 0]
    where = hidden[:, None]
    poisoned = inputs.replace(k=inputs.k.masked_fill(where, POISON), v=inputs.v.masked_fill(where, POISON))
    result, clean = run_ours(poisoned, backend), run_ours(inputs, backend)
    for name in clean:
        assert_same_answer(result[name], clean[name], backend, name)
    assert bool((result["dk"][:, :, hidden] == 0).all()) and bool((result["dv"][:, :, hidden] == 0).all())


@over_dtypes((torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("d", [64, 128])
def test_keys_that_some_rows_see(d, dtype, backend):
    """Rows that do not see a NaN keep their results."""
    inputs = of_family("chunks", dtype, backend.device, d)
    dirty = inputs.replace(k=inputs.k.clone(), v=inputs.v.clone())
    dirty.k[:, :, 300], dirty.v[:, :, 300] = POISON, POISON
    result, clean = run_ours(dirty, backend), run_ours(inputs, backend)
    untouched = torch.ones(S, dtype=torch.bool, device=backend.device)
    untouched[300:512] = False
    for name in ("out", "lse", "dq"):
        assert_same_answer(result[name], clean[name], backend, name, (slice(None), slice(None), untouched))
    for name in ("dk", "dv"):
        others = torch.ones(S, dtype=torch.bool, device=backend.device)
        others[256:512] = False
        assert_same_answer(result[name], clean[name], backend, name, (slice(None), slice(None), others))


@pytest.mark.parametrize("backward", [False, True])
@over_dtypes((torch.float32, torch.bfloat16))
def test_bitwise_reproducible(dtype, backward, backend):
    inputs = of_family("global and window", dtype, backend.device, 128)
    first, second = run_ours(inputs, backend), run_ours(inputs, backend)
    names = [name for name in first if name.startswith("d") == backward]
    assert all(torch.equal(first[name], second[name]) for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_of_range_is_clamped_on_a_gpu(dtype, backend):
    if backend.is_cpu:
        pytest.skip("the CPU raises an error")
    inputs = make_inputs(Case(sq=140, sk=270, d=64, intervals="11", num_intervals=2), dtype, backend.device)
    wild = inputs.intervals.clone()
    wild[..., 0, :] = torch.tensor([-(2**31), 50, 200, 2**31 - 1], dtype=torch.int32)
    wild[..., 1, :] = torch.tensor([2**31 - 1, -(2**31), 10, 20], dtype=torch.int32)
    tame = wild.clamp(0, 270)
    results = (run_ours(inputs.replace(intervals=bounds), backend) for bounds in (wild, tame))
    for found, expected in zip(*(result.values() for result in results), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(140, 4), (2, 140, 4), (1, 1, 140, 4)], ids=str)
def test_missing_dimensions_broadcast(shape, backend):
    inputs = make_inputs(Case(sq=140, sk=270, intervals="1h", num_intervals=2), torch.float32, backend.device)
    given = inputs.intervals[0, : shape[-3] if len(shape) > 2 else 1].reshape(shape)
    out = flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, intervals=given, backend=backend.name)
    full = given.expand(1, 2, 140, 4) if len(shape) > 2 else given[None, None]
    expected, _ = attention_reference(inputs.q, inputs.k, inputs.v, intervals=full)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lead", [(), (3,), (3, 2)], ids=str)
def test_other_ranks(lead, backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, 2, 30, 16, generator=generator).to(backend.device) for _ in range(3))
    begins = torch.arange(30, dtype=torch.int32).sub(7).clamp(min=0)
    intervals = torch.stack([begins, begins + 5], -1).to(backend.device)
    for given in (intervals, intervals.expand(*lead, 2, 30, 2).contiguous()):
        out = flash_attn_ext.attention(q, k, v, intervals=given, backend=backend.name)
        expected, _ = attention_reference(q, k, v, intervals=intervals)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


def test_an_object_of_masks(backend):
    intervals = flash_attn_ext.masks.Intervals(rows(0, torch.arange(30) + 1).to(backend.device))
    q = torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(0)).to(backend.device)
    out = flash_attn_ext.attention(q, q, q, intervals=intervals, backend=backend.name)
    expected = flash_attn_ext.attention(q, q, q, causal="top_left", backend=backend.name)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("num_queries", [1, 5, 70])
@over_dtypes((torch.float32, torch.bfloat16))
def test_over_a_cache(dtype, num_queries, page_size, backend):
    """Positions are those of keys in their sequence; keys that the cache does not hold yet are not seen."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, num_queries, 64, generator=generator).to(backend.device, dtype)
    shape = (3, 2, 320, 64) if page_size is None else (60, 2, 16, 64)
    caches = [torch.randn(shape, generator=generator).to(backend.device, dtype) for _ in range(2)]
    options = dict(cache_seqlens=torch.tensor([7, 100, 320], dtype=torch.int32, device=backend.device), causal=None)
    if page_size is not None:
        options["block_table"] = torch.arange(60, dtype=torch.int32, device=backend.device).view(3, 20)
    intervals = torch.tensor([0, 3, 90, 310], dtype=torch.int32).repeat(1, 1, num_queries, 1).to(backend.device)
    intervals[..., -1, :] = torch.tensor([2, 250, 300, 320], dtype=torch.int32)
    out = flash_attn_ext.attention_with_kvcache(q, *caches, **options, intervals=intervals, backend=backend.name)
    short = flash_attn_ext.attention_with_kvcache(
        q, *caches, **options, intervals=intervals[0, 0], backend=backend.name
    )
    assert torch.equal(short, out)
    expected = flash_attn_ext.reference.attention_with_kvcache_reference(
        q.double(), *(cache.double() for cache in caches), **options, intervals=intervals
    )[0]
    tolerance = 2e-3 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def call(intervals: torch.Tensor, **more) -> torch.Tensor:
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 9, 16)
    return flash_attn_ext.attention(q, k, k, intervals=intervals, **more)


WRONG = [
    (torch.zeros(2, 4, 5, 2), "intervals has dtype float32, expected int32"),
    (torch.zeros(2, 4, 5, 2, dtype=torch.int64), r"cast with intervals.to\(torch.int32\)"),
    (torch.zeros(2, 4, 6, 2, dtype=torch.int32), r"intervals has shape \[2, 4, 6, 2\].* 5 queries"),
    (torch.zeros(2, 3, 5, 2, dtype=torch.int32), r"intervals has shape \[2, 3, 5, 2\].* 4 heads"),
    (torch.zeros(3, 5, 2, dtype=torch.int32), r"intervals has shape \(3, 5, 2\), expected one that broadcasts"),
    (torch.zeros(2, 4, 5, 3, dtype=torch.int32), "3 columns, expected 2, 4, 6 or 8"),
    (torch.zeros(2, 4, 5, 10, dtype=torch.int32), "10 columns, expected 2, 4, 6 or 8.*mask="),
    (torch.zeros(2, 4, 5, 0, dtype=torch.int32), "0 columns, expected 2, 4, 6 or 8"),
]


@pytest.mark.parametrize(("intervals", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_tensors_are_refused(intervals, message):
    with pytest.raises(RuntimeError, match=message):
        call(intervals)


@pytest.mark.parametrize("value", [-1, 10])
def test_positions_out_of_range_are_refused_on_the_cpu(value):
    intervals = torch.zeros(1, 1, 5, 4, dtype=torch.int32)
    intervals[0, 0, 3, 1] = value
    with pytest.raises(ValueError, match=r"intervals has values from .* expected positions from 0 to 9"):
        call(intervals)


def test_something_else_is_refused():
    with pytest.raises(TypeError, match=r"intervals must be a torch\.Tensor, got list"):
        call([[0, 1]])


def test_positions_of_each_packed_sequence_are_checked():
    q = torch.randn(8, 2, 16)
    cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
    intervals = torch.zeros(1, 8, 2, dtype=torch.int32)
    intervals[:, :5, 1] = 5
    flash_attn_ext.attention_varlen(q, q, q, cu_seqlens, cu_seqlens, intervals=intervals)
    intervals[:, 6, 1] = 4
    with pytest.raises(ValueError, match="expected positions from 0 to 3"):
        flash_attn_ext.attention_varlen(q, q, q, cu_seqlens, cu_seqlens, intervals=intervals)


@FOR_GPUS
@computes_in(torch.bfloat16)
def test_a_long_sequence_takes_little_memory(backend):
    """Far less than a mask, which would have a byte for each pair. Portable backward passes may store scores."""
    s = 16384
    q = torch.randn(1, 2, s, 64, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(s, dtype=torch.int32, device=backend.device)
    intervals = torch.stack([positions // 1024 * 1024, positions + 1], -1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_attn_ext.attention(q, q, q, intervals=intervals, backend=backend.name)
    if backend.name == "sm90":
        out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < s * s // 4
