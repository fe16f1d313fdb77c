"""cu_seqlens in a GPU's memory are not looked at before the kernels run: wrong ones must stay harmless."""

import pytest
import torch

from flash_attn_ext import attention_varlen
from support.checks import SM_COUNT_SWITCH
from support.params import computes_in

pytestmark = computes_in(torch.bfloat16)

GARBAGE = {  # for 100 tokens
    "beyond the end": (0, 70, 300),
    "negative": (-40, 20, -7),
    "decreasing": (0, 90, 30),
    "overlapping": (0, 90, 30, 100),
    "again and again": (0, 100) * 20,
    "huge": (2**31 - 1, -(2**31), 2**31 - 1),
}


@pytest.mark.parametrize("values", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("max_seqlen", [None, 64])
@pytest.mark.parametrize("scale", [1, 20], ids=["short", "long"])
@pytest.mark.parametrize("sms", [None, "7"], ids=["all SMs", "few SMs"])
def test_garbage_touches_nothing_else(sms, scale, max_seqlen, values, backend, monkeypatch):
    """Rows around the tensors keep their values, the call ends, and the next one is right. With few SMs, kernels
    of Hopper list work tiles first."""
    if backend.is_cpu:
        pytest.skip("checked there, and an error")
    if sms is not None:
        monkeypatch.setenv(SM_COUNT_SWITCH, sms)
    tokens = 100 * scale
    padded = [torch.randn(3 * tokens, 2, 64, device=backend.device).bfloat16() for _ in range(3)]
    before = [t.clone() for t in padded]
    q, k, v = (t[tokens : 2 * tokens].requires_grad_() for t in padded)
    longest = max_seqlen and max_seqlen * scale
    options = dict(max_seqlen_q=longest, max_seqlen_k=longest, backend=backend.name)

    def run(offsets):
        scaled = torch.tensor(offsets, device=backend.device) * scale
        cu = scaled.clamp(-(2**31), 2**31 - 1).int()
        out = attention_varlen(q, k, v, cu, cu, **options)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        torch.cuda.synchronize()
        return out, *gradients

    expected = run((0, 40, 100))
    run(values)
    assert all(torch.equal(a, b) for a, b in zip(padded, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run((0, 40, 100)), expected, strict=True))
