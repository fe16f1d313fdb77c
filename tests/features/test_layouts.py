"""Layouts and ranks: (B, H, S, D), (B, S, H, D), and any number of leading dimensions."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.checks import check_case
from support.params import over_cases, over_dtypes
from support.runners import run_ours


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(
    [
        Case(sq=140, sk=270, layout="bshd"),
        Case(sq=140, sk=270, layout="bshd", causal="bottom_right", heads=4, kv_heads=2, dv=24),
        Case(sq=65, sk=97, layout="bshd", bias="bhqk", mask="b11k", alibi="bh", sink=True, dlse=True),
    ]
)
def test_bshd(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float32, torch.bfloat16))
def test_layouts_are_views_of_each_other(dtype, backend):
    inputs = make_inputs(Case(sq=140, sk=270), dtype, backend.device)
    options = dict(return_lse=True, backend=backend.name)
    out, lse = flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, **options)
    views = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    out_bshd, lse_bshd = flash_attn_ext.attention(*views, layout="bshd", **options)
    assert out_bshd.shape == (2, 140, 2, 32)
    assert torch.equal(out_bshd.transpose(1, 2), out)
    assert torch.equal(lse_bshd, lse)


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_any_number_of_leading_dimensions(leading, causal, dtype, backend):
    """Equal to the 4-D call on the flattened problem, gradients included."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, to: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*leading, *shape, generator=generator).to(backend.device, to)

    q, k, v, dout = normal(65, 16), normal(97, 16), normal(97, 24), normal(65, 24)
    dlse = normal(65, to=torch.float32)
    results = []
    for shape in (leading, (-1, 1)):
        leaves = [t.reshape(*shape, *t.shape[len(leading) :]).detach().requires_grad_() for t in (q, k, v)]
        out, lse = flash_attn_ext.attention(*leaves, causal=causal, return_lse=True, backend=backend.name)
        assert out.shape == (*leaves[0].shape[:-2], 65, 24)
        assert lse.shape == leaves[0].shape[:-1]
        torch.autograd.backward([out, lse], [dout.reshape(out.shape), dlse.reshape(lse.shape)])
        results.append([out, lse, *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected.reshape(ours.shape))


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("leads", [((2,), (1,), (2,)), ((1,), (3,), (3,)), ((2, 1), (1, 3), (2, 3))], ids=str)
def test_batch_dimensions_broadcast(leads, dtype, backend):
    """As expanded ones; what was broadcast gets the sum of their gradients."""
    shapes = ((2, 65, 16), (2, 97, 16), (2, 97, 24))
    leaves = [
        torch.randn(*lead, *shape, device=backend.device).to(dtype).requires_grad_()
        for lead, shape in zip(leads, shapes, strict=True)
    ]
    lead = torch.broadcast_shapes(*leads)
    expanded = [leaf.expand(*lead, *shape).contiguous() for leaf, shape in zip(leaves, shapes, strict=True)]
    ours, expected = (flash_attn_ext.attention(*tensors, backend=backend.name) for tensors in (leaves, expanded))
    assert torch.equal(ours, expected)
    dout = torch.randn_like(ours)
    gradients = (torch.autograd.grad(out, leaves, dout) for out in (ours, expected))
    for found, of_expanded in zip(*gradients, strict=True):
        torch.testing.assert_close(found, of_expanded)


@over_dtypes((torch.float32, torch.bfloat16))
def test_heads_are_the_last_leading_dimension(dtype, backend):
    """What is per head (sink, slopes, grouped key heads) counts along dimension -3 of a 5-D input."""
    flat = make_inputs(Case(sq=33, sk=40, batch=6, heads=4, kv_heads=2, sink=True, alibi="h"), dtype, backend.device)
    options = dict(sink=flat.sink, alibi_slopes=flat.alibi_slopes, backend=backend.name)
    expected = flash_attn_ext.attention(flat.q, flat.k, flat.v, **options)
    nested = (t.unflatten(0, (2, 3)) for t in (flat.q, flat.k, flat.v))
    torch.testing.assert_close(flash_attn_ext.attention(*nested, **options).flatten(0, 1), expected)


@pytest.mark.parametrize("leading", [(), (2, 3), (2, 1, 2)], ids=str)
def test_bshd_of_any_rank(leading, backend):
    """(..., S, H, D), the bias and the LSE in (..., H, Sq, Sk) and (..., H, Sq) all the same."""
    q, k = (torch.randn(*leading, n, 2, 16, device=backend.device) for n in (33, 40))
    bias = torch.randn(*leading, 2, 33, 40, device=backend.device)
    options = dict(bias=bias, return_lse=True, backend=backend.name)
    out, lse = flash_attn_ext.attention(q, k, k, layout="bshd", **options)
    expected, expected_lse = flash_attn_ext.attention(*(t.transpose(-3, -2) for t in (q, k, k)), **options)
    assert out.shape == q.shape
    torch.testing.assert_close(out.transpose(-3, -2), expected)
    torch.testing.assert_close(lse, expected_lse)


def test_bias_of_lower_rank_broadcasts_from_the_right(backend):
    inputs = make_inputs(Case(sq=65, sk=97, bias="1hqk"), torch.float32, backend.device)
    full = run_ours(inputs, backend)
    lower = run_ours(inputs.replace(bias=inputs.bias[0]), backend)
    assert torch.equal(full["out"], lower["out"])
    assert torch.equal(full["dbias"][0], lower["dbias"])


BROADCAST = {
    "batch": lambda q: q[:1].expand_as(q),
    "heads": lambda q: q[:, :, :1].expand_as(q),
    "queries": lambda q: q[:, :1].expand_as(q),
    "everything": lambda q: q[:1, :1, :1, :1].expand_as(q),
    "one head": lambda q: q[:, :1, :1].expand(-1, q.size(1), 1, -1),
}


@pytest.mark.parametrize("how", BROADCAST.values(), ids=BROADCAST)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_output_of_a_broadcast_q_is_contiguous(layout, how, backend):
    q = how(torch.randn(2, 33, 3, 16, device=backend.device))  # (B, S, H, D), or with the other names (B, H, S, D)
    key = torch.randn(2, 33, 3, 16, device=backend.device)[:, :, : q.size(2)]
    assert flash_attn_ext.attention(q, key, key, layout=layout, backend=backend.name).is_contiguous()


def test_output_of_a_broadcast_q_is_contiguous_under_compile():
    def attend(q, k):
        return flash_attn_ext.attention(q, k, k, layout="bshd") * 1.0

    q = torch.randn(2, 1, 3, 16).expand(2, 33, 3, 16)
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, torch.randn(2, 33, 3, 16))
    assert out.is_contiguous()


STRIDE_ORDERS = {
    "bhsd": (0, 1, 2, 3),
    "bshd": (0, 2, 1, 3),
    "sbhd": (2, 0, 1, 3),
    "bhds": (0, 1, 3, 2),
}


@pytest.mark.parametrize("order", STRIDE_ORDERS.values(), ids=STRIDE_ORDERS.keys())
def test_output_has_the_stride_order_of_q(order, backend):
    """So that transpose(1, 2).reshape(B, S, H * D) of a model in (B, S, H, D) memory copies nothing."""
    shape = (2, 3, 65, 16)
    storage = torch.randn([shape[dim] for dim in order], device=backend.device)
    q = storage.permute([order.index(dim) for dim in range(4)])
    out = flash_attn_ext.attention(q, q.contiguous(), q.contiguous(), backend=backend.name)
    assert out.shape == shape
    assert out.permute(order).is_contiguous()
