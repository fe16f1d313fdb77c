"""Empty tensors of every kind give what PyTorch gives, gradients included."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from support.cases import Case, make_inputs
from support.packed import cu_seqlens
from support.params import over_cases, over_dtypes
from support.runners import run_ours

EMPTIES = [
    Case(sq=5, sk=7, d=8, dv=6, batch=0),
    Case(sq=5, sk=7, d=8, dv=6, heads=0, kv_heads=0),
    Case(sq=0, sk=7, d=8, dv=6),
    Case(sq=5, sk=0, d=8, dv=6),
    Case(sq=0, sk=0, d=8, dv=6),
    Case(sq=0, sk=1500, d=128),  # as many keys as few queries have
    Case(sq=5, sk=7, d=0, dv=6),
    Case(sq=5, sk=7, d=8, dv=0),
    Case(sq=5, sk=0, d=0, dv=0, batch=0, heads=0, kv_heads=0),
]


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("is_causal", [False, True])
@over_cases(EMPTIES)
def test_sdpa_equals_pytorch(case, is_causal, dtype, backend):
    inputs = make_inputs(case, dtype, backend.device)
    # PyTorch's own choice of backend divides by zero heads; its math path gives the answer.
    results = []
    for attention in (flash_attn_ext.scaled_dot_product_attention, F.scaled_dot_product_attention):
        leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        with sdpa_kernel(SDPBackend.MATH):
            out = attention(*leaves, is_causal=is_causal)
            out.backward(inputs.dout)
        results.append([out, *(leaf.grad for leaf in leaves)])
    # In 16 bits the math path rounds its weights before it adds them up.
    tolerance = {} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.016}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


FEATURES = dict(bias="bhqk", mask="b11k", alibi="bh", sink=True, softcap=3.0, dlse=True)


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@over_cases([*EMPTIES, Case(sq=5, sk=7, d=8)])
def test_with_every_feature(case, causal, dtype, backend):
    """Shapes are right, nothing is NaN, and what has no influence has a gradient of 0."""
    case = dataclasses.replace(case, **FEATURES, causal=causal, window=(2, 2), dropout_p=0.5)
    inputs = make_inputs(case, dtype, backend.device)
    result = run_ours(inputs, backend)
    assert result["out"].shape == (case.batch, case.heads, case.sq, case.head_dim_v)
    assert result["lse"].shape == (case.batch, case.heads, case.sq)
    for name in inputs.differentiable:
        assert result[f"d{name}"].shape == getattr(inputs, name).shape
        assert not bool(result[f"d{name}"].isnan().any()), name


@over_dtypes((torch.float32, torch.bfloat16))
def test_no_query_heads_with_key_heads(dtype, backend):
    """No query attends to k and v, nor to a bias that is the same for all heads: their gradients are 0."""
    inputs = make_inputs(Case(sq=5, sk=7, d=8, heads=4, bias="11qk", sink=True), dtype, backend.device)
    result = run_ours(inputs.replace(q=inputs.q[:, :0], dout=inputs.dout[:, :0], sink=inputs.sink[:0]), backend)
    for name in ("k", "v", "bias"):
        assert torch.equal(result[f"d{name}"], torch.zeros_like(getattr(inputs, name))), name


@over_dtypes((torch.float32, torch.bfloat16))
def test_no_keys_with_a_sink(dtype, backend):
    """The sink is all there is: LSE = sink, out = 0, d sink = d lse."""
    inputs = make_inputs(Case(sq=5, sk=0, sink=True, dlse=True), dtype, backend.device)
    result = run_ours(inputs, backend)
    assert bool((result["out"] == 0).all())
    torch.testing.assert_close(result["lse"], inputs.sink[:, None].expand_as(result["lse"]))
    torch.testing.assert_close(result["dsink"], inputs.dlse.sum((0, 2)))


@over_dtypes((torch.float32, torch.bfloat16))
def test_no_keys_no_sink(dtype, backend):
    result = run_ours(make_inputs(Case(sq=5, sk=0, dlse=True), dtype, backend.device), backend)
    assert bool((result["out"] == 0).all())
    assert bool((result["lse"] == -float("inf")).all())
    assert bool((result["dq"] == 0).all())


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("lengths_q", "lengths_k"), [((), ()), ((0, 0), (0, 0)), ((0, 0), (3, 4)), ((3, 4), (0, 0))])
def test_packed(lengths_q, lengths_k, dtype, backend):
    """No sequences, only empty sequences, or sequences with one empty side."""
    q, k, v = (
        torch.randn(sum(lengths), 2, 8, device=backend.device, dtype=dtype, requires_grad=True)
        for lengths in (lengths_q, lengths_k, lengths_k)
    )
    cu_q, cu_k = cu_seqlens(lengths_q, backend.device), cu_seqlens(lengths_k, backend.device)
    out, lse = flash_attn_ext.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, backend=backend.name)
    assert out.shape == q.shape and lse.shape == (2, sum(lengths_q))
    assert bool((out == 0).all())
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    assert all(bool((leaf.grad == 0).all()) for leaf in (q, k, v))


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shapes", [((0, 8), (7, 8)), ((5, 8), (0, 8)), ((0, 5, 8), (0, 7, 8)), ((2, 0, 3, 5, 8),) * 2])
def test_other_ranks(shapes, dtype, backend):
    q, k = (torch.randn(shape, device=backend.device, dtype=dtype) for shape in shapes)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, k)
    torch.testing.assert_close(flash_attn_ext.scaled_dot_product_attention(q, k, k), expected)
