"""Lists of blocks of keys for each block of queries: a mask of a byte for each pair of blocks, which obeys every rule
of a boolean mask."""

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import _C
from flash_attn_ext.masks import BlockLists, from_blocks
from flash_attn_ext.reference import attention_reference
from support.cases import Case, Inputs, make_inputs
from support.checks import check_case, check_inputs
from support.errors import assert_same_answer
from support.params import FOR_GPUS, computes_in, for_gpus, over_cases, over_dtypes
from support.runners import run_ours

POISON = float("nan")
SIZES = ((64, 64), (64, 128), (128, 64), (128, 128))
PATTERNS = ("11", "1h", "bk", "bh")
CASES = [
    Case(sq=330, sk=460, d=16, batch=3, heads=4, kv_heads=2, blocks=pattern, block_sizes=sizes)
    for pattern, sizes in zip(PATTERNS, SIZES, strict=True)
]
SHAPE = dict(sq=200, sk=330, d=16, heads=4, kv_heads=2, blocks="1k", block_keep=0.6)
COMBINED = [
    Case(**SHAPE, causal="top_left", dlse=True),
    Case(**SHAPE, causal="bottom_right", window=(160, None), block_sizes=(128, 64)),
    Case(**SHAPE, window=(90, 100), sink=True, dlse=True, block_sizes=(64, 128)),
    Case(**SHAPE, intervals="1h", num_intervals=2),
    Case(**SHAPE, intervals="b1", num_intervals=4, interval_rows=64, causal="bottom_right", block_sizes=(128, 128)),
    Case(**SHAPE, mask="bhqk"),
    Case(**SHAPE, mask="b11k", padding=True, causal="bottom_right"),
    Case(**SHAPE, mask="11q1", intervals="11", num_intervals=3, softcap=5.0),
    Case(**SHAPE, bias="1hqk", dlse=True),
    Case(**SHAPE, bias="b11k", bias_float32=True, mask="11qk"),
    Case(**SHAPE, bias="11q1", intervals="11", num_intervals=2),
    Case(**SHAPE, alibi="bh", softcap=5.0, sink=True),
    Case(**SHAPE, dropout_p=0.3, causal="top_left"),
    Case(**SHAPE, dropout_p=0.2, bias="bhqk", alibi="h", softcap=3.0, sink=True, mask="b11k", dlse=True),
    Case(**SHAPE, dv=24, layout="bshd"),
]


def long_cases(d: int) -> list[Case]:
    shape = dict(sq=700, sk=930, d=d, heads=4, kv_heads=2, dlse=d == 64)
    return [
        Case(**shape, blocks="1h", block_sizes=(128, 128)),
        Case(**shape, blocks="bk", block_sizes=(64, 64), causal="bottom_right"),
        Case(**shape, blocks="11", block_sizes=(128, 64), block_keep=0.15),
        Case(**shape, blocks="11", block_sizes=(64, 128), intervals="bh", num_intervals=3, interval_rows=50),
    ]


# The kernels of a GPU for each head dim, with as many tiles as they loop over. The CPU has the same tiles for all.
LONG = [*long_cases(64), *for_gpus(case for d in (40, 96, 128, 192, 256) for case in long_cases(d))]
LONG_BIASED = [
    Case(sq=400, sk=640, d=d, blocks="1h", block_sizes=sizes, bias=bias)
    for d in (64, 128)
    for bias, sizes in (("1hqk", (64, 64)), ("b11k", (128, 128)))
]
# Few queries on long sequences, whose keys several CTAs share; one tile of queries.
FEW = [
    Case(sq=sq, sk=4200, d=64, heads=4, kv_heads=2, blocks="bk", block_sizes=sizes, **more)
    for sq, sizes, more in (
        (2, (64, 64), {}),
        (40, (64, 128), {}),
        (2, (128, 128), dict(bias="1hqk")),
        (2, (64, 64), dict(mask="b11k", intervals="11", num_intervals=2)),
    )
]


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(CASES)
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


