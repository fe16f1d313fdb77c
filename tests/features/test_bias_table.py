"""Biases that are looked up in a table: every index, with every other feature, and the gradient of the table."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch._dynamo import compiled_autograd

import flash_attn_ext
from flash_attn_ext.bias_tables import T5Buckets, entries_of_pairs
from flash_attn_ext.reference import attention_reference
from support import checks
from support.cases import Case, Inputs, make_inputs
from support.device_memory import extra_memory
from support.direct import ATTENTION, directly
from support.errors import assert_rule_over_draws, compare
from support.params import FOR_GPUS, computes_in, for_gpus, over_cases, over_dtypes, over_problems
from support.problems.checks import as_presented
from support.problems.draw import draw
from support.refusals import assert_says
from support.runners import dropout_bits, poisoned_memory
from support.terms import largest_terms

pytest_generate_tests = over_problems

INDICES = ("clip", "t5", "t5 of a decoder", "pairs", "pairs of int16")
ENTRIES = {"clip": 33, "t5": 32, "t5 of a decoder": 32, "pairs": 29, "pairs of int16": 29}


@dataclass
class Table:
    """A table and its index, for one problem."""

    rows: torch.Tensor
    index: object

    def leaf(self) -> Table:
        return dataclasses.replace(self, rows=self.rows.detach().requires_grad_())

    def to(self, dtype: torch.dtype) -> Table:
        return dataclasses.replace(self, rows=self.rows.detach().to(dtype))


def make_table(case: Case, kind: str, dtype: torch.dtype, device: str, seed: int = 0) -> Table:
    generator = torch.Generator().manual_seed(seed + 77)
    rows = torch.randn(case.heads, ENTRIES[kind], generator=generator, dtype=torch.float64).to(device, dtype)
    if kind.startswith("pairs"):
        index = torch.randint(0, ENTRIES[kind], (case.sq, case.sk), generator=generator)
        return Table(rows, index.to(device, torch.int16 if kind.endswith("int16") else torch.int32))
    return Table(rows, T5Buckets(bidirectional=False, max_distance=60) if kind == "t5 of a decoder" else kind)


def run(function, inputs: Inputs, table: Table, **more) -> dict[str, torch.Tensor]:
    """Results and gradients of a function with attention's keywords."""
    leaves = inputs.leaves()
    table = table.leaf()
    tensors = inputs.operands(leaves)
    q, k, v = (tensors[name] for name in "qkv")
    out, lse = function(
        q,
        k,
        v,
        bias_table=table.rows,
        bias_index=table.index,
        mask=inputs.mask,
        intervals=inputs.intervals,
        block_lists=inputs.block_lists,
        alibi_slopes=tensors.get("alibi_slopes"),
        sink=tensors.get("sink"),
        return_lse=True,
        **inputs.case.options(),
        **more,
    )
    roots, cotangents = [out], [inputs.dout.to(out.dtype)]
    if inputs.dlse is not None:
        roots.append(lse)
        cotangents.append(inputs.dlse.to(lse.dtype))
    found = torch.autograd.grad(roots, [*leaves.values(), table.rows], cotangents, allow_unused=True)
    names = [*(f"d{name}" for name in leaves), "dtable"]
    grads = {name: g for name, g in zip(names, found, strict=True) if g is not None}
    return dict(out=out.detach(), lse=lse.detach(), **grads)


def run_table(inputs: Inputs, table: Table, backend) -> dict[str, torch.Tensor]:
    case = inputs.case
    if case.dropout_p:
        torch.manual_seed(inputs.dropout_seed)
    with poisoned_memory():
        return run(flash_attn_ext.attention, inputs, table, dropout_p=case.dropout_p, backend=backend.name)


def run_definition(inputs: Inputs, table: Table, keep: torch.Tensor | None) -> dict[str, torch.Tensor]:
    options = dict(dropout_p=inputs.case.dropout_p, dropout_mask=keep) if inputs.case.dropout_p else {}
    return run(attention_reference, inputs, table, **options)


