"""Attention over a cache: contiguous or in pages, at every kind of length, with new tokens, rotated or not."""

import dataclasses
import math

import pytest
import torch

import flash_attn_ext
from support.backends import Backend
from support.caches import (
    CacheCase,
    CacheInputs,
    bits,
    call_with_cache,
    check_cache_case,
    check_cache_drawn,
    make_cache_inputs,
    run_with_cache,
)
from support.cases import DTYPES, Case
from support.errors import assert_same_answer
from support.params import computes_in, for_gpus, over_cases, over_dtypes
from support.runners import Result, poisoned_memory
from support.strides import bits_of_storage

# Lengths around the edges of rows that lie together (16), and of pages.
EDGES = (0, 1, 15, 16, 17)


def decode(**features) -> Case:
    return Case(**(dict(sq=1, d=64, causal="bottom_right") | features))


def edges_of(page_size: int, capacity: int, new: int) -> tuple[int, ...]:
    return (0, 1, page_size - 1, page_size, page_size + 1, capacity - new)


CONTIGUOUS = [
    CacheCase((*EDGES, 96)),
    CacheCase((*EDGES, 95), new=1),
    CacheCase((*EDGES, 96), indexed=True, base=decode(heads=4, kv_heads=2)),
    CacheCase((3, 80), new=16, indexed=True, base=decode(sq=16, heads=4, kv_heads=1)),
    CacheCase((700, 0, 333), capacity=768, base=decode(heads=4, kv_heads=2)),
    CacheCase((0, 40), capacity=300, new=256, base=decode(sq=256, d=32)),
]
PAGED = [
    CacheCase(edges_of(page_size, 3 * page_size, new), new, 3 * page_size, page_size, base=decode(sq=max(new, 1)))
    for page_size in (16, 48, 64)
    for new in (0, 1, 5)
] + [
    CacheCase((40, 33, 64), capacity=64, page_size=16, shared_pages=2),
    CacheCase((70, 64, 65), new=2, capacity=128, page_size=64, shared_pages=1, base=decode(sq=2, heads=4, kv_heads=2)),
    CacheCase((500, 17), capacity=1024, page_size=16, base=decode(heads=8, kv_heads=2, d=128)),
]
SHAPES = [
    CacheCase((90, 33), new, page_size=page_size, capacity=384, base=decode(sq=sq, heads=heads, kv_heads=kv_heads, d=d))
    for sq, new, heads, kv_heads, d, page_size in (
        (1, 0, 4, 4, 128, None),
        (1, 1, 8, 1, 72, 16),
        (2, 2, 4, 2, 64, None),
        (5, 5, 6, 2, 72, 48),
        (8, 8, 8, 2, 128, None),
        (8, 0, 4, 1, 64, 64),
        (33, 33, 4, 2, 64, 16),
        (33, 1, 2, 2, 40, None),
        (256, 256, 4, 2, 64, 64),
        (256, 0, 2, 1, 128, None),
        (256, 256, 8, 4, 64, 48),  # so many rows that a GPU appends them in a launch of their own
    )
] + [
    CacheCase((50, 31), new=3, base=decode(sq=3, d=40, dv=72)),
    CacheCase((50, 31), new=3, page_size=16, base=decode(sq=3, d=128, dv=64, heads=4, kv_heads=2)),
    # MLA with absorbed weights: one key head, whose values are narrower.
    CacheCase((70, 0, 33), new=1, base=decode(sq=1, d=576, dv=512, heads=16, kv_heads=1)),
    CacheCase((70, 5), new=2, page_size=16, base=decode(sq=2, d=576, dv=512, heads=20, kv_heads=1)),
    CacheCase((40, 31), new=0, page_size=16, base=decode(sq=1, d=520, dv=512, heads=4, kv_heads=1, softcap=9.0)),
]
# So many queries that Hopper's forward kernels take them, around edges of key tiles (of 64 or 128) and of pages.
TILE_EDGES = (0, 1, 63, 64, 127, 128, 129, 500)
MANY_QUERIES = (
    [
        CacheCase((*TILE_EDGES, 768), 0, 768, page_size, base=decode(sq=130, heads=4, kv_heads=2, d=d))
        for d in (64, 128, 256)
        for page_size in (None, 16, 48, 64, 256)
    ]
    + [
        CacheCase(
            (*TILE_EDGES[:-1], 468), 300, 768, page_size, rotary_dim=rotary_dim, base=decode(sq=300, d=d, **features)
        )
        for page_size, rotary_dim, d, features in (
            (None, 0, 128, dict()),
            (64, 64, 64, dict(layout="bshd")),
            (128, 32, 128, dict(heads=4, kv_heads=1, causal=None)),
        )
    ]
    + [
        CacheCase(
            lengths, 0, 4096, page_size, base=decode(**(dict(sq=200, heads=2, kv_heads=1) | features))
        )  # split-KV
        for lengths, page_size, features in (
            ((2500, 0, 4096), None, dict()),
            ((2500, 0, 4096), 16, dict(d=128)),
            ((2500, 0), 64, dict(d=256)),
            ((2500,), 64, dict(d=128, window=(900, 0), heads=16, sq=40)),
            ((2500,), None, dict(window=(400, 0), heads=16, sq=40, sink=True)),
        )
    ]
    + [
        CacheCase((300, 70, 0, 512), 0, 512, page_size, base=decode(**(dict(sq=150, heads=4, kv_heads=2) | features)))
        for features in (
            dict(causal=None),
            dict(causal="top_left"),
            dict(window=(40, 0)),
            dict(window=(200, 30), causal=None, d=128),
            dict(sink=True),
            dict(sink=True, window=(127, 0), layout="bshd"),
            dict(scale=0.3, d=72, dv=40),
            dict(d=192, dv=128),
            dict(d=128, dv=256),
            dict(heads=3, kv_heads=1),
            dict(heads=12, kv_heads=2, d=128, sq=40),
            dict(heads=7, kv_heads=1, d=128),
            dict(heads=32, kv_heads=1, sq=9, sink=True),
            dict(dv=60),
            dict(softcap=20.0),
        )
        for page_size in (None, 16)
    ]
    + [CacheCase((300, 70, 0), capacity=333, indexed=True, base=decode(sq=150, d=d)) for d in (64, 128)]
    + for_gpus(
        [
            # Two slices of v, which leave no room for splits.
            CacheCase((2500, 700), capacity=3072, base=decode(sq=70, d=256, dv=512, heads=20, kv_heads=20)),
            # A CTA has several work tiles of one key tile, and of queries for one warpgroup.
            CacheCase((64, 40) * 20, capacity=64, base=decode(sq=40, d=256, heads=8)),
        ]
    )
)
FEATURES = [
    CacheCase((70, 0, 17), new=4, page_size=page_size, base=decode(**(dict(sq=4, heads=4, kv_heads=2) | features)))
    for features in (
        dict(causal=None),
        dict(causal="top_left"),
        dict(window=(20, 5), causal=None),
        dict(window=(18, 0)),
        dict(bias="bhqk"),
        dict(bias="1h1k", mask="b1qk"),
        dict(bias="11q1", bias_float32=True),
        dict(mask="b11k", sink=True),
        dict(alibi="h"),
        dict(alibi="bh", softcap=5.0),
        dict(scale=-0.2, softcap=3.0, sink=True),
        dict(layout="bshd"),
        dict(layout="bshd", sink=True, softcap=9.0, bias="b1qk", mask="1hqk", alibi="h", window=(40, 30)),
    )
    for page_size in (None, 16)
]
ROTARY = [
    CacheCase((60, 0, 17), new, page_size=page_size, rotary_dim=dim, interleaved=interleaved, base=base)
    for new, dim, interleaved, page_size, base in (
        (1, 64, False, None, decode()),
        (1, 64, True, 16, decode(heads=4, kv_heads=2)),
        (5, 32, False, 16, decode(sq=5)),
        (5, 16, True, None, decode(sq=5, layout="bshd")),
        (3, 64, False, None, decode(sq=6, causal=None)),
        (3, 64, False, None, decode(sq=6, causal=None, window=(9, 9))),
        (2, 72, True, 48, decode(sq=1, d=72, dv=64)),
        (4, 6, False, None, decode(sq=4, d=40)),
    )
] + [
    CacheCase(
        (60, 0, 17),
        new=200,
        capacity=272,
        page_size=16,
        rotary_dim=64,
        interleaved=True,
        base=decode(sq=200, heads=8, kv_heads=4),
    )
]


