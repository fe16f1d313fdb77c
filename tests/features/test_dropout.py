"""Dropout: the bits, their statistics, and that forward and backward agree about them."""

import functools
import math

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import _C
from support.backends import generator_state
from support.binding import forward, problem
from support.cases import Case, make_inputs
from support.checks import check_case
from support.params import over_cases, over_dtypes
from support.runners import dropout_bits, identity_parts, run_ours

CASES = [
    Case(sq=140, sk=270, dropout_p=0.1),
    Case(sq=140, sk=270, dropout_p=0.5, causal="bottom_right", dlse=True),
    Case(sq=65, sk=97, dropout_p=0.9, heads=4, kv_heads=2),
    Case(sq=300, sk=129, dropout_p=0.2, bias="bhqk", mask="b11k"),
    Case(sq=129, sk=257, dropout_p=0.3, alibi="bh", softcap=5.0, sink=True, dlse=True),
    Case(sq=129, sk=257, dropout_p=0.25, window=(30, 30), layout="bshd"),
]


@over_dtypes()
@over_cases(CASES)
def test_forward_and_backward_drop_the_same_weights(case, dtype, backend):
    """The reference is given the bits that a separate call drew from the same seed."""
    check_case(case, dtype, backend)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(p, backend):
    """Within 5 standard deviations overall, and for every row and column of every head."""
    bits = dropout_bits(make_inputs(Case(sq=256, sk=512, dropout_p=p), torch.float32, backend.device), backend)
    bits = bits.cpu().double()
    for dims in ((0, 1, 2, 3), (2, 3), (3,), (2,)):
        kept, count = bits.mean(dims), math.prod(bits.shape[dim] for dim in dims)
        deviations = (kept - (1 - p)).abs() / math.sqrt(p * (1 - p) / count)
        # 5 of one number; 2048 rows or columns reach a little further.
        assert float(deviations.max()) < (5 if kept.numel() < 100 else 6.5)


def test_neighbours_are_uncorrelated(backend):
    bits = dropout_bits(make_inputs(Case(sq=256, sk=512, dropout_p=0.5), torch.float32, backend.device), backend)
    signs = bits.cpu().double() * 2 - 1
    count = signs.numel()
    for dim, shift in ((2, 1), (2, 8), (2, 16), (3, 1), (3, 8), (3, 32), (1, 1), (0, 1)):
        correlation = float((signs * signs.roll(shift, dim)).mean())
        assert abs(correlation) < 5 / math.sqrt(count / 2), (dim, shift)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_mean_is_preserved(p, backend):
    """Kept weights are divided by 1 - p, so ones average to one."""
    q, k = (torch.zeros(4, 4, n, 8, device=backend.device) for n in (200, 300))
    out = flash_attn_ext.attention(q, k, torch.ones_like(k), dropout_p=p, backend=backend.name)
    deviation = math.sqrt(p / (1 - p) / (16 * 200 * 300))
    assert abs(float(out[..., 0].double().mean()) - 1) < 5 * deviation


@over_dtypes()
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 140, 270), (1, 2, 257, 33)], ids=str)
def test_bits_are_those_of_the_binding(shape, dtype, backend):
    """_C.dropout_mask is the specification that every backend is held to, bit for bit, in both passes.

    With equal scores out is the bits times V, and dv the bits, transposed, times dout: identities read them off.
    """
    batch, heads, sq, sk = shape
    seed = torch.tensor([987654321987654321], device=backend.device)
    expected = _C.dropout_mask(seed, 0.3, batch, heads, sq, sk)
    assert expected.device.type == "cpu" and expected.dtype == torch.bool
    make = dict(device=backend.device, dtype=dtype)
    zeros_q, zeros_k = (torch.zeros(batch, heads, n, 1, **make) for n in (sq, sk))
    options = dict(rng_seed=seed, dropout_p=0.3, backend=backend.name)
    first = 0
    for columns in identity_parts(sk, **make):
        out, *_ = forward(zeros_q, zeros_k, columns.expand(batch, heads, -1, -1), **options)
        last = first + columns.shape[1]
        assert torch.equal(out.cpu() > 0, expected[..., first:last]), f"forward, keys {first} to {last}"
        first = last
    first = 0
    for columns in identity_parts(sq, **make):
        dout, v = columns.expand(batch, heads, -1, -1), torch.zeros(batch, heads, sk, columns.shape[1], **make)
        results, wanted = forward(zeros_q, zeros_k, v, **options)[:3], [False, False, True, False, False, False]
        dv = _C.attention_backward(dout, None, *results, wanted, problem(zeros_q, zeros_k, v, **options))[2]
        last = first + columns.shape[1]
        assert torch.equal(dv.mT.cpu() > 0, expected[:, :, first:last]), f"backward, queries {first} to {last}"
        first = last


