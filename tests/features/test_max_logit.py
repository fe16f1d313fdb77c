"""return_max_logit: the largest score of each row or head, from the same pass.

pytest tests/features/test_max_logit.py -k "random and sm90" --random-problems 2000
"""

import dataclasses
import math
import os
from unittest import mock

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.reference import attention_reference
from support.backends import CPU
from support.caches import CacheCase, call_with_cache, make_cache_inputs
from support.cases import Case, Inputs, accumulate_dtype, make_inputs
from support.masks import with_empty_tiles
from support.packed import PackedCase, call_packed, cu_seqlens, make_packed, sequences
from support.params import computes_in, for_gpus, over_cases, over_dtypes, over_problems
from support.problems.checks import as_presented
from support.problems.draw import draw
from support.runners import poisoned_memory

pytest_generate_tests = over_problems

HEAD_DIMS = [
    Case(sq=140, sk=600, d=d, dv=dv, causal=causal)
    for d, dv in ((1, None), (40, None), (64, None), (96, None), (128, None), (192, 128), (192, None), (256, None))
    for causal in (None, "bottom_right")
]
FEATURES = [
    Case(sq=1, sk=1),
    Case(sq=70, sk=1, d=128),
    Case(sq=300, sk=300, d=64, causal="top_left"),
    Case(sq=300, sk=300, d=64, window=(30, 17)),
    Case(sq=65, sk=97, window=(0, 0), heads=4, kv_heads=2),
    Case(sq=257, sk=600, d=64, mask="bhqk"),
    Case(sq=257, sk=600, d=128, mask="b11k", padding=True),
    Case(sq=257, sk=600, d=64, mask="11qk", causal="bottom_right"),
    Case(sq=257, sk=600, d=128, intervals="bh", num_intervals=3),
    Case(sq=257, sk=600, d=192, dv=128, mask="bhqk"),
    Case(sq=257, sk=600, d=256, intervals="1h"),
    Case(sq=257, sk=600, d=64, bias="bhqk"),
    Case(sq=257, sk=600, d=128, bias="1hq1", mask="b11k"),
    Case(sq=65, sk=97, bias="bhqk", bias_float32=True),
    Case(sq=49, sk=49, d=32, bias="1hqk", mask="b1qk", batch=6),
    Case(sq=257, sk=600, d=64, alibi="bh", causal="bottom_right"),
    Case(sq=257, sk=600, d=128, softcap=3.0),
    Case(sq=257, sk=600, d=64, sink=True),
    Case(sq=257, sk=600, d=128, dropout_p=0.4),
    Case(sq=257, sk=600, d=64, scale=-0.3),
    Case(sq=257, sk=600, d=64, scale=0.0),
    Case(sq=257, sk=600, d=64, heads=6, kv_heads=2, layout="bshd"),
    Case(sq=100, sk=100, d=64),
    Case(sq=60, sk=60, d=64, alibi="h", sink=True),
    Case(sq=256, sk=256, d=64, alibi="bh"),
    Case(sq=130, sk=120, d=128, alibi="h"),
    Case(sq=300, sk=77, d=64, mask="b11k"),
    Case(sq=130, sk=120, d=128, bias="b11k"),
    Case(sq=600, sk=200, d=64),
    Case(sq=3, sk=3000, d=128, heads=8, kv_heads=1),
    Case(sq=1, sk=3000, d=64, sink=True, mask="b11k"),
]
LONG = for_gpus(
    [
        Case(sq=2100, sk=2100, d=64, batch=2, heads=16),
        Case(sq=2100, sk=2100, d=128, batch=2, heads=16, causal="top_left"),
        Case(sq=600, sk=5000, d=128, heads=16, kv_heads=4, batch=1),
        Case(sq=300, sk=9000, d=64, batch=1),
        Case(sq=2100, sk=2100, d=256, batch=1, heads=16, window=(700, 0)),
        Case(sq=2100, sk=2100, d=300, batch=1, heads=2),
    ]
)


TENSORS = ("bias", "mask", "intervals", "block_lists", "alibi_slopes", "sink")


