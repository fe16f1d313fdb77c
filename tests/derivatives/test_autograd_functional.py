"""torch.autograd.functional and is_grads_batched, whose vmap is PyTorch's older one: values, and what is refused."""

import pytest
import torch
from torch.autograd import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from support.cases import Case
from support.derivatives.small_cases import EVERYTHING, PACKED_CASES, SMALL, function_of
from support.params import computes_in, over_cases

pytestmark = computes_in(torch.float64)

CASES = [
    Case(**SMALL),
    Case(**(SMALL | dict(sq=4, sk=3)), causal="bottom_right"),  # the first row sees nothing
    Case(**SMALL, window=(1, 0), causal="top_left", scale=-0.7),
    Case(**(SMALL | dict(heads=4)), kv_heads=2, mask="1h1k", dv=3),
    Case(**SMALL, bias="1hq1", softcap=0.8),
    Case(**(SMALL | dict(batch=2)), alibi="bh", bias="11qk"),
    Case(**SMALL, layout="bshd", sink=True),
    Case(**SMALL, **EVERYTHING, causal="bottom_right"),
    PACKED_CASES[-1],
]
# PyTorch draws no numbers within its older vmap, where forward mode has the forward pass.
WITH_DROPOUT = [*CASES, Case(**SMALL, dropout_p=0.4, sink=True)]


def loss_of(case, backend):
    function, leaves, _ = function_of(case, backend)

    def loss(*tensors):
        return sum((result + 0.5).square().sin().sum() for result in function(*tensors))

    return loss, tuple(leaf.detach() for leaf in leaves.values())


def assert_blocks_close(found, expected) -> None:
    torch.testing.assert_close(tuple(map(tuple, found)), tuple(map(tuple, expected)))


@over_cases(WITH_DROPOUT)
def test_hessian(case, backend):
    loss, tensors = loss_of(case, backend)
    expected = functional.hessian(loss, tensors)
    all_options = [dict(), dict(create_graph=True)]
    if case in CASES:
        all_options.append(dict(outer_jacobian_strategy="forward-mode"))
    for options in all_options:
        assert_blocks_close(functional.hessian(loss, tensors, vectorize=True, **options), expected)


@over_cases(CASES)
def test_jacobian_by_forward_mode(case, backend):
    function, leaves, _ = function_of(case, backend)
    tensors = tuple(leaf.detach() for leaf in leaves.values())
    found = functional.jacobian(function, tensors, vectorize=True, strategy="forward-mode")
    assert_blocks_close(found, functional.jacobian(function, tensors))


@over_cases(WITH_DROPOUT)
def test_products_with_the_hessian(case, backend):
    """hvp differentiates the second derivative in the direction, in which it is linear, a third time."""
    loss, tensors = loss_of(case, backend)
    along = tuple(map(torch.randn_like, tensors))
    hessian = functional.hessian(loss, tensors)
    expected = tuple(
        sum((block * v).sum(tuple(range(-v.dim(), 0))) for block, v in zip(row, along, strict=True)) for row in hessian
    )
    for product in (functional.hvp, functional.vhp):
        for create_graph in (False, True):
            torch.testing.assert_close(product(loss, tensors, along, create_graph=create_graph)[1], expected)


@over_cases(WITH_DROPOUT)
def test_a_batch_of_gradients_of_gradients(case, backend):
    """is_grads_batched=True in the second backward pass, after one of either kind."""
    function, leaves, _ = function_of(case, backend)
    leaves = list(leaves.values())
    cotangents = [torch.randn_like(result).requires_grad_() for result in function(*leaves)]
    wanted = [*leaves, *cotangents]
    gradients = torch.autograd.grad(function(*leaves), leaves, cotangents, create_graph=True)
    batch = [torch.randn(3, *gradient.shape, dtype=gradient.dtype, device=gradient.device) for gradient in gradients]

    def second(grad_outputs, **options):
        return torch.autograd.grad(gradients, wanted, grad_outputs, retain_graph=True, allow_unused=True, **options)

    singly = [second([grads[index] for grads in batch]) for index in range(3)]
    for create_graph in (False, True):
        found = second(batch, is_grads_batched=True, create_graph=create_graph)
        for of_one, *expected in zip(found, *singly, strict=True):
            if of_one is None:
                assert expected == [None] * 3
            else:
                torch.testing.assert_close(of_one, torch.stack(expected))