@over_dtypes()
@over_cases(CONTIGUOUS + PAGED)
def test_every_length(case, dtype, backend):
    check_cache_case(case, dtype, backend)


@over_dtypes()
@over_cases(SHAPES)
def test_shapes(case, dtype, backend):
    check_cache_case(case, dtype, backend)


@over_dtypes()
@over_cases(MANY_QUERIES)
def test_many_queries(case, dtype, backend):
    check_cache_case(case, dtype, backend)


@over_dtypes(DTYPES[:3])
@pytest.mark.parametrize("sq", [2, 150])
def test_queries_of_other_strides(sq, dtype, backend):
    """The columns of q, and so of out, lie apart."""
    case = CacheCase((300, 70, 0, 512), capacity=512, base=decode(sq=sq, heads=4, kv_heads=2))
    inputs = make_cache_inputs(case, dtype, backend.device)
    expected = run_with_cache(inputs, backend)
    inputs.q = inputs.q.transpose(2, 3).contiguous().transpose(2, 3)
    ours = run_with_cache(inputs, backend)
    for name in ("out", "lse"):
        assert_same_answer(ours[name], expected[name], backend, name)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(FEATURES)
def test_features(case, dtype, backend):
    check_cache_case(case, dtype, backend)


@over_dtypes()
@over_cases(ROTARY)
def test_rotary(case, dtype, backend):
    check_cache_case(case, dtype, backend)