def call(inputs: Inputs, backend, what="row", **more):
    """attention on a case, with the LSE and its largest scores."""
    case = inputs.case
    q, k, v = (t.transpose(1, 2) if case.layout == "bshd" else t for t in (inputs.q, inputs.k, inputs.v))
    if case.dropout_p > 0:
        torch.manual_seed(inputs.dropout_seed)
    tensors = {name: getattr(inputs, name) for name in TENSORS}
    options = dict(case.options(), dropout_p=case.dropout_p, layout=case.layout, backend=backend.name) | tensors | more
    return flash_attn_ext.attention(q, k, v, **options, return_lse=True, return_max_logit=what)


def exact(inputs: Inputs) -> torch.Tensor:
    """The largest scores of all rows, in float64."""
    given = inputs.to(torch.float64)
    tensors = {name: getattr(given, name) for name in TENSORS}
    options = given.case.options()
    return attention_reference(given.q, given.k, given.v, **options, **tensors, return_max_logit="row")[2]


def tolerance(inputs: Inputs) -> float:
    """Of a score: the error of a sum of products, with what is added to it."""
    if inputs.q.dtype == torch.float64:
        return 1e-12
    case = inputs.case
    scale = case.d**-0.5 if case.scale is None else abs(case.scale)
    terms = scale * largest_of(inputs.q.double().abs().sum(-1)) * largest_of(inputs.k.double())
    added = 0.0 if inputs.bias is None else largest_of(inputs.bias.double())
    if inputs.alibi_slopes is not None:
        added += largest_of(inputs.alibi_slopes.double()) * (case.sq + case.sk)
    return 1e-6 + 1e-6 * (terms + added)


def largest_of(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check(inputs: Inputs, backend) -> None:
    with poisoned_memory():
        out, lse, rows = call(inputs, backend)
    assert rows.dtype == accumulate_dtype(inputs.q.dtype) and not rows.requires_grad
    assert rows.shape == lse.shape
    torch.testing.assert_close(rows.double(), exact(inputs), rtol=0, atol=tolerance(inputs))
    heads = call(inputs, backend, True)[2]
    torch.testing.assert_close(heads, rows.amax((0, 2)), rtol=0, atol=0)
    without = call(inputs, backend, False)
    spacing = max(torch.finfo(inputs.q.dtype).eps, torch.finfo(torch.float32).eps * 8)
    torch.testing.assert_close(out, without[0], rtol=4 * spacing, atol=4 * spacing)
    torch.testing.assert_close(lse, without[1], rtol=0, atol=tolerance(inputs))


@over_dtypes()
@over_cases(HEAD_DIMS + FEATURES)
def test_matches_float64(case, dtype, backend):
    reason = backend.refusal(dtype, case.d, case.head_dim_v)
    if reason:
        pytest.skip(reason)
    check(make_inputs(case, dtype, backend.device), backend)


@pytest.mark.parametrize("case", LONG, ids=str)
@over_dtypes([torch.bfloat16, torch.float16])
def test_long_calls_match_float64(case, dtype, backend):
    reason = backend.refusal(dtype, case.d)
    if reason:
        pytest.skip(reason)
    check(make_inputs(case, dtype, backend.device), backend)


@over_dtypes()
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_adds_nothing_to_plain_calls(causal, d, dtype, backend):
    """Where scores are only scaled, out and the LSE keep their bits."""
    inputs = make_inputs(Case(sq=600, sk=700, d=d, causal=causal), dtype, backend.device)
    reason = backend.refusal(dtype, d)
    if reason:
        pytest.skip(reason)
    for ours, expected in zip(call(inputs, backend)[:2], call(inputs, backend, False), strict=True):
        assert torch.equal(ours, expected)


@over_dtypes()
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("step", [0.05, 1.0, 20.0])
def test_scores_that_grow_from_tile_to_tile(step, d, dtype, backend):
    """By less than the threshold from which kernels rescale, by more, and past the range of sums that start low."""
    reason = backend.refusal(dtype, d)
    if reason:
        pytest.skip(reason)
    inputs = make_inputs(Case(sq=130, sk=1000, d=d, scale=1.0), dtype, backend.device)
    inputs.q.zero_()
    inputs.q[..., 0] = 1.0
    for order in (1, -1):
        growth = torch.arange(1000, device=backend.device).div(64, rounding_mode="floor") * step
        inputs.k[..., 0] = (growth if order == 1 else growth.flip(0)).to(dtype)
        rows = call(inputs, backend)[2]
        torch.testing.assert_close(rows.double(), exact(inputs), rtol=1e-6, atol=1e-6)


def test_low_and_high_scores(backend):
    """Rows whose scores are all far below 0, or far above it."""
    inputs = make_inputs(Case(sq=130, sk=300, d=64, scale=1.0), torch.bfloat16, backend.device)
    inputs.q.zero_()
    inputs.q[..., 0] = torch.tensor([-3e4, 3e4, 1e-20, 0.0, 200.0], device=backend.device).repeat(26)
    inputs.k[..., 0] = 1.0 + inputs.k[..., 0].abs()
    torch.testing.assert_close(call(inputs, backend)[2].double(), exact(inputs), rtol=1e-6, atol=1e-6)


@over_dtypes()
@pytest.mark.parametrize("sink", [False, True])
def test_of_rows_that_see_nothing(sink, dtype, backend):
    inputs = with_empty_tiles(make_inputs(Case(sq=200, sk=300, mask="bhqk", sink=sink), dtype, backend.device))
    out, _, rows = call(inputs, backend)
    empty = ~inputs.mask.any(-1)
    assert bool(empty.any()) and torch.equal(rows == -math.inf, empty)
    assert bool((out[empty] == 0).all())
    torch.testing.assert_close(rows.double(), exact(inputs), rtol=0, atol=tolerance(inputs))


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (2, 0, 4, 5)], ids=str)
def test_of_empty_calls(shape, backend):
    batch, heads, sq, sk = shape
    q, k = (torch.randn(batch, heads, n, 16, device=backend.device) for n in (sq, sk))
    for what, expected in (("row", (batch, heads, sq)), ("head", (heads,))):
        largest = flash_attn_ext.attention(q, k, k, return_max_logit=what, backend=backend.name)[1]
        assert largest.shape == expected and bool((largest == -math.inf).all())