def attention_of_pytorch(*tensors, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


CALLS = {
    "hessian": lambda f, x, v: functional.hessian(f, x, vectorize=True),
    "hessian by forward mode": lambda f, x, v: functional.hessian(
        f, x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "hvp": functional.hvp,
    "vhp": functional.vhp,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("hiding", ["mask", "bias", "is_causal", "grouped heads"])
def test_beside_pytorchs_attention(name, hiding, backend):
    """Within a function of other operations, by the name that the user's code has."""
    x, v = (torch.randn(2, 5, 6, dtype=torch.float64, device=backend.device) for _ in range(2))
    weight = torch.randn(16 if hiding == "grouped heads" else 24, 6, dtype=torch.float64, device=backend.device)
    seen = torch.ones(5, 5, dtype=torch.bool, device=backend.device).tril(1)
    options = dict(
        mask=dict(attn_mask=seen),
        bias=dict(attn_mask=torch.randn(2, 1, 5, dtype=torch.float64, device=backend.device)),
        is_causal=dict(is_causal=True),
    ).get(hiding, dict(enable_gqa=True))

    def loss(attend):
        def of(x):
            heads = torch.nn.functional.linear(x, weight).unflatten(-1, (-1, 4)).transpose(1, 2)
            q, k, v = heads.split([2, 1, 1], dim=1) if hiding == "grouped heads" else heads.chunk(3, dim=1)
            return attend(q, k, v, **options).sin().sum()

        return of

    expected = CALLS[name](loss(attention_of_pytorch), x, v)
    torch.testing.assert_close(CALLS[name](loss(flash_attn_ext.scaled_dot_product_attention), x, v), expected)
    with flash_attn_ext.replace_sdpa():
        found = CALLS[name](loss(torch.nn.functional.scaled_dot_product_attention), x, v)
    torch.testing.assert_close(found, expected)


def third_derivative_of(product):
    def of(loss, x, v):
        return torch.autograd.grad(product(loss, x, v).sum(), x)

    return of


THIRD_DERIVATIVES = {
    "hvp": third_derivative_of(lambda f, x, v: functional.hvp(f, x, v, create_graph=True)[1]),
    "vhp": third_derivative_of(lambda f, x, v: functional.vhp(f, x, v, create_graph=True)[1]),
    "hessian": third_derivative_of(lambda f, x, v: functional.hessian(f, x, create_graph=True)),
    "vectorized hessian": third_derivative_of(
        lambda f, x, v: functional.hessian(f, x, create_graph=True, vectorize=True)
    ),
    "hvp of hvp": lambda f, x, v: functional.hvp(lambda x: functional.hvp(f, x, v, create_graph=True)[1].sum(), x, v),
    "grad of hessian": lambda f, x, v: torch.func.grad(lambda x: torch.func.hessian(f)(x).sum())(x.detach()),
    "grad of jvp of grad": lambda f, x, v: torch.func.grad(
        lambda x: torch.func.jvp(torch.func.grad(f), (x,), (v,))[1].sum()
    )(x.detach()),
}


def scalar_and_point(backend):
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, device=backend.device) for n in (3, 5, 5))
    return lambda x: flash_attn_ext.attention(x, k, v, backend=backend.name).square().sum(), q.requires_grad_(), q.sin()


@pytest.mark.parametrize("name", THIRD_DERIVATIVES)
def test_a_third_derivative_is_a_clear_error(name, backend):
    """Never a part of one: where PyTorch's older vmap is in the way, too."""
    loss, x, v = scalar_and_point(backend)
    with pytest.raises(RuntimeError, match=r"a third one .* is not implemented.* detach it.*MATH"):
        THIRD_DERIVATIVES[name](loss, x, v.detach())


def test_jvp_of_jvp_is_a_clear_error(backend):
    _, x, v = scalar_and_point(backend)
    k = torch.randn(1, 2, 5, 4, dtype=torch.float64, device=backend.device)

    def once(x):
        return functional.jvp(lambda x: flash_attn_ext.attention(x, k, k), x, v.detach(), create_graph=True)[1]

    with pytest.raises(RuntimeError, match=r"functional\.jvp of itself.*jvp of grad.*functional\.vhp.*MATH"):
        functional.jvp(once, x.detach(), v.detach())


def test_derivatives_of_a_product_in_its_direction(backend):
    """They are no third derivatives."""
    loss, x, v = scalar_and_point(backend)
    x, v = x.detach(), v.detach()
    hessian = functional.hessian(loss, x).flatten(4).flatten(0, 3)
    for product in (functional.hvp, functional.vhp):
        direction = v.clone().requires_grad_()
        (found,) = torch.autograd.grad(product(loss, x, direction, create_graph=True)[1].sum(), direction)
        torch.testing.assert_close(found.flatten(), hessian.sum(0))
