"""Second derivatives by create_graph=True: finite differences, the reference, dtypes, and what has no third one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from support.cases import Case, accumulate_dtype, make_inputs
from support.checks import check_draws
from support.derivatives import differences
from support.derivatives.second_order import (
    LARGE,
    LARGE_CASES,
    PLAIN_CASES,
    bits,
    directions,
    double_backward,
    ours,
    reference,
)
from support.derivatives.small_cases import BIAS_PATTERNS, CASES, PACKED_CASES, SMALL, function_of
from support.errors import compare
from support.params import computes_in, over_cases, over_dtypes


@computes_in(torch.float64)
@over_cases(CASES + BIAS_PATTERNS + PACKED_CASES)
def test_finite_differences(case, backend):
    """Of the gradients, for the inputs and for the gradients that come in. PyTorch's check, besides, leaves out some of
    these gradients, and calls twice."""
    function, leaves, _ = function_of(case, backend)
    leaves = tuple(leaves.values())
    differences.check_double_backward(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@over_cases(LARGE_CASES + PLAIN_CASES)
@over_dtypes()
@pytest.mark.usefixtures("tiny_tiles")
def test_error_rule(case, dtype, backend):
    """Against the reference in float64, beside the reference in the same dtype."""

    def errors(inputs, found):
        keep, along = bits(inputs, backend), directions(inputs)
        yardstick = double_backward(reference(inputs, keep), inputs, along)
        exactly = {name: tangent.double() for name, tangent in along.items()}
        exact = double_backward(reference(inputs.to(torch.float64), keep), inputs.to(torch.float64), exactly)
        return {name: compare(found[name], yardstick[name], exact[name]) for name in found}

    check_draws(
        lambda seed: make_inputs(case, dtype, backend.device, seed),
        backend,
        run=lambda inputs: double_backward(ours(inputs, backend), inputs, directions(inputs)),
        errors=errors,
    )


@over_dtypes([torch.bfloat16])
def test_dtypes_of_second_derivatives(dtype, backend):
    case = Case(sq=9, sk=12, d=8, bias="1hqk", bias_float32=True, alibi="h", sink=True, dlse=True)
    inputs = make_inputs(case, dtype, backend.device)
    found = double_backward(ours(inputs, backend), inputs, directions(inputs))
    accumulate = accumulate_dtype(dtype)
    for name, tensor in found.items():
        assert tensor.dtype == (dtype if name in ("q", "k", "v", "dout") else accumulate), name


@computes_in(torch.float64)
@pytest.mark.parametrize("asked", ["q", "k", "dlse"])
def test_one_tensor_alone_through_the_lse(asked, backend):
    """No gradient arrives for out at all, and the way to the one tensor that asks for it is found."""
    inputs = make_inputs(Case(**SMALL), torch.float64, backend.device)
    q, k, v = (t.detach() for t in (inputs.q, inputs.k, inputs.v))
    dlse = torch.randn(q.shape[:3], dtype=q.dtype, device=q.device)
    tensors = dict(q=q, k=k, dlse=dlse)
    tensors[asked].requires_grad_()
    q.requires_grad_()
    _, lse = flash_attn_ext.attention(q, k, v, return_lse=True, backend=backend.name)
    (gradient,) = torch.autograd.grad(lse, q, dlse, create_graph=True)
    (found,) = torch.autograd.grad(gradient.square().sum(), tensors[asked])
    plain = ((q @ k.mT) * q.size(-1) ** -0.5).logsumexp(-1)
    (gradient,) = torch.autograd.grad(plain, q, dlse, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(gradient.square().sum(), tensors[asked])[0])


@computes_in(torch.float64)
def test_packed_equals_dense(backend, tiny_tiles):
    """A packed batch of equal lengths, in many tiles."""
    inputs = make_inputs(Case(sq=50, sk=70, d=4, heads=4, kv_heads=2), torch.float64, backend.device)
    leaves = inputs.leaves()
    along = directions(inputs)
    expected = double_backward(ours(inputs, backend), inputs, along)
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=inputs.q.device) for n in (50, 70)]

    def packed(*tensors):
        tokens = (tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors)
        out, lse = flash_attn_ext.attention_varlen(*tokens, *offsets, return_lse=True, backend=backend.name)
        return out.unflatten(0, (2, -1)).transpose(1, 2), lse.unflatten(1, (2, -1)).transpose(0, 1)

    for name, found in double_backward(packed, inputs.replace(**leaves), along).items():
        torch.testing.assert_close(found, expected[name], msg=name)


def attention_of_pytorch(*tensors, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


@computes_in(torch.float64)
def test_gradient_penalty(backend):
    """A loss with a gradient in it, as a training step computes it."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64, device=backend.device)
    results = []
    for attend in (flash_attn_ext.scaled_dot_product_attention, attention_of_pytorch):
        torch.manual_seed(1)
        project = torch.nn.Linear(8, 24, dtype=torch.float64, device=backend.device)
        leaf = x.clone().requires_grad_()
        q, k, v = project(leaf).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, dim=-1)
        score = attend(q, k, v, is_causal=True).square().sum()
        (gradient,) = torch.autograd.grad(score, leaf, create_graph=True)
        (score + (gradient.norm() - 1).square()).backward()
        results.append([leaf.grad, *(parameter.grad for parameter in project.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@computes_in(torch.float64)
def test_batched_gradients_with_create_graph(backend):
    function, leaves, _ = function_of(Case(**SMALL, softcap=1.0, bias="1hqk"), backend)
    leaves = list(leaves.values())
    out, _ = function(*leaves)
    douts = torch.randn(3, *out.shape, dtype=out.dtype, device=out.device)
    batched = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, create_graph=True)
    found = torch.autograd.grad(sum(g.square().sum() for g in batched), leaves, retain_graph=True)
    singly = [torch.autograd.grad(out, leaves, dout, create_graph=True) for dout in douts]
    expected = torch.autograd.grad(sum(g.square().sum() for gradients in singly for g in gradients), leaves)
    for ours_, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_, theirs)


@over_cases([Case(**LARGE, bias="11qk", sink=True, dropout_p=0.2), Case(**LARGE, causal="bottom_right", sink=True)])
def test_bits_repeat(case, backend, tiny_tiles):
    inputs = make_inputs(case, torch.float32, backend.device)
    once, again = (double_backward(ours(inputs, backend), inputs, directions(inputs)) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@computes_in(torch.float64)
@pytest.mark.parametrize("hiding", ["mask", "bias", "causal"])
def test_what_no_query_sees_may_be_nan(hiding, backend, tiny_tiles):
    """Keys that no query of a tile sees, and a query that sees no key."""
    inputs = make_inputs(Case(sq=70, sk=110, d=4), torch.float64, backend.device)
    seen = torch.ones(70, 110, dtype=torch.bool, device=inputs.q.device)
    seen[:, 100:] = False
    seen[33] = False
    options = dict(
        mask=dict(mask=seen),
        bias=dict(bias=torch.zeros(70, 110, dtype=torch.float64, device=seen.device).masked_fill(~seen, -torch.inf)),
        causal=dict(causal="top_left"),
    )[hiding]
    spoiled = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    for name in ("k", "v"):
        spoiled[name][:, :, 100:] = torch.nan
    if hiding != "causal":
        spoiled["q"][:, :, 33] = torch.nan

    def attend(*tensors):
        return flash_attn_ext.attention(*tensors, **options, return_lse=True, backend=backend.name)

    expected = double_backward(attend, inputs, directions(inputs))
    found = double_backward(attend, inputs.replace(**spoiled), directions(inputs))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)


@over_dtypes()
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_queries_that_see_nothing_may_be_nan(kv_heads, dtype, backend, tiny_tiles):
    """Without a mask. Some share tiles with queries that see keys."""
    inputs = make_inputs(
        Case(sq=110, sk=70, d=8, kv_heads=kv_heads, causal="bottom_right", dlse=True), dtype, backend.device
    )
    spoiled = inputs.q.clone()
    spoiled[:, :, :40] = torch.nan
    expected = double_backward(ours(inputs, backend), inputs, directions(inputs))
    found = double_backward(ours(inputs, backend), inputs.replace(q=spoiled), directions(inputs))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)


