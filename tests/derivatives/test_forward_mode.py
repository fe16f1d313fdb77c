"""Forward mode: tangents of out and lse, alone and around or within reverse mode."""

import functools

import pytest
import torch
from torch.autograd import forward_ad

import flash_attn_ext
from support.cases import Case, make_inputs
from support.checks import check_draws
from support.derivatives import differences
from support.derivatives.second_order import LARGE_CASES, PLAIN_CASES, bits, directions, jvp, ours, reference
from support.derivatives.small_cases import BIAS_PATTERNS, CASES, PACKED_CASES, SMALL, function_of
from support.errors import compare
from support.params import computes_in, over_cases, over_dtypes

ALL_SMALL = CASES + BIAS_PATTERNS + PACKED_CASES
# Forward passes of jacfwd are within its vmap, which has to know what dropout may do there.
TRANSFORMS = dict(jacrev=torch.func.jacrev, jacfwd=functools.partial(torch.func.jacfwd, randomness="same"))
EVERY_KIND = Case(**SMALL, bias="1hqk", alibi="h", softcap=1.5, sink=True, causal="bottom_right")
# Slices that share a seed run one after the other: those of a Hessian, as many as inputs squared. So one head.
ONE_BY_ONE = Case(**SMALL | dict(heads=1), dropout_p=0.4, sink=True)


@computes_in(torch.float64)
@over_cases(ALL_SMALL)
def test_finite_differences(case, backend):
    """PyTorch's check, besides, leaves out some tangents."""
    function, leaves, _ = function_of(case, backend)
    leaves = tuple(leaves.values())
    differences.check_forward_mode(function, leaves)
    options = dict(check_forward_ad=True, check_backward_ad=False, check_undefined_grad=False)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, **options)


@computes_in(torch.float64)
@over_cases(ALL_SMALL)
def test_forward_over_reverse(case, backend):
    """Finite differences of the backward pass, against its forward mode."""
    function, leaves, _ = function_of(case, backend)
    leaves = tuple(leaves.values())
    differences.check_forward_over_reverse(function, leaves)
    options = dict(check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True, **options)


@over_cases(LARGE_CASES + PLAIN_CASES)
@over_dtypes()
@pytest.mark.usefixtures("tiny_tiles")
def test_error_rule(case, dtype, backend):
    """Against the reference in float64, beside the reference in the same dtype."""

    def errors(inputs, found):
        keep, along = bits(inputs, backend), directions(inputs)
        yardstick = jvp(reference(inputs, keep), inputs, along)
        exactly = {name: tangent.double() for name, tangent in along.items()}
        exact = jvp(reference(inputs.to(torch.float64), keep), inputs.to(torch.float64), exactly)
        # What sees no key has a tangent of 0; the reference's is NaN in the LSE, which is -inf there.
        return {name: compare(found[name], yardstick[name], exact[name].nan_to_num(0.0)) for name in found}

    check_draws(
        lambda seed: make_inputs(case, dtype, backend.device, seed),
        backend,
        run=lambda inputs: jvp(ours(inputs, backend), inputs, directions(inputs)),
        errors=errors,
    )


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sink"])
@computes_in(torch.float64)
def test_a_tangent_of_one_input_alone(name, backend):
    inputs = make_inputs(EVERY_KIND, torch.float64, backend.device)
    along = directions(inputs)
    zeros = {other: tangent if other == name else torch.zeros_like(tangent) for other, tangent in along.items()}
    expected = jvp(reference(inputs, None), inputs, zeros)
    tensors = {other: leaf.detach() for other, leaf in inputs.leaves().items()}
    with forward_ad.dual_level():
        tensors[name] = forward_ad.make_dual(tensors[name], along[name])
        for found, of in zip(ours(inputs, backend)(*tensors.values()), ("out", "lse"), strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, expected[of])