@over_dtypes(DTYPES[:2])
def test_pages_change_nothing(dtype, backend):
    """The same keys in one piece and in pages of two sizes."""
    case = CacheCase((90, 17, 0), new=3, base=decode(sq=3, heads=4, kv_heads=2))
    whole = make_cache_inputs(case, dtype, backend.device)
    expected = run_with_cache(whole, backend)
    for page_size in (16, 48):
        paged = make_cache_inputs(dataclasses.replace(case, page_size=page_size), dtype, backend.device)
        table = paged.tensors["block_table"].tolist()
        for b, pages in enumerate(table):
            for i, page in enumerate(pages):
                if page in range(len(paged.k_cache)):
                    rows = slice(i * page_size, (i + 1) * page_size)
                    paged.k_cache[page], paged.v_cache[page] = whole.k_cache[b, :, rows], whole.v_cache[b, :, rows]
        paged.tensors |= {name: whole.tensors[name] for name in ("k_new", "v_new")}
        paged.q = whole.q
        ours = run_with_cache(paged, backend)
        for name in ("out", "lse"):
            assert_same_answer(ours[name], expected[name], backend, name)


@over_dtypes(DTYPES[:2])
def test_a_generated_sequence_is_causal_attention(dtype, backend):
    """A prompt in one call, then token after token: as all tokens at once."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 40, 64, generator=generator).to(backend.device, dtype) for h in (4, 2, 2))
    k_cache, v_cache = (torch.full((2, 2, 48, 64), torch.nan, device=backend.device, dtype=dtype) for _ in range(2))
    outs, begin = [], 0
    for end in (25, *range(26, 41)):
        lengths = torch.full((2,), begin, dtype=torch.int32, device=backend.device)
        tokens = (t[:, :, begin:end] for t in (q, k, v))
        query, key, value = tokens
        outs.append(
            flash_attn_ext.attention_with_kvcache(
                query, k_cache, v_cache, k_new=key, v_new=value, cache_seqlens=lengths, backend=backend.name
            )
        )
        begin = end
    expected = flash_attn_ext.attention(q, k, v, causal="bottom_right", backend=backend.name)
    assert torch.equal(k_cache[:, :, :40], k)
    assert torch.equal(v_cache[:, :, :40], v)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=2 * eps, atol=4 * eps)


@computes_in(torch.bfloat16)
def test_lengths_as_a_number(backend):
    case = CacheCase((33, 33), new=2, base=decode(sq=2))
    inputs = make_cache_inputs(case, torch.bfloat16, backend.device)
    out, _ = call_with_cache(inputs, backend)
    again, _ = call_with_cache(inputs, backend, cache_seqlens=33)
    assert torch.equal(again, out)


@computes_in(torch.bfloat16)
def test_views_of_one_buffer(backend):
    """Keys and values in one tensor, interleaved by token or by page, and strided arrays of integers."""
    case = CacheCase((33, 20), new=1, capacity=48, page_size=16)
    inputs = make_cache_inputs(case, torch.bfloat16, backend.device)
    expected = run_with_cache(inputs, backend)
    for dim in (0, 1, 3):
        views = torch.stack((inputs.k_cache, inputs.v_cache), dim).unbind(dim)
        strided = dict(inputs.tensors)
        for name in ("cache_seqlens", "block_table"):
            strided[name] = torch.stack((strided[name],) * 2, -1)[..., 0]
        viewed = dataclasses.replace(inputs, k_cache=views[0], v_cache=views[1], tensors=strided)
        out, lse = call_with_cache(viewed, backend)
        assert torch.equal(out, expected["out"])
        assert torch.equal(lse, expected["lse"])
        assert torch.equal(bits(views[0]), bits(expected["k_cache"]))


def laid_out(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy whose rows GPU kernels cannot read in place, in a storage with NaN in its gaps."""
    columns = cache.size(-1)
    wider = cache.new_full((*cache.shape[:-1], 2 * columns + 8), math.nan)
    view = {
        "rows end anywhere": torch.empty_like(cache),
        "rows begin anywhere": wider[..., 1 : columns + 1],
        "columns lie apart": wider[..., : 2 * columns : 2],
    }[layout]
    return view.copy_(cache)


