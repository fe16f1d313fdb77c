"""cu_seqlens in a GPU's memory are not looked at before the kernels run: wrong ones must stay harmless."""

import pytest
import torch

from flash_attn_ext import attention_varlen
from support.params import computes_in

pytestmark = computes_in(torch.bfloat16)

GARBAGE = {
    "beyond the end": (0, 70, 300),
    "negative": (-40, 20, -7),
    "decreasing": (0, 90, 30),
    "huge": (2**31 - 1, -(2**31), 2**31 - 1),
}


@pytest.mark.parametrize("values", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("max_seqlen", [None, 64])
def test_garbage_touches_nothing_else(max_seqlen, values, backend):
    """Rows around the tensors keep their values, and the next call is right."""
    if backend.is_cpu:
        pytest.skip("checked there, and an error")
    padded = [torch.randn(300, 2, 64, device=backend.device).bfloat16() for _ in range(3)]
    before = [t.clone() for t in padded]
    q, k, v = (t[100:200].requires_grad_() for t in padded)
    options = dict(max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, backend=backend.name)

    def run(offsets):
        cu = torch.tensor(offsets, dtype=torch.int32, device=backend.device)
        out = attention_varlen(q, k, v, cu, cu, **options)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        torch.cuda.synchronize()
        return out, *gradients

    expected = run((0, 40, 100))
    run(values)
    assert all(torch.equal(a, b) for a, b in zip(padded, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run((0, 40, 100)), expected, strict=True))