@over_dtypes()
def test_an_input_without_a_direction(dtype, backend, tiny_tiles):
    """Nothing arrives for the gradient of q, then of k, then of v, then of two of them: as zeros that arrive."""
    inputs = make_inputs(Case(sq=33, sk=50, d=8, causal="top_left"), dtype, backend.device)
    leaves, along = inputs.leaves(), directions(inputs)
    dout = inputs.dout.detach().requires_grad_()
    out, _ = ours(inputs, backend)(*leaves.values())
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout, create_graph=True), strict=True))
    wanted = [*leaves.values(), dout]
    for given in (("k", "v"), ("q", "v"), ("q", "k"), ("v",), ("q",)):
        directed = {name: along[name] if name in given else torch.zeros_like(along[name]) for name in along}
        expected = torch.autograd.grad(list(gradients.values()), wanted, list(directed.values()), retain_graph=True)
        some = [gradients[name] for name in given]
        found = torch.autograd.grad(some, wanted, [along[name] for name in given], retain_graph=True)
        for found_, expected_ in zip(found, expected, strict=True):
            torch.testing.assert_close(found_, expected_, msg=lambda m, given=given: f"{given}: {m}")


SOME = dict(batch=2, heads=2, sq=5, sk=7, d=8, sink=True)
NOTHING = (dict(batch=0), dict(heads=0), dict(heads=0, kv_heads=2), dict(sq=0), dict(sk=0))


@pytest.mark.parametrize("nothing", NOTHING, ids=str)
def test_empty(nothing, backend):
    inputs = make_inputs(Case(**SOME | nothing), torch.float32, backend.device)
    along = directions(inputs)
    expected = double_backward(reference(inputs, None), inputs, along)
    for name, found in double_backward(ours(inputs, backend), inputs, along).items():
        torch.testing.assert_close(found, expected[name], msg=name)


def shapes_of_second_derivatives(device: str) -> None:
    leaves = [torch.empty(2, 3, n, 8, device=device, requires_grad=True) for n in (5, 7, 7)]
    out = flash_attn_ext.attention(*leaves, causal="top_left")
    gradients = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    found = torch.autograd.grad(sum(g.sum() for g in gradients), leaves)
    assert [(g.shape, g.device.type) for g in found] == [(leaf.shape, device) for leaf in leaves]


def test_fake_tensors(backend):
    with FakeTensorMode():
        shapes_of_second_derivatives(backend.device)


def test_meta_tensors():
    shapes_of_second_derivatives("meta")


@computes_in(torch.float64)
def test_a_third_derivative_is_a_clear_error(backend):
    function, leaves, _ = function_of(Case(**SMALL), backend)
    leaves = tuple(leaves.values())
    gradients = torch.autograd.grad(function(*leaves)[0].sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"a third one .* is not implemented"):
        torch.autograd.grad(sum(g.sum() for g in second), leaves)