@over_dtypes()
def test_the_sink_does_not_count(dtype, backend):
    inputs = make_inputs(Case(sq=130, sk=200, d=64, sink=True), dtype, backend.device)
    inputs.sink.fill_(50.0)
    with_sink, without = call(inputs, backend)[2], call(inputs, backend, sink=None)[2]
    torch.testing.assert_close(with_sink, without, rtol=0, atol=tolerance(inputs))


@over_dtypes()
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_is_nan_where_the_lse_is(name, d, dtype, backend):
    """And not where a row does not see the NaN, or where only a value has one."""
    inputs = make_inputs(Case(sq=300, sk=300, d=d, causal="top_left"), dtype, backend.device)
    getattr(inputs, name)[:, 0, 170, 3] = math.nan
    _, lse, rows = call(inputs, backend)
    assert torch.equal(rows.isnan(), lse.isnan())
    expected = exact(inputs)
    assert torch.equal(rows.isnan(), expected.isnan())
    torch.testing.assert_close(rows.double().nan_to_num(), expected.nan_to_num(), rtol=0, atol=1e-4)
    heads = call(inputs, backend, "head")[2]
    assert heads.isnan().tolist() == [name != "v", False]


@pytest.mark.parametrize("d", [64, 128])
def test_an_infinite_score_gives_nan(d, backend):
    inputs = make_inputs(Case(sq=130, sk=300, d=d), torch.bfloat16, backend.device)
    inputs.q[:, :, 5, 0], inputs.k[:, :, 7, 0] = math.inf, 1.0
    _, lse, rows = call(inputs, backend)
    assert torch.equal(rows.isnan(), lse.isnan()) and bool(rows[:, :, 5].isnan().all())
    assert bool(rows[:, :, 6].isfinite().all())


