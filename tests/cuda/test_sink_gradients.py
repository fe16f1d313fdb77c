"""The gradient of sinks on a GPU: beside each of Hopper's backward kernels, and in the kernels that add it up. Lengths
at edges of what a warp and a CTA add, packed sequences, sinks of every size, rows without keys, and NaN."""

import math

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.checks import check_drawn, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, cu_seqlens, make_packed, run_packed
from support.params import over_cases, over_dtypes
from support.plans import KEY_STATIONARY, QUERY_STATIONARY, TWO_PASS
from support.runners import poisoned_memory, run_ours

RUNS = 100
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

# A warp adds up to 256 queries of a sequence, and a CTA has 8 warps.
LENGTHS = (1, 31, 255, 256, 257, 511, 2047, 2049, 2305)
VISIBLE = (dict(), dict(causal="top_left", dlse=True), dict(causal="bottom_right"), dict(window=(100, 0), dlse=True))
EDGES = [
    Case(sq=sq, sk=(sq, 300)[n % 2], heads=4, kv_heads=(4, 2, 1)[n % 3], d=(64, 128)[m % 2], sink=True, **visible)
    for n, sq in enumerate(LENGTHS)
    for m, visible in enumerate(VISIBLE)
]
# The kernels of each call on Hopper.
KERNELS = {
    KEY_STATIONARY: [
        Case(sq=577, sk=640, heads=4, kv_heads=2, d=d, sink=True, **options)
        for d in (64, 96, 128)
        for options in (
            dict(),
            dict(causal="top_left", dlse=True),
            dict(window=(100, 30)),
            dict(mask="bhqk"),
            dict(mask="b11k", padding=True, dlse=True),
            dict(dropout_p=0.2),
            dict(bias="1hqk"),
        )
        if "bias" not in options or d != 96
    ],
    TWO_PASS: [
        Case(sq=577, sk=640, heads=4, kv_heads=2, d=d, sink=True, **options)
        for d, options in (
            (256, dict()),
            (256, dict(causal="bottom_right", dlse=True)),
            (192, dict(window=(100, 30))),
            (256, dict(mask="bhqk", dlse=True)),
            (64, dict(softcap=8.0, dropout_p=0.1)),
            (128, dict(alibi="h", dropout_p=0.1, dlse=True)),
            (64, dict(bias="1hqk", mask="b11k")),
        )
    ],
    QUERY_STATIONARY: [
        Case(sq=sq, sk=sk, heads=4, d=d, sink=True, dlse=dlse)
        for d in (64, 128)
        for sq, sk, dlse in ((1, 1024, False), (100, 2500, True), (128, 1100, False))
    ],
}
SINKS = (-math.inf, -50.0, -3.0, 8.0, 40.0)
PACKED = [
    PackedCase(lengths_q, lengths_k, Case(d=d, heads=4, kv_heads=2, sink=True, **options))
    for d in (64, 128, 256)
    for lengths_q, lengths_k in (
        ((300, 0, 65, 700, 257), (300, 40, 129, 640, 0)),
        ((5, 1, 0, 3, 2, 256, 7), (5, 1, 4, 3, 2, 256, 7)),
    )
    for options in (dict(), dict(causal="bottom_right", dlse=True), dict(window=(63, 0)))
]


def with_gradients(inputs: Inputs) -> Inputs:
    """Of all but slopes and biases, whose gradients take other kernels."""
    return inputs.replace(differentiable=("q", "k", "v", "sink"))


def problem(case: Case, dtype: torch.dtype, seed: int = 0, sink: float | None = None) -> Inputs:
    inputs = make_inputs(case, dtype, "cuda", seed, draw_on="cuda")
    return with_gradients(inputs if sink is None else inputs.replace(sink=torch.full_like(inputs.sink, sink)))


@over_dtypes()
@over_cases(EDGES)
def test_edges_of_sums(case, dtype, gpu):
    check_drawn(lambda seed: problem(case, dtype, seed), gpu)


@over_16_bits
@pytest.mark.parametrize(("kernel", "case"), [(k, c) for k, cases in KERNELS.items() for c in cases], ids=str)
def test_beside_each_kernel_of_hopper(kernel, case, dtype, gpu, on_hopper):
    inputs = problem(case, dtype)
    if kernel == KEY_STATIONARY and dtype == torch.bfloat16 and case.d > 64:
        kernel = TWO_PASS  # weights might vanish
    tensors = inputs.operands(inputs.leaves())
    plan = flash_attn_ext.explain(
        tensors.pop("q"),
        tensors.pop("k"),
        tensors.pop("v"),
        mask=inputs.mask,
        dropout_p=case.dropout_p,
        backend=gpu.name,
        **case.options(),
        **tensors,
    )
    assert plan.backward.kernel == kernel
    check_drawn(lambda seed: problem(case, dtype, seed), gpu)


@over_16_bits
@pytest.mark.parametrize("sink", SINKS)
@over_cases(
    [
        Case(sq=300, sk=340, heads=4, kv_heads=2, d=64, sink=True, causal="top_left", dlse=True),
        Case(sq=300, sk=340, heads=2, d=128, sink=True, mask="bhqk", mask_keep=0.3),
        Case(sq=300, sk=340, heads=2, d=96, sink=True),
        Case(sq=300, sk=340, heads=2, d=128, sink=True),
        Case(sq=300, sk=340, heads=2, d=256, sink=True),
        Case(sq=40, sk=50, batch=64, heads=4, d=64, sink=True),
    ]
)
def test_sinks_of_every_size(case, sink, dtype, gpu):
    check_drawn(lambda seed: problem(case, dtype, seed, sink), gpu)
    if sink == -math.inf:
        assert not bool(run_ours(problem(case, dtype, sink=sink), gpu)["dsink"].any())


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: with_gradients(make_packed(case, dtype, "cuda", seed, draw_on="cuda")), gpu)