@computes_in(torch.float64)
@pytest.mark.parametrize("case", [EVERY_KIND, ONE_BY_ONE], ids=str)
@pytest.mark.parametrize("order", [("jacrev", "jacrev"), ("jacrev", "jacfwd"), ("jacfwd", "jacrev")], ids="-".join)
def test_both_orders_of_second_derivatives(order, case, backend):
    """Hessians of a scalar, by all inputs at once: reverse over reverse, reverse over forward, forward over reverse."""
    inputs = make_inputs(case, torch.float64, backend.device)
    tensors = tuple(leaf.detach() for leaf in inputs.leaves().values())
    wanted = tuple(range(len(tensors)))

    def hessian(attend):
        def loss(*tensors):
            out, lse = attend(*tensors)
            return (out * inputs.dout).square().sum() + lse.sin().sum()

        outer, inner = (TRANSFORMS[name] for name in order)
        return outer(inner(loss, wanted), wanted)(*tensors)

    found, expected = hessian(ours(inputs, backend)), hessian(reference(inputs, bits(inputs, backend)))
    for row, expected_row in zip(found, expected, strict=True):
        for block, expected_block in zip(row, expected_row, strict=True):
            torch.testing.assert_close(block, expected_block)


@computes_in(torch.float64)
@pytest.mark.parametrize("chunk_size", [None, 1, 5])
def test_jacobians(chunk_size, backend):
    inputs = make_inputs(EVERY_KIND, torch.float64, backend.device)
    tensors = tuple(leaf.detach() for leaf in inputs.leaves().values())
    wanted = tuple(range(len(tensors)))
    expected = torch.func.jacrev(reference(inputs, None), wanted)(*tensors)
    by_reverse = torch.func.jacrev(ours(inputs, backend), wanted, chunk_size=chunk_size)(*tensors)
    by_forward = torch.func.jacfwd(ours(inputs, backend), wanted)(*tensors)
    for found in (by_reverse, by_forward):
        for of_result, expected_of_result in zip(found, expected, strict=True):
            for block, expected_block in zip(of_result, expected_of_result, strict=True):
                torch.testing.assert_close(block, expected_block)


def training_step(attend, x, weight, time, direction):
    """The loss of a flow-matching step: a jvp of the model through time and place, differentiated by its weights."""

    def model(x, time):
        q, k, v = ((x * (1 + time)) @ weight).chunk(3, dim=-1)
        return attend(q, k, v)

    velocity, change = torch.func.jvp(model, (x, time), (direction, torch.ones_like(time)))
    return (velocity + 0.3 * change - direction).square().mean()