PACKED = [
    PackedCase((70, 0, 300, 1), (90, 20, 300, 0), Case(d=64, causal="bottom_right")),
    PackedCase((70, 5, 300), (90, 200, 300), Case(d=128, heads=4, kv_heads=2, mask="b11k")),
    PackedCase((140, 260), (140, 260), Case(d=64, intervals="1h", num_intervals=2)),
    PackedCase((40, 26), (600, 2000), Case(d=128, softcap=5.0, alibi="bh")),
]


@over_dtypes()
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed(case, dtype, backend):
    inputs = make_packed(case, dtype, backend.device)
    with poisoned_memory():
        _, lse, rows = call_packed(case, inputs, vars(inputs), backend, return_max_logit="row")
    assert rows.shape == lse.shape
    for sequence, queries, _ in sequences(case, inputs):
        expected = exact(sequence)[0]
        torch.testing.assert_close(rows[:, queries].double(), expected, rtol=0, atol=tolerance(sequence))
    heads = call_packed(case, inputs, vars(inputs), backend, return_max_logit=True)[2]
    torch.testing.assert_close(heads, rows.amax(1), rtol=0, atol=0)


@computes_in(None)
def test_random_problem(number, backend):
    """Of all features, with poison in keys that no query attends, and at random strides (test_combinations.py)."""
    problem = draw(number)
    if refusal := backend.refusal(problem.dtype, problem.case.d, problem.case.head_dim_v):
        pytest.skip(refusal)
    device, packed = backend.device, problem.packed
    with mock.patch.dict(os.environ, problem.environment), poisoned_memory():
        if packed is None:
            inputs = make_inputs(problem.case, problem.dtype, device, number, device)
            rows = call(as_presented(problem, inputs), backend)[2]
            expected = [(rows, inputs)]
        else:
            inputs = make_packed(packed, problem.dtype, device, number, device)
            presented = vars(as_presented(problem, inputs))
            rows = call_packed(
                packed,
                inputs.replace(**{n: presented[n] for n in ("mask", "intervals")}),
                presented,
                backend,
                return_max_logit="row",
            )[2]
            expected = [(rows[:, queries][None], alone) for alone, queries, _ in sequences(packed, inputs)]

    def named(text: str) -> str:
        return f"problem {number} ({problem}): {text}"

    for found, alone in expected:
        torch.testing.assert_close(found.double(), exact(alone), rtol=0, atol=tolerance(alone), msg=named)


def test_packed_without_tokens(backend):
    q = torch.randn(0, 3, 16, device=backend.device)
    ends = cu_seqlens((0,), backend.device)
    largest = flash_attn_ext.attention_varlen(q, q, q, ends, ends, return_max_logit=True, backend=backend.name)[1]
    assert torch.equal(largest, torch.full_like(largest, -math.inf)) and largest.shape == (3,)


CACHES = [
    CacheCase((0, 7, 90), new=2, base=Case(sq=2, d=64, heads=4, kv_heads=2)),
    CacheCase((0, 7, 2000), capacity=2048, page_size=64, base=Case(sq=1, d=128, heads=8, kv_heads=1, sink=True)),
    CacheCase((3, 900), capacity=1024, base=Case(sq=5, d=64, causal="bottom_right", window=(100, 0), mask="b11k")),
    CacheCase((3, 60), indexed=True, base=Case(sq=1, layout="bshd", softcap=2.0)),
]


@over_dtypes()
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_with_a_cache(case, dtype, backend):
    """Each sequence has the largest scores of its own keys. The largest of n scores is between lse - log(n) and lse."""
    inputs = make_cache_inputs(case, dtype, backend.device)
    _, lse, rows = call_with_cache(inputs, backend, return_max_logit="row")
    assert rows.shape == lse.shape
    for index, alone in enumerate(sequences_of_a_cache(inputs)):
        torch.testing.assert_close(rows[index].double(), exact(alone)[0], rtol=0, atol=tolerance(alone))
    heads = call_with_cache(inputs, backend, return_max_logit=True)[2]
    torch.testing.assert_close(heads, rows.amax((0, 2)), rtol=0, atol=0)
    if case.base.sink:
        lse = call_with_cache(inputs, backend, sink=None)[1]
    counts = torch.tensor(case.lengths, device=backend.device) + case.new
    seen = lse > -math.inf
    assert torch.equal(rows > -math.inf, seen)
    least = (lse - counts.clamp(min=1).log()[:, None, None])[seen]
    assert bool((rows[seen] <= lse[seen] + 1e-5).all()) and bool((rows[seen] >= least - 1e-5).all())


