"""The kernel of forward mode, at the edges of its tiles, and which calls take it.

What all ways of forward mode have in common: derivatives/test_forward_mode.py.
"""

import re

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import _C
from flash_attn_ext._call.options import dense_problem, problem_of
from support.cases import Case, make_inputs
from support.checks import check_draws
from support.derivatives.second_order import directions, jvp, ours, reference
from support.errors import compare
from support.graphs import captured
from support.packed import cu_seqlens
from support.params import over_cases, over_dtypes
from support.plans import DEFAULTS
from support.runners import poisoned_memory

pytestmark = pytest.mark.usefixtures("gpu")

WITH_KERNEL = (torch.bfloat16, torch.float16, torch.float32)
# Around the edges of tiles of 64 and 128 queries and of 32 and 64 keys.
LENGTHS = [(1, 1), (1, 300), (63, 64), (64, 63), (65, 65), (127, 33), (128, 128), (129, 97), (192, 31), (300, 1)]
HEAD_DIMS = [(1, 1), (40, 40), (64, 64), (72, 72), (96, 96), (100, 128), (128, 128), (128, 20)]
WIDE = [(160, 160), (192, 128), (256, 256), (5, 200)]
SQUARE = dict(sq=150, sk=150)
CASES = [
    *(Case(sq=sq, sk=sk, d=64, causal=causal) for sq, sk in LENGTHS for causal in (None, "top_left", "bottom_right")),
    *(Case(sq=70, sk=101, d=d, dv=dv, causal="bottom_right", dlse=True) for d, dv in HEAD_DIMS),
    Case(**SQUARE, d=64, heads=6, kv_heads=2, window=(40, 3)),
    Case(**SQUARE, d=128, heads=4, kv_heads=1, window=(0, 0), sink=True),
    Case(**SQUARE, d=64, layout="bshd", scale=-0.3, sink=True),
    Case(sq=150, sk=40, d=128, causal="bottom_right", dlse=True),  # queries that see nothing
    Case(sq=20, sk=1300, d=64, window=(100, 200)),
]


def check(case: Case, dtype: torch.dtype, gpu) -> None:
    def errors(inputs, found):
        along = directions(inputs)
        exactly = {name: tangent.double() for name, tangent in along.items()}
        yardstick = jvp(reference(inputs, None), inputs, along)
        exact = jvp(reference(inputs.to(torch.float64), None), inputs.to(torch.float64), exactly)
        # What sees no key has a tangent of 0; the reference's is NaN in the LSE, which is -inf there.
        return {name: compare(found[name], yardstick[name], exact[name].nan_to_num(0.0)) for name in found}

    def run(inputs):
        with poisoned_memory():
            return jvp(ours(inputs, gpu), inputs, directions(inputs))

    check_draws(lambda seed: make_inputs(case, dtype, "cuda", seed), gpu, run=run, errors=errors)


@over_dtypes(WITH_KERNEL)
@over_cases(CASES)
def test_error_rule(case, dtype, gpu):
    check(case, dtype, gpu)


@over_dtypes((torch.bfloat16, torch.float16))
@over_cases([Case(sq=70, sk=101, d=d, dv=dv, causal="bottom_right") for d, dv in WIDE])
def test_wide_heads(case, dtype, gpu):
    check(case, dtype, gpu)


def problem(dtype=torch.bfloat16, d=64, **options):
    """q, k and v of 70 and 90 tokens, as a call's problem."""
    q, k, v = (torch.randn(2, 2, n, d, device="cuda", dtype=dtype) for n in (70, 90, 90))
    found, _, _ = dense_problem(problem_of(q=q, k=k, v=v, **DEFAULTS | dict(backend=None) | options), "bhsd")
    if found.dropout_p > 0:
        found = found._replace(rng_seed=torch.zeros(1, dtype=torch.int64, device="cuda"))
    return found


def tangents_of(call, **tangents):
    """What the kernel makes of it; None where there is no kernel."""
    out, lse, *_ = _C.attention_forward(call)
    names = ("q_tangent", "k_tangent", "v_tangent", "sink_tangent")
    return _C.attention_tangents(out, lse, *(tangents.get(name) for name in names), call)


WITHOUT = [
    dict(dtype=torch.float64),
    dict(d=264),
    dict(dtype=torch.float32, d=136),
    dict(softcap=3.0),
    dict(dropout_p=0.3),
    dict(mask=torch.ones(70, 90, dtype=torch.bool)),
    dict(bias=torch.zeros(70, 90)),
    dict(alibi_slopes=torch.ones(2)),
]


@pytest.mark.parametrize("options", WITHOUT, ids=lambda options: "-".join(options))
def test_calls_without_a_kernel(options):
    options = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    call = problem(**options)
    assert tangents_of(call, q_tangent=torch.ones_like(call.q)) is None


@over_dtypes(WITH_KERNEL)
@pytest.mark.parametrize("given", ["q", "k", "v", "none"])
def test_absent_tangents_are_zeros(given, dtype):
    call = problem(dtype, causal="bottom_right")
    names = ("q", "k", "v")
    drawn = {f"{name}_tangent": torch.randn_like(getattr(call, name)) for name in names}
    some = {name: tangent for name, tangent in drawn.items() if name == f"{given}_tangent"}
    zeros = {name: torch.zeros_like(tangent) for name, tangent in drawn.items()}
    for found, expected in zip(tangents_of(call, **some), tangents_of(call, **zeros | some), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("later", "factor"), [(1.0, 2.0**-12), (1.0, 2.0**6), (1.0, 2.0**13), (2.0**6, 2.0**7)])
