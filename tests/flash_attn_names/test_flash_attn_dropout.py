"""flash_attn's dropout_p, and S_dmask: which weights a call kept."""

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.integrations import flash_attn
from flash_attn_ext.reference import attention_reference, attention_varlen_reference
from support.backends import generator_state

RATE = 0.3
BATCH, QUERIES, KEYS, HEADS, HEAD_DIM = 2, 24, 40, 4, 8
CU_SEQLENS = (0, 13, 24)


def dense(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    lengths = ((QUERIES, HEADS), (KEYS, 2), (KEYS, 2))
    return [torch.randn(BATCH, n, heads, HEAD_DIM).to(device, dtype).requires_grad_() for n, heads in lengths]


def assert_same(results, expected) -> None:
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), exact.double(), atol=1e-4, rtol=1e-4)


def test_dense(device):
    tensors = dense(device)
    torch.manual_seed(5)
    out, lse, s_dmask = flash_attn.flash_attn_func(*tensors, RATE, causal=True, return_attn_probs=True)
    after = generator_state(device)
    torch.manual_seed(5)
    assert torch.equal(flash_attn.flash_attn_func(*tensors, RATE, causal=True), out)
    assert torch.equal(after, generator_state(device))  # asking for the mask draws nothing more
    torch.manual_seed(5)
    options = dict(causal="bottom_right", layout="bshd")
    assert torch.equal(flash_attn_ext.attention(*tensors, dropout_p=RATE, **options), out)

    assert s_dmask.shape == (BATCH, HEADS, QUERIES, KEYS) and s_dmask.dtype == out.dtype
    assert s_dmask.device == out.device
    assert bool((s_dmask.abs() == 1).all())
    assert abs(float((s_dmask < 0).float().mean()) - RATE) < 0.03
    exact_inputs = [t.detach().double().requires_grad_() for t in tensors]
    exact, exact_lse = attention_reference(*exact_inputs, dropout_p=RATE, dropout_mask=s_dmask >= 0, **options)
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert_same([out, lse, *gradients], [exact, exact_lse, *torch.autograd.grad(exact.sum(), exact_inputs)])


@pytest.mark.parametrize("bounds", [(13, 13), (None, None), (20, 16)], ids=str)
def test_packed(bounds, device):
    qkv = torch.randn(CU_SEQLENS[-1], 3, HEADS, HEAD_DIM, device=device)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device)
    packing = (cu_seqlens, cu_seqlens)
    q, k, v = qkv.unbind(1)
    out, _, s_dmask = flash_attn.flash_attn_varlen_func(q, k, v, *packing, *bounds, RATE, return_attn_probs=True)
    assert s_dmask.shape == (2, HEADS, *(n or 13 for n in bounds))
    exact, _ = attention_varlen_reference(
        q.double(), k.double(), v.double(), *packing, dropout_p=RATE, dropout_mask=s_dmask >= 0
    )
    assert_same([out], [exact])


@pytest.mark.parametrize("name", ["kvpacked", "qkvpacked", "varlen_kvpacked", "varlen_qkvpacked"])
def test_packed_tensors(name, device):
    qkv = torch.randn(BATCH, QUERIES, 3, HEADS, HEAD_DIM, device=device)
    packing = ()
    if name.startswith("varlen"):
        qkv = qkv.flatten(0, 1)
        cu_seqlens = torch.tensor([0, QUERIES, 2 * QUERIES], dtype=torch.int32, device=device)
        packing = (cu_seqlens, QUERIES) if name == "varlen_qkvpacked" else (cu_seqlens, cu_seqlens, QUERIES, QUERIES)
    tensors = (qkv,) if "qkv" in name else (qkv[..., 0, :, :], qkv[..., 1:, :, :])
    function = getattr(flash_attn, f"flash_attn_{name}_func")
    torch.manual_seed(5)
    out, lse, s_dmask = function(*tensors, *packing, RATE, return_attn_probs=True)
    assert s_dmask.shape == (BATCH, HEADS, QUERIES, QUERIES)
    torch.manual_seed(5)
    plain = (t.reshape(BATCH, QUERIES, HEADS, HEAD_DIM) for t in qkv.unbind(-3))
    expected, expected_lse, bits = flash_attn.flash_attn_func(*plain, RATE, return_attn_probs=True)
    assert torch.equal(s_dmask, bits)
    if packing:
        lse = lse.unflatten(1, (BATCH, QUERIES)).transpose(0, 1)
    assert_same([out.reshape(expected.shape), lse], [expected, expected_lse])


def test_everything_dropped_draws_nothing(device):
    tensors = dense(device)
    state = generator_state(device)
    out, lse, s_dmask = flash_attn.flash_attn_func(*tensors, 1.0, return_attn_probs=True)
    assert torch.equal(state, generator_state(device))
    assert bool((out == 0).all()) and bool((s_dmask == -1).all()) and bool(lse.isfinite().all())


def test_sixteen_bits(device):
    out, lse, s_dmask = flash_attn.flash_attn_func(*dense(device, torch.bfloat16), RATE, return_attn_probs=True)
    assert (out.dtype, lse.dtype, s_dmask.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


def test_compiled_by_inductor():
    """Compiled code may draw other seeds; the mask is that of the call."""
    tensors = [t.detach() for t in dense("cpu")]
    compiled = torch.compile(flash_attn.flash_attn_func, backend="inductor")
    out, _, s_dmask = compiled(*tensors, RATE, return_attn_probs=True)
    q, k, v = (t.double() for t in tensors)
    exact = attention_reference(q, k, v, dropout_p=RATE, dropout_mask=s_dmask >= 0, layout="bshd", return_lse=False)
    assert_same([out], [exact])