def sequences_of_a_cache(inputs):
    """Each sequence of a call that has appended its new keys, as a dense problem of one batch entry."""
    case, tensors = inputs.case, inputs.tensors
    for index, length in enumerate(case.lengths):
        end = length + case.new
        if case.page_size is not None:
            pages = tensors["block_table"][index, : -(-end // case.page_size)].long()
            keys, values = (cache[pages].transpose(0, 1).flatten(1, 2) for cache in (inputs.k_cache, inputs.v_cache))
        else:
            entry = int(tensors["cache_batch_idx"][index]) if case.indexed else index
            keys, values = inputs.k_cache[entry], inputs.v_cache[entry]
        mask = tensors["mask"]
        dense = dataclasses.replace(case.base, batch=1, sk=end)
        alone = make_inputs(dense, inputs.q.dtype, inputs.q.device.type)
        yield alone.replace(
            q=inputs.q[index : index + 1],
            k=keys[None, :, :end],
            v=values[None, :, :end],
            mask=None if mask is None else mask[index : index + 1, ..., :end],
            sink=tensors["sink"],
        )


@over_dtypes()
@pytest.mark.parametrize("d", [64, 128])
def test_a_cache_gives_what_its_keys_give(d, dtype, backend):
    inputs = make_inputs(
        Case(batch=1, sq=2, sk=700, d=d, heads=4, kv_heads=2, causal="bottom_right"), dtype, backend.device
    )
    rows = flash_attn_ext.attention_with_kvcache(
        inputs.q, inputs.k, inputs.v, cache_seqlens=700, return_max_logit="row", backend=backend.name
    )[1]
    torch.testing.assert_close(rows.double(), exact(inputs), rtol=0, atol=tolerance(inputs))


def test_shapes_of_other_ranks(backend):
    for shape in ((20, 16), (3, 20, 16), (2, 5, 3, 20, 16)):
        q = torch.randn(shape, device=backend.device)
        rows = flash_attn_ext.attention(q, q, q, return_max_logit="row", backend=backend.name)[1]
        heads = flash_attn_ext.attention(q, q, q, return_max_logit="head", backend=backend.name)[1]
        assert rows.shape == shape[:-1] and heads.shape == shape[-3:-2]
        dims = [dim for dim in range(rows.dim()) if dim != rows.dim() - 2]
        assert torch.equal(heads, rows.amax(dims))


@pytest.mark.parametrize("wrong", ["rows", "", 1, None, torch.tensor(True)], ids=repr)
def test_errors(wrong, backend):
    q = torch.randn(1, 2, 5, 16, device=backend.device)
    ends = cu_seqlens((5,), backend.device)
    calls = (
        lambda: flash_attn_ext.attention(q, q, q, return_max_logit=wrong, backend=backend.name),
        lambda: flash_attn_ext.explain(q, q, q, return_max_logit=wrong, backend=backend.name),
        lambda: flash_attn_ext.attention_varlen(q[0].mT, q[0].mT, q[0].mT, ends, ends, return_max_logit=wrong),
        lambda: flash_attn_ext.attention_with_kvcache(q, q, q, cache_seqlens=5, return_max_logit=wrong),
    )
    for run in calls:
        with pytest.raises((TypeError, ValueError), match="return_max_logit must be False, True, 'head' or 'row'"):
            run()


@pytest.mark.parametrize("wrong", ["rows", "", None])
def test_the_reference_refuses_what_it_does_not_know(wrong):
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match="return_max_logit must be False, True, 'head' or 'row'"):
        attention_reference(q, q, q, return_max_logit=wrong)


def test_explain_says_so():
    q = torch.randn(1, 2, 5, 16)
    assert flash_attn_ext.explain(q, q, q, return_max_logit=True, backend=CPU.name).forward.row_max
    assert not flash_attn_ext.explain(q, q, q, backend=CPU.name).forward.row_max
