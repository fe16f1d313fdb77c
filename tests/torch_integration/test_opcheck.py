"""torch.library.opcheck on the operators: schema, fake kernels, autograd registration, dynamic AOT dispatch."""

import pytest
import torch

import flash_attn_ext  # noqa: F401  (registers the operators)
from flash_attn_ext._call.problem import DIFFERENTIABLE, Problem
from flash_attn_ext.derivatives.named_functions import LEFT
from support.binding import forward, problem
from support.cases import Case, make_inputs
from support.packed import PackedCase, cu_seqlens, make_packed
from support.params import over_cases

CASES = [
    Case(sq=5, sk=7, d=4),
    Case(sq=5, sk=7, d=4, dv=3, heads=4, kv_heads=2, causal="bottom_right", window=(3, None)),
    Case(sq=5, sk=7, d=4, bias="1hqk", mask="b11k", alibi="bh", sink=True, softcap=2.0, dropout_p=0.3),
    Case(sq=5, sk=7, d=4, intervals="1h", num_intervals=3),
    Case(sq=70, sk=130, d=4, blocks="1h", block_sizes=(64, 128)),
    Case(sq=5, sk=0, d=4, bias="bhqk"),
    Case(sq=5, sk=7, d=4, layout="bshd"),
]
BROADCAST_Q = Case(sq=5, sk=7, d=4)


def arguments(case: Case, backend, differentiable: bool) -> tuple:
    inputs = make_inputs(case, torch.float32, backend.device)
    tensors = {
        name: getattr(inputs, name) for name in ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink", "intervals")
    }
    if case.blocks is not None:
        tensors["blocks"] = inputs.block_lists.blocks(case.sk)
    if case.layout == "bshd":
        for name in "qkv":
            tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    if differentiable:
        tensors |= {name: t.requires_grad_() for name, t in tensors.items() if t is not None and t.is_floating_point()}
    options = dict(case.options(), dropout_p=case.dropout_p, scale=0.5, backend=backend.name)
    options["window_left"], options["window_right"] = options.pop("window") or (None, None)
    if case.dropout_p:
        options["rng_seed"] = torch.tensor([5], device=backend.device)
    q, k, v = (tensors.pop(name) for name in "qkv")
    return problem(q, k, v, **tensors, **options)


@pytest.mark.parametrize("sequence_first", [False, True])
def test_forward_of_a_broadcast_q(sequence_first, backend):
    args = arguments(BROADCAST_Q, backend, differentiable=False)
    args = args._replace(q=args.q[:, :1, :1].expand_as(args.q), sequence_first=sequence_first)
    torch.library.opcheck(torch.ops.flash_attn_ext.attention_forward.default, args)


@over_cases(CASES)
@pytest.mark.parametrize("wants_row_max", [False, True])
def test_forward(wants_row_max, case, backend):
    operator = torch.ops.flash_attn_ext.attention_forward.default
    args = arguments(case, backend, differentiable=True)._replace(wants_row_max=wants_row_max)
    torch.library.opcheck(operator, args)


@over_cases(CASES)
def test_backward(case, backend):
    args = arguments(case, backend, differentiable=False)
    out, lse, residual, _ = torch.ops.flash_attn_ext.attention_forward(*args)
    wanted = [True, True, True, case.bias is not None, case.alibi is not None, case.sink]
    operator = torch.ops.flash_attn_ext.attention_backward.default
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(operator, (torch.ones_like(out), dlse, out, lse, residual, wanted, *args))


def tangents(args: tuple, given: str) -> list[torch.Tensor | None]:
    """Of a problem's differentiable tensors, in their order; only q's, k's and v's of `given`."""
    tensors = Problem(*args)._asdict()
    absent = set("qkv") - set(given)
    return [
        None if name in absent or tensors[name] is None else torch.ones_like(tensors[name]) for name in DIFFERENTIABLE
    ]


@over_cases(CASES)
@pytest.mark.parametrize("given", ["qkv", "k"])
def test_tangents(given, case, backend):
    args = arguments(case, backend, differentiable=False)
    left = torch.ops.flash_attn_ext.attention_forward(*args)[: len(LEFT)]
    along = [t if t is None else t.requires_grad_() for t in tangents(args, given)]
    torch.library.opcheck(torch.ops.flash_attn_ext.attention_tangents.default, (*left, *along, *args))


@over_cases(CASES)
@pytest.mark.parametrize("computes_out", [False, True])
def test_backward_tangents(computes_out, case, backend):
    args = arguments(case, backend, differentiable=False)
    out, lse, _ = left = torch.ops.flash_attn_ext.attention_forward(*args)[: len(LEFT)]
    along = [t if t is None else t.requires_grad_() for t in tangents(args, "qkv")]
    of_left = (None, None) if computes_out else (torch.ones_like(out), torch.ones_like(lse))
    wanted = [True, False, True, case.bias is not None, case.alibi is not None, case.sink]
    before = (torch.ones_like(out), torch.ones_like(lse), *left, *of_left, *along, wanted)
    torch.library.opcheck(torch.ops.flash_attn_ext.attention_backward_tangents.default, (*before, *args))


@over_cases(CASES)
def test_numbers_as_tensors(case, backend):
    """The overloads "varying", which compilers call below autograd; they override what stands among the arguments."""
    args = arguments(case, backend, differentiable=False)
    expected = torch.ops.flash_attn_ext.attention_forward(*args)
    scale, dropout_p = (torch.tensor(getattr(args, name), dtype=torch.float64) for name in ("scale", "dropout_p"))
    args, varying = args._replace(scale=0.0), (scale, None, dropout_p if case.dropout_p else None)
    results = torch.ops.flash_attn_ext.attention_forward.varying(*args, *varying)
    assert all(map(torch.equal, results, expected))
    torch.library.opcheck(torch.ops.flash_attn_ext.attention_forward.varying, (*args, *varying))
    wanted = [True, True, True, False, False, False]
    leading = (torch.ones_like(results[0]), None, *results[: len(LEFT)], wanted)
    torch.library.opcheck(torch.ops.flash_attn_ext.attention_backward.varying, (*leading, *args, *varying))


def test_packed(backend):
    case = PackedCase((3, 0, 5), (4, 2, 1))
    inputs = make_packed(case, torch.float32, backend.device)
    q, k, v = (t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    args = problem(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens(case.lengths_q, backend.device),
        cu_seqlens_k=cu_seqlens(case.lengths_k, backend.device),
        max_seqlen_q=5,
        max_seqlen_k=4,
        backend=backend.name,
    )
    torch.library.opcheck(torch.ops.flash_attn_ext.attention_forward.default, args)


@pytest.mark.parametrize("causal", [None, "top_left"])
def test_operator_equals_binding(causal, backend):
    inputs = make_inputs(Case(sq=40, sk=50), torch.float32, backend.device)
    options = dict(causal=causal, backend=backend.name)
    tensors = (inputs.q, inputs.k, inputs.v)
    through_operator = torch.ops.flash_attn_ext.attention_forward(*problem(*tensors, **options))
    for ours, expected in zip(through_operator, forward(*tensors, **options), strict=True):
        if expected is None:  # an operator has no absent results
            assert ours.numel() == 0
        else:
            assert torch.equal(ours, expected)