def check_table(case: Case, kind: str, dtype: torch.dtype, backend, float32_table=False, present=lambda x: x) -> None:
    """Ours against the exact answer, by the errors of the formula in the same dtype. `present` gives the inputs as ours
    gets them."""

    def compare_draw(seed: int) -> dict:
        inputs = make_inputs(case, dtype, backend.device, seed)
        table = make_table(case, kind, torch.float32 if float32_table else dtype, backend.device, seed)
        ours = run_table(present(inputs), table, backend)
        if checks.run_only:
            return {}
        keep = dropout_bits(inputs, backend) if case.dropout_p else None
        exact = run_definition(inputs.to(torch.float64), table.to(torch.float64), keep)
        of_formula = run_definition(inputs, table.to(dtype), keep)
        seen = {name: torch.isfinite(exact[name]) for name in ours}
        for name, result in ours.items():
            assert torch.equal(torch.isfinite(result), seen[name]), f"{name} is not finite where it should be"
        terms = terms_of(inputs, table, exact, keep)
        return {
            name: compare(
                result[seen[name]], of_formula[name][seen[name]], exact[name][seen[name]], terms.get(name, 0.0)
            )
            for name, result in ours.items()
            if bool(seen[name].any())
        }

    assert_rule_over_draws(compare_draw)


def terms_of(inputs: Inputs, table: Table, exact: dict, keep: torch.Tensor | None) -> dict[str, float]:
    """The largest sums of absolute terms, of which those of the table are at least those of a bias for each pair."""
    case, rows = inputs.case, table.rows.double()
    distance = flash_attn_ext.reference.key_distance(case.sq, case.sk, case.causal, rows.device)
    bias = rows[:, entries_of_pairs(table.index, distance, rows.shape[1])][None]
    terms = largest_terms(inputs.to(torch.float64).replace(bias=bias), exact, keep)
    return terms | dict(dtable=terms["dbias"])


over_indices = pytest.mark.parametrize("kind", INDICES)
over_relative = pytest.mark.parametrize("kind", ["clip", "t5"])

SHAPES = [
    Case(sq=sq, sk=sk, d=d, batch=batch, heads=heads, kv_heads=kv_heads, dlse=d == 16)
    for sq, sk, d, batch, heads, kv_heads in (
        (1, 1, 16, 1, 2, 2),
        (1, 130, 64, 3, 4, 2),
        (63, 65, 32, 1, 2, 1),
        (64, 64, 16, 3, 2, 2),
        (65, 257, 64, 1, 2, 2),
        (127, 63, 16, 2, 4, 2),
        (129, 128, 32, 1, 3, 3),
        (130, 127, 64, 3, 2, 2),
        (49, 49, 32, 5, 3, 3),
    )
]
COMBINED = [
    Case(sq=70, sk=150, d=16, heads=4, kv_heads=2, **more)
    for more in (
        dict(causal="top_left", dlse=True),
        dict(causal="bottom_right", window=(60, None), dlse=True),
        dict(window=(20, 30), sink=True),
        dict(mask="b11k", softcap=5.0),
        dict(mask="bhqk", alibi="bh"),
        dict(intervals="1h", num_intervals=2, sink=True, dlse=True),
        dict(dropout_p=0.3, causal="bottom_right"),
        dict(dropout_p=0.2, mask="b1qk", softcap=3.0, sink=True, alibi="h", dlse=True),
    )
]
# The kernels of a GPU for each head dim, with as many tiles as they loop over.
LONG = for_gpus(
    Case(sq=sq, sk=sk, d=d, heads=4, kv_heads=2, mask=mask, causal=causal)
    for d in (64, 96, 128, 192, 256)
    for sq, sk, mask, causal in ((520, 520, None, None), (300, 700, "b11k", None), (641, 400, None, "bottom_right"))
)


