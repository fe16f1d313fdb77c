"""torch.func.linearize: a trace of forward mode whose constants are folded, called again and again."""

import pytest
import torch
from torch import func
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import flash_attn_ext
from support.cases import Case, make_inputs
from support.derivatives.second_order import LARGE_CASES, PLAIN_CASES, directions, ours
from support.derivatives.small_cases import CASES, PACKED_CASES
from support.packed import PackedCase, call_packed, make_packed
from support.params import computes_in, over_cases, over_dtypes

# With dropout each call draws its bits.
WITHOUT_DROPOUT = [case for case in CASES + PACKED_CASES if getattr(case, "base", case).dropout_p == 0]
MANY_TILES = [case for case in LARGE_CASES + PLAIN_CASES if case.dropout_p == 0]
LINEAR = [
    Case(sq=5, sk=7, d=4, heads=4, kv_heads=2, causal="bottom_right"),
    Case(sq=5, sk=7, d=4, bias="1hqk", mask="b11k", alibi="h", softcap=2.0, sink=True),
]


def attention_of_pytorch(*tensors, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


def random_like(tree):
    return pytree.tree_map(torch.randn_like, tree)


def assert_equal(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check_linearized(function, primals: tuple, assert_same=assert_equal) -> None:
    """Twice along one direction, with another one between: what a call wrote must not reach the next one."""
    value, linear = func.linearize(function, *primals)
    assert_same(value, function(*primals))
    first, second = random_like(primals), random_like(primals)
    for along in (first, second, first):
        assert_same(linear(*along), func.jvp(function, primals, along)[1])


@computes_in(torch.float64)
@over_cases(WITHOUT_DROPOUT)
def test_every_option(case, backend):
    """Of out and lse, along all differentiable inputs."""
    if not isinstance(case, PackedCase):
        inputs = make_inputs(case, torch.float64, backend.device)
        function = ours(inputs, backend)
    else:
        inputs = make_packed(case, torch.float64, backend.device)
        names = list(inputs.leaves())

        def function(*tensors):
            return call_packed(case, inputs, dict(zip(names, tensors, strict=True)), backend)

    check_linearized(function, tuple(leaf.detach() for leaf in inputs.leaves().values()))


@over_cases(MANY_TILES)
@over_dtypes()
@pytest.mark.usefixtures("tiny_tiles")
def test_many_tiles(case, dtype, backend):
    inputs = make_inputs(case, dtype, backend.device)
    check_linearized(ours(inputs, backend), tuple(leaf.detach() for leaf in inputs.leaves().values()))


@computes_in(torch.float64)
def test_dropout(device):
    """Each call drops other weights, as PyTorch's attention does there, and takes the tangent of what it drops."""
    tensors = tuple(torch.randn(2, 2, 20, 4, dtype=torch.float64, device=device) for _ in range(3))
    for attend in (flash_attn_ext.scaled_dot_product_attention, attention_of_pytorch):

        def function(*tensors, attend=attend):
            return attend(*tensors, dropout_p=0.5)

        _, linear = func.linearize(function, *tensors)
        assert not torch.equal(linear(*tensors), linear(*tensors))
        torch.manual_seed(1)
        found = linear(*tensors)
        torch.manual_seed(1)
        assert_equal(found, func.jvp(function, tensors, tensors)[1])


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sink"])
@computes_in(torch.float64)
def test_one_input_alone(name, backend):
    """All others are constants."""
    case = Case(sq=5, sk=7, d=4, bias="1hqk", mask="b11k", alibi="h", softcap=1.5, sink=True, causal="bottom_right")
    inputs = make_inputs(case, torch.float64, backend.device)
    tensors = {other: leaf.detach() for other, leaf in inputs.leaves().items()}

    attend = ours(inputs, backend)

    def of_one(tensor):
        return attend(*(tensors | {name: tensor}).values())

    check_linearized(of_one, (tensors[name],))
    out, lse = func.linearize(of_one, tensors[name])[1](directions(inputs)[name])
    assert out.abs().max() > 0
    assert (lse.abs().max() > 0) == (name != "v")


@over_cases(LINEAR)
@computes_in(torch.float64)
def test_of_a_gradient(case, backend):
    """A product of the Hessian with a vector, prepared once."""
    inputs = make_inputs(case, torch.float64, backend.device)
    primals, attend = tuple(leaf.detach() for leaf in inputs.leaves().values()), ours(inputs, backend)

    def loss(*tensors):
        out, lse = attend(*tensors)
        return (out * inputs.dout).square().sum() + lse.sin().sum()

    check_linearized(func.grad(loss, tuple(range(len(primals)))), primals)


def composite(attend, x, weight, bias, project):
    q, k, v = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
    out = attend(q, k, v, is_causal=True)
    return torch.nn.functional.linear(out.transpose(1, 2).flatten(2), project).relu()


@over_dtypes()
@pytest.mark.parametrize("replaced", [False, True])
def test_through_a_composite_function(replaced, dtype, backend):
    shapes = ((2, 9, 8), (48, 8), (48,), (8, 16))
    primals = tuple(torch.randn(shape, device=backend.device).to(dtype) for shape in shapes)

    def ours_(*tensors):
        if not replaced:
            return composite(flash_attn_ext.scaled_dot_product_attention, *tensors)
        with flash_attn_ext.replace_sdpa():
            return composite(torch.nn.functional.scaled_dot_product_attention, *tensors)

    check_linearized(ours_, primals, torch.testing.assert_close)  # its products are PyTorch's


@computes_in(torch.float64)
def test_beside_pytorchs_attention(device):
    primals = tuple(
        torch.randn(shape, dtype=torch.float64, device=device) for shape in ((2, 9, 8), (48, 8), (48,), (8, 16))
    )
    along = random_like(primals)
    found, expected = (
        func.linearize(lambda *t, attend=attend: composite(attend, *t), *primals)[1](*along)
        for attend in (flash_attn_ext.scaled_dot_product_attention, attention_of_pytorch)
    )
    torch.testing.assert_close(found, expected)


def functions(case, backend):
    """out and lse, and the gradients of a loss; ours, by name."""
    inputs = make_inputs(case, torch.float64, backend.device)
    primals, attend = tuple(leaf.detach() for leaf in inputs.leaves().values()), ours(inputs, backend)

    def loss(*tensors):
        return attend(*tensors)[0].square().sum()

    return primals, dict(results=attend, gradients=func.grad(loss, tuple(range(len(primals)))))


@pytest.mark.parametrize("of", ["results", "gradients"])
@over_cases(LINEAR)
@computes_in(torch.float64)
class TestTheLinearFunction:
    """It is a function like any other: what PyTorch's attention allows there, ours does."""

    def test_vmap(self, case, of, backend):
        primals, named = functions(case, backend)
        _, linear = func.linearize(named[of], *primals)
        along = tuple(torch.randn(3, *primal.shape, dtype=primal.dtype, device=primal.device) for primal in primals)
        found = func.vmap(linear)(*along)
        for index in range(3):
            expected = linear(*(tangent[index] for tangent in along))
            torch.testing.assert_close(pytree.tree_map(lambda t, i=index: t[i], found), expected)

    def test_jvp(self, case, of, backend):
        primals, named = functions(case, backend)
        _, linear = func.linearize(named[of], *primals)
        at, along = random_like(primals), random_like(primals)
        found, expected = func.jvp(linear, at, along), (linear(*at), linear(*along))
        torch.testing.assert_close(found, expected)

    def test_vjp(self, case, of, backend):
        """<c, L t> = <L^T c, t>."""
        primals, named = functions(case, backend)
        _, linear = func.linearize(named[of], *primals)
        at, along = random_like(primals), random_like(primals)
        value, pull = func.vjp(linear, *at)
        cotangents = random_like(value)
        leaves = [primal.requires_grad_() for primal in random_like(at)]
        by_autograd = torch.autograd.grad(linear(*leaves), leaves, cotangents)
        torch.testing.assert_close(tuple(by_autograd), tuple(pull(cotangents)))
        left, right = (
            sum((a * b).sum() for a, b in zip(x, y, strict=True))
            for x, y in ((cotangents, linear(*along)), (by_autograd, along))
        )
        torch.testing.assert_close(left, right)


@computes_in(torch.float64)
def test_of_a_mapped_function(backend):
    primals = tuple(torch.randn(3, 2, 2, n, 4, dtype=torch.float64, device=backend.device) for n in (5, 7, 7))

    def mapped(*tensors):
        return func.vmap(lambda *t: flash_attn_ext.attention(*t, causal="top_left", backend=backend.name))(*tensors)

    check_linearized(mapped, primals)