S = 770
QUERY_BLOCKS = {size: torch.arange(-(-S // size)) for size in (64, 128)}


def own_and_earlier(size: int) -> torch.Tensor:
    """As MoBA lists blocks: the own block, and a few earlier ones."""
    query, key = QUERY_BLOCKS[size][:, None], QUERY_BLOCKS[size]
    return (query == key) | ((key < query) & ((query * 7 + key * 3) % 4 == 0))


MASKS = {
    "all": lambda size: torch.ones(len(QUERY_BLOCKS[size]), len(QUERY_BLOCKS[size]), dtype=torch.bool),
    "own": lambda size: torch.eye(len(QUERY_BLOCKS[size]), dtype=torch.bool),
    "first": lambda size: QUERY_BLOCKS[size].expand(len(QUERY_BLOCKS[size]), -1) == 0,
    "every other": lambda size: (QUERY_BLOCKS[size][:, None] + QUERY_BLOCKS[size]) % 2 == 0,
    "own and earlier": own_and_earlier,
}


def of_mask(name: str, size: int, dtype: torch.dtype, device: str, d: int = 64, **more) -> Inputs:
    case = Case(sq=S, sk=S, d=d, heads=4, kv_heads=2, block_sizes=(size, size), **more)
    lists = from_blocks(MASKS[name](size)[None, None].to(device))
    return make_inputs(case, dtype, device).replace(block_counts=lists.counts, block_indices=lists.indices)


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks(name, size, d, dtype, backend):
    check_inputs(of_mask(name, size, dtype, backend.device, d, causal="bottom_right"), backend)


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_same_as_the_boolean_mask(name, size, dtype, backend):
    inputs = of_mask(name, size, dtype, backend.device)
    masked = run_ours(inputs.replace(mask=inputs.whole_mask, block_counts=None), backend)
    for result, found in run_ours(inputs, backend).items():
        torch.testing.assert_close(found.float(), masked[result].float(), rtol=2e-2, atol=2e-2)


@FOR_GPUS
@computes_in(torch.bfloat16)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("d", [64, 128])
def test_far_apart(d, size, backend):
    """More hidden tiles lie between blocks than a tile's flags can count, and more than a warp or a CTA looks at."""
    keys = 70_000
    width = -(-keys // size)
    listed = torch.tensor([[0, 3, width // 3, width - 40, width - 1], [1, width // 2, width - 2, 0, 0]])
    counts = torch.tensor([5, 3]).repeat(2)[: -(-150 // size)]
    inputs = make_inputs(
        Case(sq=150, sk=keys, d=d, heads=1, batch=1, block_sizes=(size, size)), torch.bfloat16, backend.device
    )
    inputs = inputs.replace(
        block_counts=counts[None, None].to(backend.device),
        block_indices=listed.repeat(2, 1)[None, None, : len(counts)].to(backend.device),
    )
    masked = run_ours(inputs.replace(mask=inputs.whole_mask, block_counts=None), backend)
    for result, found in run_ours(inputs, backend).items():
        torch.testing.assert_close(found.float(), masked[result].float(), rtol=2e-2, atol=2e-2)


@over_dtypes()
@pytest.mark.parametrize("d", [16, 64, 128])
def test_rows_without_keys(d, dtype, backend):
    """Output 0, LSE -inf, gradients 0; the other rows as if the empty ones were not there."""
    inputs = of_mask("own", 64, dtype, backend.device, d, dlse=True)
    inputs.block_counts[..., [0, 3, -1]] = 0
    empty = torch.arange(S) // 64
    empty = (empty == 0) | (empty == 3) | (empty == S // 64)
    result = check_inputs(inputs, backend)
    assert bool((result["out"][:, :, empty] == 0).all())
    assert bool((result["lse"][:, :, empty] == -float("inf")).all())
    assert bool((result["dq"][:, :, empty] == 0).all())


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("batches", [(1, 2, 2), (2, 1, 2), (1, 1, 2)])
def test_a_batch_that_not_all_operands_have(batches, dtype, backend):
    q, k, v = (torch.randn(n, 2, 200, 16, dtype=dtype, device=backend.device) for n in batches)
    blocks = torch.tensor([[[[1, 0], [1, 1]]], [[[1, 1], [0, 1]]]], dtype=torch.bool, device=backend.device)
    lists = from_blocks(blocks)
    mask = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :200, :200]
    out = flash_attn_ext.attention(q, k, v, block_lists=lists, backend=backend.name)
    expected = flash_attn_ext.attention(q, k, v, mask=mask, backend=backend.name)
    assert_same_answer(out, expected, backend, "out")


@over_dtypes((torch.float32, torch.bfloat16))
def test_no_block_at_all(dtype, backend):
    inputs = of_mask("own", 128, dtype, backend.device)
    inputs.block_counts.zero_()
    result = run_ours(inputs, backend)
    assert all(bool((result[name] == 0).all()) for name in ("out", "dq", "dk", "dv"))
    assert bool((result["lse"] == -float("inf")).all())


@over_dtypes((torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("d", [16, 64, 128])
def test_what_unlisted_blocks_hold_reaches_nothing(d, size, dtype, backend):
    """Blocks that are in no list hold NaN."""
    inputs = of_mask("own and earlier", size, dtype, backend.device, d)
    hidden = torch.arange(S, device=backend.device) // size
    hidden = (hidden == 1) | (hidden == 4)
    mask = MASKS["own and earlier"](size)
    mask[:, [1, 4]] = False
    lists = from_blocks(mask[None, None].to(backend.device))
    inputs = inputs.replace(block_counts=lists.counts, block_indices=lists.indices)
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
    inputs = of_mask("every other", 64, dtype, backend.device, d)
    dirty = inputs.replace(k=inputs.k.clone(), v=inputs.v.clone())
    dirty.k[:, :, 200], dirty.v[:, :, 200] = POISON, POISON  # of block 3, which odd blocks see
    result, clean = run_ours(dirty, backend), run_ours(inputs, backend)
    untouched = torch.arange(S, device=backend.device) // 64 % 2 == 0
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_same_answer(result[name], clean[name], backend, name, (slice(None), slice(None), untouched))


@pytest.mark.parametrize("size", [64, 128])
@over_dtypes((torch.float32, torch.bfloat16))
def test_bitwise_reproducible(dtype, size, backend):
    inputs = of_mask("own and earlier", size, dtype, backend.device, 128)
    first = run_ours(inputs, backend)
    for _ in range(2 if backend.is_cpu else 20):
        again = run_ours(inputs, backend)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_order_and_repetition_change_nothing(backend):
    inputs = of_mask("own and earlier", 64, torch.float32, backend.device)
    counts, indices = inputs.block_counts, inputs.block_indices
    place = torch.arange(indices.shape[-1], device=indices.device)
    backwards = indices.gather(-1, (counts[..., None] - 1 - place).clamp(min=0).long())
    twice = inputs.replace(
        block_counts=2 * counts,
        block_indices=torch.where(
            torch.arange(2 * len(place), device=indices.device) < counts[..., None],
            torch.cat([indices, indices], -1),
            torch.cat([backwards, backwards], -1).roll(1, -1),
        ),
    )
    listed = torch.arange(2 * len(place), device=indices.device) < 2 * counts[..., None]
    twice.block_indices = torch.where(listed, twice.block_indices, 0)
    expected = run_ours(inputs, backend)
    for lists in (inputs.replace(block_indices=backwards), twice):
        assert torch.equal(lists.whole_mask & inputs.whole_mask, inputs.whole_mask)
    for name, found in run_ours(inputs.replace(block_indices=backwards), backend).items():
        assert torch.equal(found, expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_that_do_not_exist_are_ignored_on_a_gpu(dtype, backend):
    if backend.is_cpu:
        pytest.skip("the CPU raises an error")
    inputs = of_mask("own and earlier", 64, dtype, backend.device)
    indices = torch.nn.functional.pad(inputs.block_indices, (3, 0))
    indices[..., :3] = torch.tensor([-(2**31), 2**31 - 1, S // 64 + 1], dtype=torch.int32)
    wild = inputs.replace(block_counts=inputs.block_counts + 3, block_indices=indices)
    wild.block_counts[..., 0] = 2**31 - 1
    tame = inputs.replace(block_counts=inputs.block_counts.clone(), block_indices=inputs.block_indices)
    tame.block_counts[..., 0] = inputs.block_indices.shape[-1]
    results = (run_ours(of, backend) for of in (wild, tame))
    for found, expected in zip(*(result.values() for result in results), strict=True):
        assert torch.equal(found, expected)


@FOR_GPUS
@computes_in(torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_one_kernel_makes_the_block_mask(dtype, backend):
    generator = torch.Generator().manual_seed(0)
    for shape, most, width in (((2, 3, 5), 4, 7), ((1, 1, 300), 200, 513), ((4,), 1, 1), ((2, 0), 3, 4), ((3,), 0, 5)):
        counts = torch.randint(-2, most + 3, shape, generator=generator).to(backend.device, dtype)
        indices = torch.randint(-3, width + 3, (*shape, most), generator=generator).to(backend.device, dtype)
        strided = indices.mT.contiguous().mT if indices.dim() > 1 else indices
        expected = BlockLists(counts, indices).blocks(128 * width)
        for given in (indices, strided):
            assert torch.equal(_C.block_mask(counts, given, width), expected)


def small(device: str, heads: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, h, 200, 16, generator=generator).to(device) for h in (4, heads, heads))


@pytest.mark.parametrize("shape", [(4,), (2, 4), (4, 4), (1, 4, 4), (2, 1, 4)], ids=str)
def test_missing_dimensions_broadcast(shape, backend):
    """(2, 4) has a list for each key head."""
    q, k, v = small(backend.device)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(*shape, 4, generator=generator) < 0.5
    lists = from_blocks(mask.to(backend.device), query_block=64, key_block=64)
    out = flash_attn_ext.attention(q, k, v, block_lists=lists, backend=backend.name)
    expected, _ = attention_reference(q, k, v, block_lists=lists)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lead", [(), (3,), (3, 2)], ids=str)
def test_other_ranks(lead, backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, 2, 130, 16, generator=generator).to(backend.device) for _ in range(3))
    mask = torch.tensor([[True, False, True], [False, True, False], [False, False, True]], device=backend.device)
    for given in (mask, mask.expand(*lead, 2, 3, 3)):
        lists = from_blocks(given, query_block=64, key_block=64)
        out = flash_attn_ext.attention(q, k, v, block_lists=lists, backend=backend.name)
        expected, _ = attention_reference(q, k, v, block_lists=from_blocks(mask, query_block=64, key_block=64))
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("queries", "rows"), [(200, 4), (200, 2), (40, 1)])
def test_a_pair_of_tensors(queries, rows, backend):
    """The size of blocks follows from the number of lists."""
    q, k, v = small(backend.device)
    q, (k, v) = q[:, :, :queries], (t[:, :, : max(queries, 64)] for t in (k, v))
    k, v = (k[:, :, :40], v[:, :, :40]) if queries == 40 else (k, v)
    counts = torch.ones(1, 1, rows, dtype=torch.int64, device=backend.device)
    indices = torch.arange(rows, device=backend.device)[None, None, :, None]
    out = flash_attn_ext.attention(q, k, v, block_lists=(counts, indices), backend=backend.name)
    size = 128 if rows == 2 else 64
    lists = BlockLists(counts, indices, query_block=size, key_block=size)
    expected, _ = attention_reference(q, k, v, block_lists=lists)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mapped", ["lists", "q", "both"])
def test_under_vmap(mapped, backend):
    q, k, v = small(backend.device)
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(3, 1, 2, 4, 4, generator=generator) < 0.5).to(backend.device)
    lists = from_blocks(mask)
    queries = torch.stack([q, 2 * q, 3 * q])

    def attend(q, counts, indices):
        lists = BlockLists(counts, indices, query_block=64, key_block=64)
        return flash_attn_ext.attention(q, k, v, block_lists=lists, backend=backend.name)

    dims = (None if mapped == "lists" else 0, *(2 * (None,) if mapped == "q" else (0, 0)))
    given = (q if dims[0] is None else queries, *((lists.counts, lists.indices) if dims[1] == 0 else ()))
    if dims[1] is None:
        given = (*given, lists.counts[0], lists.indices[0])
    found = torch.func.vmap(attend, dims)(*given)
    for index in range(3):
        expected = attend(*(t if dim is None else t[index] for t, dim in zip(given, dims, strict=True)))
        torch.testing.assert_close(found[index], expected, rtol=1e-4, atol=1e-4)


def test_exported(backend):
    q, k, v = small(backend.device)
    mask = torch.eye(4, dtype=torch.bool, device=backend.device)[None, None]

    class Model(torch.nn.Module):
        def forward(self, q, k, v, mask):
            lists = from_blocks(mask, query_block=64, key_block=64)
            return flash_attn_ext.attention(q, k, v, block_lists=lists, backend=backend.name)

    program = torch.export.export(Model(), (q, k, v, mask))
    torch.testing.assert_close(program.module()(q, k, v, mask), Model()(q, k, v, mask), rtol=1e-4, atol=1e-4)


def test_explain_has_a_plan(backend):
    q, k, v = small(backend.device)
    counts = torch.ones(1, 1, 4, dtype=torch.int32, device=backend.device)
    explanation = flash_attn_ext.explain(q, k, v, block_lists=(counts, counts[..., None] * 0), backend=backend.name)
    assert explanation.backend == backend.name


def call(counts: torch.Tensor, indices: torch.Tensor, sizes: dict | None = None, **more) -> torch.Tensor:
    q, k = torch.randn(2, 4, 200, 16), torch.randn(2, 2, 200, 16)
    lists = (counts, indices) if sizes is None else BlockLists(counts, indices, **sizes)
    return flash_attn_ext.attention(q, k, k, block_lists=lists, **more)


def ones(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


SMALL_BLOCKS = dict(query_block=64, key_block=64)
WRONG = [
    ((ones(1, 4, dtype=torch.float32), ones(1, 4, 2)), RuntimeError, "counts of block lists must be int32 or int64"),
    ((ones(1, 4), ones(1, 4, 2, dtype=torch.int16)), RuntimeError, "indices of block lists must be int32 or int64"),
    ((ones(1, 4), ones(1, 3, 2)), RuntimeError, r"got \(1, 4\) and \(1, 3, 2\)"),
    ((ones(1, 3), ones(1, 3, 2)), RuntimeError, "the size of blocks does not follow: pass flash_attn_ext.masks.Block"),
    (
        (ones(1, 3), ones(1, 3, 2), SMALL_BLOCKS),
        RuntimeError,
        "3 lists, expected 4, one for each block of 64 of",
    ),
    ((ones(3, 4), ones(3, 4, 2), SMALL_BLOCKS), RuntimeError, "with 3 heads, expected 1, 4 as q has, or 2 as k has"),
    ((ones(3, 4, 4), ones(3, 4, 4, 2)), RuntimeError, r"counts \(3, 4, 4\), expected batch dimensions"),
    ((ones(1, 4), ones(1, 4, 2), dict(query_block=32)), ValueError, "query_block must be 64 or 128, got 32"),
    ((ones(1, 4), ones(1, 4, 2), dict(key_block=256)), ValueError, "key_block must be 64 or 128, got 256"),
    ((3 * ones(1, 4), ones(1, 4, 2)), ValueError, "counts from 3 to 3, expected 0 to 2, the blocks that a list has"),
    ((ones(1, 4), 4 * ones(1, 4, 2)), ValueError, "blocks from 4 to 4, expected 0 to 3: 200 keys are 4 blocks of 64"),
    ((ones(1, 4), -ones(1, 4, 2)), ValueError, "blocks from -1 to -1"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_lists_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        call(*given)


def test_something_else_is_refused():
    q = torch.randn(1, 1, 70, 16)
    with pytest.raises(TypeError, match=r"block_lists must be .*BlockLists or a pair"):
        flash_attn_ext.attention(q, q, q, block_lists=torch.ones(1, 1, 2, dtype=torch.int32))
    with pytest.raises(TypeError, match="counts of block lists must be an int32 or int64 tensor, got list"):
        flash_attn_ext.attention(q, q, q, block_lists=([1], [0]))


def test_packed_sequences_are_refused():
    q, ends = torch.randn(70, 1, 16), torch.tensor([0, 70], dtype=torch.int32)
    with pytest.raises(ValueError, match="block_lists does not go with cu_seqlens: pass intervals or a mask"):
        flash_attn_ext.explain(q, q, q, ends, ends, block_lists=(ones(2), ones(2, 1)))
    with pytest.raises(TypeError, match="block_lists"):
        flash_attn_ext.attention_varlen(q, q, q, ends, ends, block_lists=(ones(2), ones(2, 1)))


@FOR_GPUS
@computes_in(torch.bfloat16)
@pytest.mark.parametrize("size", [64, 128])
def test_a_long_sequence_takes_little_memory(size, backend):
    """Far less than a mask, which would have a byte for each pair. Portable backward passes may store scores."""
    s = 16384
    q = torch.randn(1, 2, s, 64, device=backend.device, dtype=torch.bfloat16, requires_grad=True)
    blocks = s // size
    indices = torch.arange(blocks, device=backend.device)[:, None] // torch.arange(1, 5, device=backend.device)
    counts = torch.full((1, 1, blocks), 4, device=backend.device)
    lists = BlockLists(counts, indices[None, None], query_block=size, key_block=size)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_attn_ext.attention(q, q, q, block_lists=lists, backend=backend.name)
    if backend.name == "sm90":
        out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < s * s // 4