@over_dtypes((torch.float32, torch.bfloat16, torch.float64, *for_gpus([torch.float16])))
@over_cases(SHAPES)
@over_indices
def test_shapes_at_edges_of_tiles(kind, case, dtype, backend):
    check_table(case, kind, dtype, backend)


@over_dtypes((torch.float32, torch.bfloat16, *for_gpus([torch.float64])))
@over_cases(COMBINED)
@over_indices
def test_with_every_other_feature(kind, case, dtype, backend):
    check_table(case, kind, dtype, backend)


@over_dtypes(for_gpus([torch.bfloat16, torch.float16]))
@over_cases(LONG)
@over_relative
def test_kernels_of_each_head_dim(kind, case, dtype, backend):
    check_table(case, kind, dtype, backend)


@over_dtypes((torch.bfloat16, torch.float16))
@over_relative
def test_float32_table_beside_16_bits(kind, dtype, backend):
    check_table(Case(sq=140, sk=100, d=32), kind, dtype, backend, float32_table=True)


@computes_in(None)
def test_random_problem(number, backend):
    """The dense problems of test_combinations.py, with a table for a bias."""
    problem = draw(number)
    case = dataclasses.replace(problem.case, bias=None, layout="bhsd")
    if refusal := backend.refusal(problem.dtype, case.d, case.head_dim_v):
        pytest.skip(refusal)
    kind, float32_table = INDICES[number % len(INDICES)], problem.dtype.itemsize == 2 and number % 4 == 0
    problem = dataclasses.replace(problem, case=case, packed=None)
    with mock.patch.dict(os.environ, problem.environment):
        check_table(
            case, kind, problem.dtype, backend, float32_table, present=lambda inputs: as_presented(problem, inputs)
        )


@over_dtypes((torch.float32, torch.bfloat16))
@over_indices
def test_same_as_the_bias_itself(kind, dtype, backend):
    """The bias of all pairs gives the same out, and its gradient summed by entries is that of the table."""
    case = Case(sq=90, sk=140, d=32, heads=4, kv_heads=2, causal="top_left", batch=3)
    inputs, table = make_inputs(case, dtype, backend.device), make_table(case, kind, dtype, backend.device)
    distance = flash_attn_ext.reference.key_distance(case.sq, case.sk, case.causal, torch.device(backend.device))
    entries = flash_attn_ext.bias_tables.entries_of_pairs(table.index, distance, table.rows.shape[1])
    bias = table.rows[:, entries][None].requires_grad_()
    out, lse = flash_attn_ext.attention(
        inputs.q, inputs.k, inputs.v, bias=bias, return_lse=True, backend=backend.name, **case.options()
    )
    (dbias,) = torch.autograd.grad(out, bias, inputs.dout)
    expected = torch.zeros(table.rows.shape, dtype=torch.float64, device=backend.device)
    expected.index_add_(1, entries.flatten(), dbias[0].double().flatten(1))
    ours = run_table(inputs, table, backend)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours["out"], out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours["lse"], lse, rtol=1e-5, atol=1e-4)
    scale = float(expected.abs().max())
    torch.testing.assert_close(ours["dtable"].double(), expected, rtol=0, atol=5 * tolerance * scale)


@over_indices
def test_repeats_bit_by_bit(kind, backend):
    case = Case(sq=300, sk=257, d=64, heads=4, kv_heads=2, batch=3)
    for dtype in (torch.float32, torch.bfloat16):
        inputs, table = make_inputs(case, dtype, backend.device), make_table(case, kind, dtype, backend.device)
        first = run_table(inputs, table, backend)
        for _ in range(3 if backend.is_cpu else 20):
            again = run_table(inputs, table, backend)
            assert all(torch.equal(first[name], again[name]) for name in first)