@over_dtypes()
def test_rows_behind_the_last_sequence_do_not_count(dtype, gpu):
    """They have no delta, and the memory where it would be holds NaN. A GPU's offsets are not checked."""
    case = PackedCase((100, 300), (100, 300), Case(d=64, heads=4, kv_heads=2, sink=True))
    inputs = with_gradients(make_packed(case, dtype, "cuda"))
    expected = run_packed(case, inputs, gpu)["dsink"]
    longer = {name: torch.cat([getattr(inputs, name), getattr(inputs, name)[:77]]) for name in ("q", "k", "v", "dout")}
    dout = longer.pop("dout")
    leaves = {name: tensor.requires_grad_() for name, tensor in longer.items()}
    sink = inputs.sink.clone().requires_grad_()
    lengths = cu_seqlens(case.lengths_q, "cuda")
    with poisoned_memory():
        out = flash_attn_ext.attention_varlen(
            *leaves.values(), lengths, lengths, max_seqlen_q=300, max_seqlen_k=300, sink=sink, backend=gpu.name
        )
        (dsink,) = torch.autograd.grad(out, [sink, *leaves.values()], dout)[:1]
    torch.testing.assert_close(dsink, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@over_16_bits
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["11qk", "bhqk"])
def test_rows_without_keys(mask, d, dtype, gpu):
    """Whole tiles of them, and a single one: they add dLSE, and what dout holds there does not matter."""
    case = Case(sq=400, sk=500, heads=2, d=d, mask=mask, sink=True, dlse=True)

    def draw(seed: int) -> Inputs:
        inputs = problem(case, dtype, seed)
        inputs.mask[..., 128:256, :] = False
        inputs.mask[..., 399, :] = False
        return inputs

    check_drawn(draw, gpu)
    inputs = draw(0)
    spoiled = inputs.dout.clone()
    spoiled[:, :, 130:140] = math.nan
    spoiled[:, :, 399] = math.inf
    clean, dirty = run_ours(inputs, gpu), run_ours(inputs.replace(dout=spoiled), gpu)
    torch.testing.assert_close(dirty["dsink"], clean["dsink"])


@over_16_bits
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_spoiled_row_spoils_its_own_head(d, dtype, gpu):
    inputs = problem(Case(sq=600, sk=600, heads=4, kv_heads=2, d=d, sink=True), dtype)
    clean = run_ours(inputs, gpu)["dsink"]
    inputs.dout[1, 2, 300] = math.nan
    dirty = run_ours(inputs, gpu)["dsink"]
    assert bool(dirty[2].isnan())
    others = torch.tensor([0, 1, 3], device="cuda")
    assert torch.equal(dirty[others], clean[others])


def test_only_the_gradient_of_the_sink(gpu):
    inputs = problem(Case(sq=600, sk=600, heads=4, d=64, sink=True), torch.bfloat16)
    every = run_ours(inputs, gpu)["dsink"]
    alone = run_ours(inputs.replace(differentiable=("sink",)), gpu)["dsink"]
    torch.testing.assert_close(alone, every, rtol=1e-3, atol=1e-3 * float(every.abs().max()))


@over_dtypes((torch.bfloat16,))
@over_cases(
    [
        Case(sq=4500, sk=4500, heads=8, kv_heads=2, d=64, sink=True, dlse=True, causal="top_left"),
        Case(sq=1100, sk=1500, batch=3, heads=8, d=128, sink=True, window=(127, 0), causal="bottom_right"),
        Case(sq=1100, sk=1500, batch=3, heads=8, d=256, sink=True),
        Case(sq=128, sk=4000, batch=3, heads=8, d=64, sink=True),
    ]
)
def test_repeats(case, dtype, gpu):
    assert_repeats(problem(case, dtype), gpu, RUNS)


@over_dtypes((torch.float32, torch.float64))
def test_long_sequences_add_up(dtype, gpu):
    """All keys are the same: every row has the same share of the sink and the same delta."""
    rows, keys, heads = 100_003, 8, 2
    case = Case(sq=rows, sk=keys, batch=1, heads=heads, d=16, sink=True)
    options = dict(device="cuda", dtype=dtype)
    inputs = Inputs(
        case,
        q=torch.zeros(1, heads, rows, 16, **options),
        k=torch.zeros(1, heads, keys, 16, **options),
        v=torch.ones(1, heads, keys, 16, **options),
        dout=torch.ones(1, heads, rows, 16, **options),
        sink=torch.tensor([math.log(keys), math.log(3 * keys)], **options),
    )
    # The keys have shares of 1/2 and 1/4, and 16 columns: -rows * s * (1 - s) * 16.
    expected = torch.tensor([-rows * 0.25 * 16, -rows * 0.75 * 0.25 * 16], **options)
    torch.testing.assert_close(run_ours(with_gradients(inputs), gpu)["dsink"], expected, rtol=2e-6, atol=0)