@computes_in(torch.float64)
def test_reverse_over_forward_in_a_training_step(backend):
    numbers = [torch.randn(shape, dtype=torch.float64, device=backend.device) for shape in ((2, 2, 5, 4), (4, 12), ())]
    x, weight, time = numbers
    direction = torch.randn_like(x)
    results = []
    for attend in (flash_attn_ext.attention, lambda *t: flash_attn_ext.reference.attention_reference(*t)[0]):
        leaf = weight.clone().requires_grad_()
        loss = training_step(attend, x, leaf, time, direction)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def score(attend, x):
    """A function that runs a backward pass inside."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    loss = attend(x, 2 * x, x.sin()).square().sum()
    return torch.autograd.grad(loss, x, create_graph=True)[0]


@computes_in(torch.float64)
@pytest.mark.parametrize("create_graph", [False, True])
def test_forward_mode_of_a_function_that_calls_backward(create_graph, backend):
    x = torch.randn(2, 2, 5, 4, dtype=torch.float64, device=backend.device)
    direction = torch.randn_like(x)

    def loss(attend, x):
        return attend(x, 2 * x, x.sin()).square().sum()

    def plain(q, k, v):
        return flash_attn_ext.reference.attention_reference(q, k, v)[0]

    expected = torch.func.jvp(torch.func.grad(lambda x: loss(plain, x)), (x,), (direction,))
    found = torch.func.jvp(torch.func.grad(lambda x: loss(flash_attn_ext.attention, x)), (x,), (direction,))
    torch.testing.assert_close(found, expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), direction)
        (gradient,) = torch.autograd.grad(loss(flash_attn_ext.attention, dual), dual, create_graph=create_graph)
        torch.testing.assert_close(forward_ad.unpack_dual(gradient).tangent, expected[1])


@computes_in(torch.float64)
@pytest.mark.parametrize("create_graph", [False, True])
def test_tangents_of_incoming_gradients_alone(create_graph, backend):
    """A forward pass before forward mode, its backward pass in it."""
    function, leaves, inputs = function_of(Case(**SMALL), backend)
    leaves = list(leaves.values())
    out, lse = function(*leaves)
    dlse, dout_tangent, dlse_tangent = torch.randn_like(lse), torch.randn_like(out), torch.randn_like(lse)
    given = [inputs.dout, dlse]
    expected = torch.autograd.grad((out, lse), leaves, [dout_tangent, dlse_tangent], retain_graph=True)
    primals = torch.autograd.grad((out, lse), leaves, given, retain_graph=True)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(given, (dout_tangent, dlse_tangent), strict=True)]
        found = [
            forward_ad.unpack_dual(g) for g in torch.autograd.grad((out, lse), leaves, duals, create_graph=create_graph)
        ]
    for (primal, tangent), one, other in zip(found, primals, expected, strict=True):
        torch.testing.assert_close(primal, one)
        torch.testing.assert_close(tangent, other)


@computes_in(torch.float64)
def test_sdpa(backend):
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64, device=backend.device) for n in (5, 7, 7))
    mask = torch.randn(5, 7, dtype=torch.float64, device=backend.device)
    arguments = (q, k, v, mask)
    along = tuple(torch.randn_like(t) for t in arguments)
    expected = torch.func.jvp(
        lambda q, k, v, bias: flash_attn_ext.reference.attention_reference(q, k, v, bias=bias)[0], arguments, along
    )
    torch.testing.assert_close(torch.func.jvp(flash_attn_ext.scaled_dot_product_attention, arguments, along), expected)
    with flash_attn_ext.replace_sdpa():
        found = torch.func.jvp(torch.nn.functional.scaled_dot_product_attention, arguments, along)
    torch.testing.assert_close(found, expected)


def test_under_another_default_device(backend):
    """Memory for tiles is where the tensors are."""
    q, tangent = (torch.randn(1, 2, 5, 4, device=backend.device) for _ in range(2))
    expected = torch.func.jvp(lambda x: flash_attn_ext.attention(x, q, q), (q,), (tangent,))[1]
    with torch.device("meta"), forward_ad.dual_level():
        out = flash_attn_ext.attention(forward_ad.make_dual(q, tangent), q, q)
        assert torch.equal(forward_ad.unpack_dual(out).tangent, expected)


def test_meta_tensors():
    q = torch.empty(1, 2, 5, 4, device="meta")
    out, tangent = torch.func.jvp(lambda x: flash_attn_ext.attention(x, q, q), (q,), (q,))
    assert (out.shape, tangent.shape, tangent.device) == (q.shape, q.shape, q.device)


def test_autocast_does_not_round_inside(backend):
    """A region of autocast casts inputs; the pass over tiles sums in float32."""
    inputs = make_inputs(Case(sq=40, sk=50, d=8), torch.float32, backend.device)
    along = directions(inputs)
    with torch.autocast(backend.device, torch.bfloat16):
        found = jvp(ours(inputs, backend), inputs, along)
    rounded = inputs.to(torch.bfloat16)
    expected = jvp(ours(rounded, backend), rounded, {name: tangent.bfloat16() for name, tangent in along.items()})
    assert all(torch.equal(found[name], expected[name]) for name in found)


@computes_in(torch.float64)
def test_a_forward_derivative_of_a_forward_derivative_is_a_clear_error(backend):
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64, device=backend.device)

    def once(q):
        return torch.func.jvp(lambda q: flash_attn_ext.attention(q, q, q), (q,), (q,))[1]

    with pytest.raises(RuntimeError, match=r"no forward-mode derivative of its forward-mode derivative"):
        torch.func.jvp(once, (q,), (q,))