@over_relative
def test_any_number_of_threads(kind):
    from support.backends import CPU

    case = Case(sq=300, sk=600, d=16, heads=4, kv_heads=2)
    inputs, table = make_inputs(case, torch.float32, "cpu"), make_table(case, kind, torch.float32, "cpu")
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run_table(inputs, table, CPU))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_tensor_is_the_bias_that_it_looks_up(backend):
    """Bits, layout and dropout of a large call; and autograd notices an index that changes before the backward pass."""
    device = backend.device
    q, k, v = (torch.randn(1, 700, heads, 16, device=device).requires_grad_() for heads in (8, 2, 2))
    table = torch.randn(8, 9, device=device, requires_grad=True)
    index = torch.randint(0, 9, (700, 700), dtype=torch.int32, device=device)
    counts = torch.randint(1, 4, (1, 8, 11), dtype=torch.int32, device=device)
    lists = (counts, torch.randint(0, 11, (1, 8, 11, 4), dtype=torch.int32, device=device))
    options = dict(layout="bshd", block_lists=lists, dropout_p=0.3, backend=backend.name)
    found = []
    for bias in (dict(bias_table=table, bias_index=index), dict(bias=table[None, :, index.long()])):
        torch.manual_seed(3)
        out = flash_attn_ext.attention(q, k, v, **bias, **options)
        assert out.is_contiguous()
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    out = flash_attn_ext.attention(q, k, v, bias_table=table, bias_index=index, layout="bshd", backend=backend.name)
    with torch.no_grad():
        index.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@FOR_GPUS
@computes_in(torch.bfloat16)
@over_relative
def test_no_bias_of_all_pairs_in_memory(kind, backend, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "16")  # what Hopper's boxes of the bias take
    case = Case(sq=4096, sk=4096, d=64, batch=1, heads=16, kv_heads=16)
    inputs = make_inputs(case, torch.bfloat16, backend.device)
    table = make_table(case, kind, torch.bfloat16, backend.device)
    pairs = case.heads * case.sq * case.sk
    assert extra_memory(lambda: run_table(inputs, table, backend)) < pairs


def test_sums_clamp_entries_that_a_table_lacks(device):
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0]], device=device)
    entries = torch.tensor([-5, 0, 2, 9], dtype=torch.int32, device=device)
    sums = torch.ops.flash_attn_ext.table_sums(values, entries, 3)
    assert sums.tolist() == [[3.0, 0.0, 12.0]]
    assert torch.ops.flash_attn_ext.table_sums(values, entries, 0).shape == (1, 0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 256)])
def test_buckets_are_those_of_transformers(bidirectional, num_buckets, max_distance, device):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-5000, 5000, device=device)
    theirs = t5.T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(T5Buckets(bidirectional, max_distance).of(distance, num_buckets), theirs)


@over_relative
def test_second_derivatives(kind, backend):
    case = Case(sq=5, sk=7, d=4, heads=2, kv_heads=1, batch=2, causal="bottom_right")
    inputs = make_inputs(case, torch.float64, backend.device)
    rows = torch.randn(2, 7 if kind == "clip" else 8, dtype=torch.float64, device=backend.device, requires_grad=True)
    leaves = [inputs.leaves()[name] for name in "qkv"]

    def attend(q, k, v, table):
        return flash_attn_ext.attention(q, k, v, bias_table=table, bias_index=kind, causal="bottom_right")

    assert torch.autograd.gradcheck(attend, (*leaves, rows), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, (*leaves, rows))


@over_indices
def test_transforms(kind, backend):
    """vmap over tables, and forward mode, give what the calls one by one and the formula give."""
    case = Case(sq=33, sk=40, d=8, heads=2, kv_heads=2)
    inputs = make_inputs(case, torch.float32, backend.device)
    table = make_table(case, kind, torch.float32, backend.device)
    tables = torch.stack([table.rows, -table.rows, 2 * table.rows])

    def attend(rows, function=flash_attn_ext.attention, **more):
        return function(inputs.q, inputs.k, inputs.v, bias_table=rows, bias_index=table.index, **more)

    one_by_one = torch.stack([attend(rows) for rows in tables])
    torch.testing.assert_close(torch.vmap(attend)(tables), one_by_one)
    gradients = torch.vmap(torch.func.grad(lambda rows: attend(rows).square().sum()))(tables)
    of_each = torch.stack([torch.func.grad(lambda rows: attend(rows).square().sum())(rows) for rows in tables])
    torch.testing.assert_close(gradients, of_each, rtol=1e-4, atol=1e-4)
    _, tangent = torch.func.jvp(attend, (table.rows,), (tables[2],))
    _, expected = torch.func.jvp(
        lambda rows: attend(rows, attention_reference, return_lse=False), (table.rows,), (tables[2],)
    )
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-4)