def test_bits_do_not_depend_on_the_lengths(backend):
    """(b, h, q, k) draws the same bit whatever the size, so also whatever the tile it falls into."""
    small, large = (
        dropout_bits(make_inputs(Case(sq=sq, sk=sk, batch=b, dropout_p=0.4), torch.float32, backend.device), backend)
        for b, sq, sk in ((1, 50, 70), (3, 200, 300))
    )
    assert torch.equal(small, large[:1, :, :50, :70])


def test_seed_comes_from_torch(backend):
    inputs = make_inputs(Case(sq=65, sk=97, dropout_p=0.5), torch.float32, backend.device)
    first, again = run_ours(inputs, backend), run_ours(inputs, backend)
    for name in first:
        assert torch.equal(first[name], again[name]), name
    other = run_ours(inputs.replace(dropout_seed=99), backend)
    assert not torch.equal(first["out"], other["out"])


def test_each_call_draws_new_bits(backend):
    inputs = make_inputs(Case(sq=65, sk=97), torch.float32, backend.device)
    outs = [
        flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5, backend=backend.name) for _ in range(2)
    ]
    assert not torch.equal(*outs)


def test_p_zero_draws_nothing(backend):
    """The generator does not move, and the result is that of no dropout."""
    inputs = make_inputs(Case(sq=65, sk=97), torch.float32, backend.device)
    state = generator_state(backend.device)
    zero = flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, dropout_p=0.0, backend=backend.name)
    assert torch.equal(state, generator_state(backend.device))
    assert torch.equal(zero, flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, backend=backend.name))


def test_lse_does_not_see_dropout(backend):
    dropped = make_inputs(Case(sq=140, sk=270, dropout_p=0.5), torch.float32, backend.device)
    plain = dropped.replace(case=Case(sq=140, sk=270))
    with_dropout, without = (run_ours(inputs, backend)["lse"] for inputs in (dropped, plain))
    # On a GPU the kernel without dropout is another one, which folds the scale into exp2: equal up to rounding.
    tolerance = 0.0 if backend.is_cpu else 1e-6
    torch.testing.assert_close(with_dropout, without, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("packed", [False, True])
def test_p_one_drops_everything(packed, backend):
    """out = 0 and gradients of 0, but for what comes through the LSE, which does not see dropout."""
    tensors = [torch.randn(2, 3, 5, 8, device=backend.device) for _ in range(3)]
    attend = flash_attn_ext.attention
    if packed:
        cu = torch.tensor([0, 2], dtype=torch.int32, device=backend.device)
        tensors, attend = [t[:, :, 0] for t in tensors], functools.partial(attend_packed, cu)
    leaves = [t.requires_grad_() for t in tensors]
    state = generator_state(backend.device)
    out, lse = attend(*leaves, dropout_p=1.0, return_lse=True, backend=backend.name)
    assert torch.equal(state, generator_state(backend.device))
    assert not bool(out.any())
    gradients = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert not any(bool(g.any()) for g in gradients)
    _, expected = attend(*leaves, return_lse=True, backend=backend.name)
    assert torch.equal(lse, expected)
    for ours, g in zip(
        torch.autograd.grad(lse.sum(), leaves[:2]), torch.autograd.grad(expected.sum(), leaves[:2]), strict=True
    ):
        assert torch.equal(ours, g)


def attend_packed(cu, q, k, v, **options):
    return flash_attn_ext.attention_varlen(q, k, v, cu, cu, **options)


def test_heads_of_a_group_draw_separately(backend):
    """Bits are keyed by the query head, so query heads that share a key head differ."""
    inputs = make_inputs(Case(sq=65, sk=97, heads=4, kv_heads=1, dropout_p=0.5), torch.float32, backend.device)
    bits = dropout_bits(inputs, backend)
    assert not torch.equal(bits[:, 0], bits[:, 1])