def run_with_layout(inputs: CacheInputs, backend: Backend, layout: str) -> Result:
    caches = [laid_out(cache, layout) for cache in (inputs.k_cache, inputs.v_cache)]
    storages = [bits_of_storage(cache).clone() for cache in caches]
    with poisoned_memory():
        out, lse = call_with_cache(dataclasses.replace(inputs, k_cache=caches[0], v_cache=caches[1]), backend)
    results = {"out": out, "lse": lse, "k_cache": caches[0].clone(), "v_cache": caches[1].clone()}
    for cache, given, before in zip(caches, (inputs.k_cache, inputs.v_cache), storages, strict=True):
        cache.copy_(given)
        assert torch.equal(bits_of_storage(cache), before), "a gap between rows or columns was written"
    return results


@over_dtypes()
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    ("layout", "d"), [("rows end anywhere", 59), ("rows begin anywhere", 64), ("columns lie apart", 64)], ids=str
)
def test_caches_of_any_strides(layout, d, page_size, dtype, backend):
    """The caller's memory gets the new keys, wherever kernels read them."""
    for new, lengths in ((0, (60, 0, 17)), (3, (60, 0, 17)), (1, (700, 33))):
        case = CacheCase(
            lengths,
            new,
            capacity=768,
            page_size=page_size,
            rotary_dim=32 if new else 0,
            base=decode(sq=max(new, 1), d=d, heads=4, kv_heads=2),
        )
        check_cache_drawn(
            lambda seed, case=case: make_cache_inputs(case, dtype, backend.device, seed),
            backend,
            lambda inputs, backend: run_with_layout(inputs, backend, layout),
        )


@computes_in(torch.bfloat16)
def test_no_sequences_and_no_queries(backend):
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=backend.device, dtype=torch.bfloat16)

    k_cache, v_cache, new = zeros(2, 2, 32, 64), zeros(2, 2, 32, 64), zeros(2, 2, 1, 64) + 1
    lengths = torch.tensor([3, 5], dtype=torch.int32, device=backend.device)
    out, lse = flash_attn_ext.attention_with_kvcache(
        zeros(2, 4, 0, 64),
        k_cache,
        v_cache,
        k_new=new,
        v_new=new,
        cache_seqlens=lengths,
        return_lse=True,
        backend=backend.name,
    )
    assert (out.shape, lse.shape) == ((2, 4, 0, 64), (2, 4, 0))
    assert k_cache.sum() == v_cache.sum() == new.sum()  # tokens without queries are stored all the same
    empty = flash_attn_ext.attention_with_kvcache(
        zeros(0, 4, 1, 64),
        k_cache,
        v_cache,
        cache_seqlens=lengths[:0],
        cache_batch_idx=lengths[:0],
        backend=backend.name,
    )
    assert empty.shape == (0, 4, 1, 64)


@computes_in(torch.bfloat16)
@pytest.mark.parametrize("new", [0, 1])
def test_autograd_notices_what_is_written(new, backend):
    """A cache that somebody saved for a backward pass has changed where there are new tokens."""
    inputs = make_cache_inputs(CacheCase((3, 5), new=new), torch.bfloat16, backend.device)
    versions = [t._version for t in (inputs.k_cache, inputs.v_cache)]
    call_with_cache(inputs, backend)
    assert [t._version for t in (inputs.k_cache, inputs.v_cache)] == [version + new for version in versions]


def test_autocast_does_nothing(backend):
    inputs = make_cache_inputs(CacheCase((3, 5), new=1), torch.float32, backend.device)
    expected = run_with_cache(inputs, backend)["out"]
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        out, _ = call_with_cache(inputs, backend)
    assert torch.equal(out, expected)


@computes_in(torch.bfloat16)
def test_under_inference_mode(backend):
    with torch.inference_mode():
        inputs = make_cache_inputs(CacheCase((3, 5), new=1), torch.bfloat16, backend.device)
        expected = run_with_cache(inputs, backend)["out"]
        out, _ = call_with_cache(inputs, backend)
    assert torch.equal(out, expected)