@over_relative
def test_plain_calls_go_directly_to_the_extension(kind, backend):
    case = Case(sq=33, sk=40, d=8, heads=2, kv_heads=2)
    inputs, table = (
        make_inputs(case, torch.float32, backend.device),
        make_table(case, kind, torch.float32, backend.device),
    )
    options = dict(bias_table=table.rows, bias_index=table.index)
    assert directly(ATTENTION, (inputs.q, inputs.k, inputs.v), options) is not None
    first = tuple(t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v))
    assert directly(ATTENTION, first, options | dict(layout="bshd")) is not None


@over_indices
def test_gradients_of_several_cotangents_at_once(kind, backend):
    case = Case(sq=33, sk=40, d=8, heads=2, kv_heads=2)
    inputs, table = (
        make_inputs(case, torch.float32, backend.device),
        make_table(case, kind, torch.float32, backend.device),
    )
    rows = table.leaf().rows
    out = flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, bias_table=rows, bias_index=table.index)
    cotangents = torch.stack([inputs.dout, 2 * inputs.dout, -inputs.dout])
    (together,) = torch.autograd.grad(out, rows, cotangents, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, rows, each, retain_graph=True)[0] for each in cotangents]
    torch.testing.assert_close(together, torch.stack(one_by_one), rtol=1e-4, atol=1e-5)


@over_indices
def test_compiled(kind, backend, fresh_compiler):
    case = Case(sq=65, sk=70, d=32, heads=2, kv_heads=2)
    inputs, table = (
        make_inputs(case, torch.float32, backend.device),
        make_table(case, kind, torch.float32, backend.device),
    )

    @torch.compile(fullgraph=True)
    def attend(q, k, v, rows):
        return flash_attn_ext.attention(q, k, v, bias_table=rows, bias_index=table.index)

    rows = table.leaf().rows
    out = attend(inputs.q, inputs.k, inputs.v, rows)
    (gradient,) = torch.autograd.grad(out, rows, inputs.dout)
    ours = run_table(inputs.replace(dlse=None), table, backend)
    torch.testing.assert_close(out, ours["out"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, ours["dtable"], rtol=1e-3, atol=1e-3)


@over_indices
def test_compiled_autograd(kind, backend):
    case = Case(sq=33, sk=40, d=8, heads=2, kv_heads=2)
    inputs = make_inputs(case, torch.float32, backend.device)
    table = make_table(case, kind, torch.float32, backend.device)
    eager = run_table(inputs, table, backend)["dtable"]
    rows = table.leaf().rows
    out = flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, bias_table=rows, bias_index=table.index)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        out.backward(inputs.dout)
    torch.testing.assert_close(rows.grad, eager, rtol=1e-4, atol=1e-5)


def test_other_layouts_and_ranks(backend):
    q, k, v = torch.randn(3, 2, 40, 4, 16, device=backend.device)
    rows = torch.randn(4, 9, device=backend.device)
    expected = flash_attn_ext.attention(
        *(t.transpose(1, 2) for t in (q, k, v)), bias_table=rows, bias_index="clip"
    ).transpose(1, 2)
    sequence_first = flash_attn_ext.attention(q, k, v, bias_table=rows, bias_index="clip", layout="bshd")
    torch.testing.assert_close(sequence_first, expected)
    one = flash_attn_ext.attention(q[0, :, 0], k[0, :, 0], v[0, :, 0], bias_table=rows[:1], bias_index="clip")
    torch.testing.assert_close(one, expected[0, :, 0])


