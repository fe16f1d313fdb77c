"""An additive bias of every broadcast shape, and its gradient summed over what was broadcast."""

import dataclasses
import math

import pytest
import torch

from support.cases import ALL_PATTERNS, Case, Inputs, make_inputs
from support.checks import check_case, check_drawn, check_inputs, check_packed_drawn
from support.packed import PackedCase, make_packed
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours

CASES = [Case(sq=140, sk=270, d=16, batch=3, heads=2, bias=pattern) for pattern in ALL_PATTERNS]
EDGES = [Case(sq=n, sk=m, d=16, bias="1hqk") for n, m in ((1, 257), (128, 256), (129, 33), (257, 32), (64, 1))]
COMBINED = [
    Case(sq=140, sk=270, d=16, heads=4, kv_heads=2, bias=pattern, causal="bottom_right", dlse=True)
    for pattern in ("bhqk", "11qk", "b11k", "1hq1")
]
# Where a GPU keeps dS, and dBias is read from it: rows of dBias that are multiples of 16 bytes, and not.
KEPT = [
    Case(sq=sq, sk=sk, d=d, batch=2, heads=4, kv_heads=2, bias=pattern, **features)
    for d in (64, 96, 128, 192)
    for pattern in ("1hqk", "bhqk", "11qk", "b1qk")
    for sq, sk, features in ((140, 270, {}), (201, 136, dict(causal="bottom_right")))
]
KEPT_PACKED = [
    PackedCase((70, 0, 129, 3), (31, 64, 200, 1), Case(d=d, heads=4, kv_heads=2, bias=pattern, causal=causal))
    for d in (64, 128, 192)
    for pattern, causal in (("1hqk", None), ("b1qk", "bottom_right"), ("11qk", "top_left"))
]
# Where dS is computed again for dBias: sums over queries, and biases before which scores were capped.
RECOMPUTED = [
    Case(sq=sq, sk=270, d=d, batch=2, heads=4, kv_heads=2, bias=pattern, **features)
    for d in (64, 128, 192)
    for sq, pattern, features in (
        (140, "1h1k", dict(causal="bottom_right", dlse=True)),
        (300, "b11k", dict(mask="b1qk")),
        (300, "111k", dict(dropout_p=0.2, sink=True)),
        (300, "1hqk", dict(softcap=5.0)),
        (300, "b11k", dict(softcap=5.0, window=(70, 9))),
    )
]
# Broadcast along keys: what remains of sums of dS is a small part of their terms.
WHOLE_ROWS = [
    Case(sq=300, sk=65, d=64, heads=6, kv_heads=2, scale=-0.2, bias="bhq1", alibi="h", dropout_p=0.1, dlse=True),
    Case(sq=31, sk=65, d=127, batch=1, heads=1, causal="top_left", scale=-0.2, bias="1hq1", dropout_p=0.6, dlse=True),
    Case(sq=32, sk=128, d=128, batch=1, window=(100, 0), scale=-0.2, bias="1111", dlse=True),
    Case(sq=127, sk=33, d=1, heads=1, causal="top_left", scale=0.05, bias="1111", mask="111k", dlse=True),
    Case(sq=128, sk=32, d=63, batch=1, heads=1, scale=0.5, bias="1h11", sink=True, dropout_p=0.6, dlse=True),
    Case(sq=192, sk=256, d=40, dv=16, heads=6, kv_heads=2, softcap=20.0, bias="b111", sink=True, dlse=True),
    Case(sq=140, sk=270, d=16, bias="b1q1", sink=True, mask="bhqk", mask_keep=0.02),
]
WHOLE_ROWS = [dataclasses.replace(case, bias_float32=True) for case in WHOLE_ROWS]
WHOLE_ROWS_PACKED = [
    PackedCase((70, 0, 129, 3), (31, 64, 200, 0), Case(d=64, heads=4, kv_heads=2, bias=pattern, sink=sink, dlse=True))
    for pattern, sink in (("bhq1", False), ("11q1", True), ("b111", False))
]


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(CASES)
def test_every_broadcast_shape(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float64, torch.float16))
@over_cases(EDGES + COMBINED)
def test_tile_edges_and_combinations(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(KEPT)
def test_head_dims_at_which_scores_are_kept(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases([*RECOMPUTED[:5], *for_gpus(RECOMPUTED[5:])])
def test_recomputed(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16,))
@over_cases([RECOMPUTED[0], *for_gpus(RECOMPUTED[5::5])])
def test_sums_over_queries_where_out_is_far_from_zero(case, dtype, backend):
    """Rounding out moves delta by as much as dS is large, for all keys of a query."""
    inputs = make_inputs(case, dtype, backend.device)
    check_inputs(inputs.replace(v=inputs.v + 16.0), backend)


@over_dtypes((torch.bfloat16,))
@over_cases(KEPT_PACKED)
def test_packed_where_scores_are_kept(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes()
@over_cases(WHOLE_ROWS)
def test_whole_rows(case, dtype, backend):
    def draw(seed: int) -> Inputs:
        inputs = make_inputs(case, dtype, backend.device, seed)
        return inputs.replace(dout=64 * inputs.dout)  # and not dlse, which is what remains

    check_drawn(draw, backend)


@over_dtypes((torch.float32, torch.float16))
@over_cases(WHOLE_ROWS_PACKED)
def test_whole_rows_of_packed_sequences(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes()
@pytest.mark.parametrize("dlse", [True, False])
def test_whole_rows_get_the_gradient_of_the_lse(dlse, dtype, backend):
    """Such a bias moves the LSE and nothing else: without a gradient of that, its own is 0, to the last bit."""
    case = Case(sq=140, sk=270, mask="bhqk", mask_keep=0.01, bias="bhq1", softcap=5.0, dropout_p=0.3, dlse=dlse)
    inputs = make_inputs(case, dtype, backend.device)
    result = run_ours(inputs, backend)
    lse = result["lse"]
    assert bool((lse == -math.inf).any())
    expected = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse.masked_fill(lse == -math.inf, 0)
    assert torch.equal(result["dbias"][..., 0], expected.to(dtype))


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("sink", [-math.inf, -10.0, 0.0, 5.0])
def test_whole_rows_beside_a_sink(sink, dtype, backend):
    case = Case(sq=70, sk=270, bias="1hq1", bias_float32=True, window=(7, 0), sink=True, dlse=True)
    inputs = make_inputs(case, dtype, backend.device)
    inputs.sink[:] = sink
    check_inputs(inputs, backend)


@over_dtypes((torch.float32, torch.bfloat16, torch.float64))
def test_whole_rows_that_meet_nan(dtype, backend):
    inputs = make_inputs(Case(sq=140, sk=140, causal="top_left", bias="1hq1", dlse=True), dtype, backend.device)
    clean = run_ours(inputs, backend)["dbias"]
    inputs.v[1, :, 100] = math.nan
    met = run_ours(inputs, backend)["dbias"]
    assert torch.equal(met[:, :, :100], clean[:, :, :100])
    assert bool(met[:, :, 100:].isnan().all())


@over_dtypes((torch.bfloat16, torch.float16))
@over_cases(
    [Case(sq=140, sk=270, bias=pattern, bias_float32=True) for pattern in ("bhqk", "1h11", "b11k")]
    + [Case(sq=140, sk=sk, d=128, bias="1hqk", bias_float32=True) for sk in (270, 272)]
)
def test_float32_bias_beside_16_bit_inputs(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, torch.float16))
@pytest.mark.parametrize("d", [32, 128, 192])
def test_float32_bias_is_not_rounded(d, dtype, backend):
    """Neither to the inputs' dtype on the way in, nor its gradient on the way out.

    Around 4096 the neighbours of 16-bit numbers are 4 and more apart, so all that distinguishes keys would be gone.
    """
    inputs = make_inputs(Case(sq=140, sk=270, d=d, bias="bhqk", bias_float32=True), dtype, backend.device)
    inputs.bias += 4096
    result = check_inputs(inputs, backend)
    gradient = result["dbias"]
    assert float((gradient == gradient.to(dtype).float()).double().mean()) < 0.1