def test_products_beyond_float16(later, factor):
    """P S' beyond its largest number, in all tiles or, by the factor `later`, in later ones; or so small that it would
    lose digits. O' is within range. Everything is linear in the tangents."""
    call = problem(torch.float16, scale=1.0)
    call = call._replace(v=call.v * 2.0**-12)
    tangents = {f"{name}_tangent": torch.randn_like(getattr(call, name)) for name in ("q", "k")}
    tangents["k_tangent"][:, :, 64:] *= later
    expected = [result.double() for result in tangents_of(call, **tangents)]
    found = tangents_of(call, **{name: tangent * factor for name, tangent in tangents.items()})
    tolerance = float(2e-3 * expected[0].abs().max()) + 2.0**-24 / factor  # of what results are rounded to
    torch.testing.assert_close(found[0].double() / factor, expected[0], rtol=4e-3, atol=tolerance)
    torch.testing.assert_close(found[1].double() / factor, expected[1], rtol=2e-3, atol=2e-2)


@over_dtypes(WITH_KERNEL)
@pytest.mark.parametrize("spoiled", ["k", "v", "k_tangent", "v_tangent"])
def test_what_a_query_does_not_see_may_be_nan(spoiled, dtype):
    """Even where other queries of the same tile see it."""
    call = problem(dtype, causal="top_left")
    tangents = {f"{name}_tangent": torch.randn_like(getattr(call, name)) for name in ("q", "k", "v")}
    out, lse, *_ = _C.attention_forward(call)
    expected = _C.attention_tangents(out, lse, *tangents.values(), None, call)
    tensors = tangents | dict(q=call.q, k=call.k, v=call.v)
    tensors[spoiled] = tensors[spoiled].clone()
    tensors[spoiled][:, :, 40] = torch.nan
    call = call._replace(k=tensors["k"], v=tensors["v"])
    found = _C.attention_tangents(out, lse, *(tensors[name] for name in tangents), None, call)
    for of, found_of, expected_of in zip(("out", "lse"), found, expected, strict=True):
        torch.testing.assert_close(found_of[:, :, :40], expected_of[:, :, :40], rtol=2e-2, atol=2e-2, msg=of)
    assert found[0][:, :, 40:].isnan().all()


@over_dtypes(WITH_KERNEL)
def test_other_strides(dtype):
    """Rows that are apart, columns that are apart, an expanded tangent: as their contiguous copies."""
    call = problem(dtype)
    q = torch.randn(2, 70, 2, 64, device="cuda", dtype=dtype).transpose(1, 2)
    k = torch.randn(2, 2, 64, 90, device="cuda", dtype=dtype).mT
    v = torch.ones(1, device="cuda", dtype=dtype).expand(2, 2, 90, 64)
    found = tangents_of(call, q_tangent=q, k_tangent=k, v_tangent=v)
    copies = dict(q_tangent=q.contiguous(), k_tangent=k.contiguous(), v_tangent=v.contiguous())
    for found_of, expected in zip(found, tangents_of(call, **copies), strict=True):
        assert torch.equal(found_of, expected)


@over_dtypes(WITH_KERNEL)
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_packed_sequences(causal, dtype):
    """Each as by itself, and in a CUDA graph: nothing waits for the lengths."""
    lengths_q, lengths_k = (100, 0, 257, 1), (64, 30, 300, 1)
    q, dq = (torch.randn(sum(lengths_q), 4, 64, device="cuda", dtype=dtype) for _ in range(2))
    k, v, dk, dv = (torch.randn(sum(lengths_k), 2, 64, device="cuda", dtype=dtype) for _ in range(4))
    starts = cu_seqlens(lengths_q, "cuda"), cu_seqlens(lengths_k, "cuda")
    longest = dict(max_seqlen_q=257, max_seqlen_k=300)

    def attend(*tensors):
        return flash_attn_ext.attention_varlen(*tensors, *starts, **longest, causal=causal, return_lse=True)

    graph, found = captured(lambda: torch.func.jvp(attend, (q, k, v), (dq, dk, dv))[1])
    graph.replay()

    def alone(*tensors):
        dense = (tensor.transpose(0, 1)[None] for tensor in tensors)
        return flash_attn_ext.attention(*dense, causal=causal, return_lse=True)

    begin_q = begin_k = 0
    for num_q, num_k in zip(lengths_q, lengths_k, strict=True):
        queries, keys = slice(begin_q, begin_q + num_q), slice(begin_k, begin_k + num_k)
        primals = (q[queries], k[keys], v[keys])
        _, (out, lse) = torch.func.jvp(alone, primals, (dq[queries], dk[keys], dv[keys]))
        torch.testing.assert_close(found[0][queries], out[0].transpose(0, 1), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found[1][:, queries], lse[0], rtol=2e-2, atol=2e-2)
        begin_q, begin_k = queries.stop, keys.stop


@over_dtypes(WITH_KERNEL)
def test_bits_repeat(dtype):
    call = problem(dtype, causal="bottom_right")
    tangents = {f"{name}_tangent": torch.randn_like(getattr(call, name)) for name in ("q", "k", "v")}
    first = tangents_of(call, **tangents)
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(first, tangents_of(call, **tangents), strict=True))


WRONG = {
    "q_tangent has shape [2, 2, 69, 64], expected [2, 2, 70, 64]": ("q_tangent", lambda t: t[:, :, 1:]),
    "k_tangent has dtype float32, expected bfloat16": ("k_tangent", torch.Tensor.float),
    "v_tangent is on cpu, but q is on cuda:0": ("v_tangent", torch.Tensor.cpu),
    "sink_tangent is given, but the call has no sink": ("sink_tangent", lambda t: t[0, :, 0, 0]),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tensors(message):
    name, spoil = WRONG[message]
    call = problem()
    tangent = torch.ones_like(getattr(call, name[0], None) if name[0] in "qkv" else call.q)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        tangents_of(call, **{name: spoil(tangent)})