def test_explain(backend):
    q = torch.randn(2, 4, 70, 16, device=backend.device)
    rows = torch.randn(4, 9, device=backend.device, requires_grad=True)
    explanation = flash_attn_ext.explain(q, q, q, bias_table=rows, bias_index="clip", backend=backend.name)
    assert explanation.backend == backend.name and explanation.backward.dbias is not None


def test_gpu_clamps_entries(backend):
    if backend.is_cpu:
        pytest.skip("values on the CPU are looked at")
    q = torch.randn(1, 2, 8, 16, device=backend.device)
    rows, index = torch.randn(2, 5, device=backend.device), torch.randint(-9, 9, (8, 8), device=backend.device).int()
    ours = flash_attn_ext.attention(q, q, q, bias_table=rows, bias_index=index)
    torch.testing.assert_close(ours, flash_attn_ext.attention(q, q, q, bias_table=rows, bias_index=index.clamp(0, 4)))


ROWS = torch.zeros(2, 5)
REFUSALS = {
    "both": (dict(bias=torch.zeros(1, 1, 8, 8)), ValueError, ("bias", "bias_table")),
    "no index": (dict(bias_index=None), ValueError, ("bias_index", "bias_table")),
    "no table": (dict(bias_table=None), ValueError, ("bias_index", "bias_table")),
    "of another type": (dict(bias_table=[1.0]), TypeError, ("bias_table", "list")),
    "transposed": (dict(bias_table=torch.zeros(5, 2)), RuntimeError, ("bias_table", "(5, 2)", "bias_table.T")),
    "dtype": (dict(bias_table=ROWS.half()), RuntimeError, ("bias_table", "torch.float16", "torch.float32")),
    "even": (dict(bias_table=torch.zeros(2, 4)), ValueError, ("bias_table", "4", "odd")),
    "odd buckets": (dict(bias_index="t5"), ValueError, ("bias_table", "5", "even")),
    "too few buckets": (dict(bias_index=T5Buckets(max_distance=1), bias_table=torch.zeros(2, 8)), ValueError, ("8",)),
    "unknown": (dict(bias_index="rows"), ValueError, ("bias_index", "'rows'", "'clip'")),
    "int64": (dict(bias_index=torch.zeros(8, 8).long()), RuntimeError, ("bias_index", "torch.int64", "torch.int32")),
    "shape": (dict(bias_index=torch.zeros(8, 9).int()), RuntimeError, ("bias_index", "(8, 9)", "(8, 8)")),
    "values": (dict(bias_index=torch.full((8, 8), 5).int()), ValueError, ("bias_index", "5", "4")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    changes, kind, parts = REFUSALS[name]
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(kind) as raised:
        flash_attn_ext.attention(q, q, q, **dict(bias_table=ROWS, bias_index="clip") | changes)
    assert_says(raised.value, parts)


@pytest.mark.parametrize(
    "strided",
    [lambda index: index.T[-1:], lambda index: index[:, :1], lambda index: index[:1, :1].expand(10, 10)],
    ids=["one query", "one key", "one entry"],
)
def test_strides_of_an_index(strided, backend):
    """Also where its dimensions could be merged without a copy."""
    index = strided(torch.randint(0, 5, (10, 10), dtype=torch.int32, device=backend.device))
    q, k = (torch.randn(1, 2, length, 8, device=backend.device) for length in index.shape)
    rows = torch.randn(2, 5, device=backend.device, requires_grad=True)
    results = []
    for given in (index, index.contiguous()):
        out = flash_attn_ext.attention(q, k, k, bias_table=rows, bias_index=given, backend=backend.name)
        results.append((out, *torch.autograd.grad(out.square().sum(), rows)))
    assert all(map(torch.equal, *results))


def test_packed_sequences_are_refused():
    q, offsets = torch.zeros(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="bias_table does not go with cu_seqlens"):
        flash_attn_ext.explain(q, q, q, offsets, offsets, bias_table=ROWS, bias_index="clip")
