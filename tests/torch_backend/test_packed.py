"""Packed sequences through aten operators: the bits of flash_attn_ext.attention_varlen."""

import pytest
import torch

import flash_attn_ext
from support import aten

ATEN = torch.ops.aten
NEWER_CUDNN = torch.__version__ >= (2, 14)
LENGTHS_Q, LENGTHS_K = (5, 0, 40, 17), (9, 3, 33, 17)


def needs(operator: str):
    return pytest.mark.skipif(not hasattr(ATEN, operator), reason=f"torch {torch.__version__} has no {operator}")


FLASH_INTO, CUDNN_INTO = "_flash_attention_forward_no_dropout_inplace", "_cudnn_attention_forward_no_dropout_inplace"


def packed_operands(dtype, device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    ends = [torch.tensor([0, *lengths], device=device).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_K)]
    totals = (sum(LENGTHS_Q), sum(LENGTHS_K), sum(LENGTHS_K))
    return [torch.randn(n, 4, 16, dtype=dtype, device=device, requires_grad=True) for n in totals], ends


def test_efficient_attention_reads_how_many_keys_there_are(device):
    """PyTorch's own tests of jagged tensors pass a max_seqlen_k that is too small, and its kernel does not use it."""
    tensors, ends = packed_operands(torch.float32, device)
    out = flash_attn_ext.attention_varlen(*tensors, *ends)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, dout)
    batched = [tensor.unsqueeze(0) for tensor in tensors]
    with aten.on_device(device), aten.recorded() as passes:
        got = ATEN._efficient_attention_forward(*batched, None, *ends, max(LENGTHS_Q), 2, 0.0, 0, True)[0].squeeze(0)
        gradients = torch.autograd.grad(got, tensors, dout)
    assert passes == ["forward", "backward"]
    torch.testing.assert_close(got, out)
    for pair in zip(gradients, expected, strict=True):
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
@pytest.mark.parametrize("operator", ["flash", "cudnn", "efficient"])
def test_packed(operator, causal, dropout_p, device):
    aligned = {"flash": "bottom_right", "cudnn": "top_left", "efficient": causal}[operator]
    if causal not in (None, aligned):
        pytest.skip(f"{operator} aligns causality at the {aligned}")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors, ends = packed_operands(dtype, device)
    longest = (max(LENGTHS_Q), max(LENGTHS_K))
    torch.manual_seed(1)
    out, lse = flash_attn_ext.attention_varlen(
        *tensors, *ends, max_seqlen_q=40, max_seqlen_k=33, causal=causal, dropout_p=dropout_p, return_lse=True
    )
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, dout)
    torch.manual_seed(1)
    with aten.on_device(device), aten.recorded() as passes:
        is_causal = causal is not None
        if operator == "flash":
            results = ATEN._flash_attention_forward(*tensors, *ends, *longest, dropout_p, is_causal, False)
            got, got_lse = results[0], results[1]
        elif operator == "cudnn":
            results = ATEN._cudnn_attention_forward(*tensors, None, *ends, *longest, True, dropout_p, is_causal, False)
            got, got_lse = results[0], results[1] if NEWER_CUDNN else results[1].squeeze(-1).t()
        else:
            mask_type = (None, "top_left", "bottom_right").index(causal)
            batched = [tensor.unsqueeze(0) for tensor in tensors]
            results = ATEN._efficient_attention_forward(*batched, None, *ends, *longest, dropout_p, mask_type, True)
            got = results[0].squeeze(0)
            assert results[1].shape == (4, 4, 64) and results[4:] == longest
            got_lse = torch.cat([rows[:, :n] for rows, n in zip(results[1], LENGTHS_Q, strict=True)], 1)
            assert all(rows[:, n:].isposinf().all() for rows, n in zip(results[1], LENGTHS_Q, strict=True))
        gradients = torch.autograd.grad(got, tensors, dout)
        del results
    assert torch.equal(got, out) and torch.equal(*(t.nan_to_num(neginf=0.0) for t in (got_lse, lse)))
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    assert passes == ["forward", "backward"]


@pytest.mark.parametrize("operator", [pytest.param(name, marks=needs(name)) for name in (FLASH_INTO, CUDNN_INTO)])
def test_packed_into(operator, device):
    """varlen_attn_out of torch.nn.attention.varlen: out in the given tensor, the LSE as the result."""
    tensors, ends = packed_operands(torch.float32 if device == "cpu" else torch.bfloat16, device)
    tensors = [tensor.detach() for tensor in tensors]
    expected, expected_lse = flash_attn_ext.attention_varlen(
        *tensors, *ends, max_seqlen_q=40, max_seqlen_k=33, return_lse=True
    )
    out = torch.full_like(expected, torch.nan)
    with aten.on_device(device), aten.recorded() as passes:
        if operator == FLASH_INTO:
            lse = ATEN._flash_attention_forward_no_dropout_inplace(out, *tensors, *ends, 40, 33, 0.0, False, False)
        else:
            lse = ATEN._cudnn_attention_forward_no_dropout_inplace(out, *tensors, *ends, 40, 33)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert passes == ["forward"]
