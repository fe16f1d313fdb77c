"""Sizes that overflow a narrower integer: offsets past 2^31 elements, and more work tiles than a grid has rows."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.errors import rounding_of_a_copy
from support.packed import cu_seqlens
from support.params import over_dtypes
from support.runners import run_ours

FAR = 2**30  # a stride between rows; index 2 is past what 32 bits hold


def far_apart(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The values of `tensor`, with `dim` strided so far that its last index lies past 2^31 elements.

    On the CPU only the pages that are written become memory.
    """
    strides = list(tensor.stride())
    strides[dim] = FAR
    size = FAR * (tensor.shape[dim] - 1) + tensor.numel()
    try:
        storage = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    except RuntimeError as error:
        pytest.skip(f"cannot reserve {size * tensor.element_size() / 2**30:.0f} GiB: {error}")
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "bias", "mask"])
def test_offsets_past_32_bits(name, dim, dtype, backend):
    if dtype == torch.float32 and not backend.is_cpu:
        pytest.skip("as many elements in half the memory: 16 bits")
    case = Case(sq=3, sk=3, d=8, batch=3, heads=3, bias="bhqk", mask="bhqk")
    inputs = make_inputs(case, dtype, backend.device)
    far = inputs.replace(**{name: far_apart(getattr(inputs, name), dim)})
    # Without poisoned memory: filling gigabytes would make them real.
    ours, expected = train(far, backend), run_ours(inputs, backend)
    for output in expected:
        torch.testing.assert_close(ours[output], expected[output], msg=lambda text, output=output: f"{output}: {text}")


def train(inputs, backend):
    leaves = inputs.leaves()
    out, lse = flash_attn_ext.attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        bias=leaves["bias"],
        mask=inputs.mask,
        return_lse=True,
        backend=backend.name,
    )
    return {"out": out.detach(), "lse": lse.detach()} | {
        f"d{name}": gradient
        for name, gradient in zip(leaves, torch.autograd.grad(out, list(leaves.values()), inputs.dout), strict=True)
    }


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("batch", "heads"), [(66000, 1), (1, 66000), (257, 257)])
def test_many_heads_and_batch_entries(batch, heads, dtype, backend):
    """B x H past 65535, in closed form: one key, so out is v."""
    q, k, v = (
        torch.randn(batch, heads, n, 2, device=backend.device, dtype=dtype, requires_grad=True) for n in (2, 1, 1)
    )
    out = flash_attn_ext.attention(q, k, v, backend=backend.name)
    rtol = rounding_of_a_copy(v.dtype, backend)
    torch.testing.assert_close(out, v.expand_as(out), rtol=rtol, atol=0)
    out.sum().backward()
    torch.testing.assert_close(v.grad, torch.full_like(v, 2.0))


@over_dtypes((torch.float32, torch.bfloat16))
def test_many_packed_sequences(dtype, backend):
    lengths = (1, 0, 2) * 23000
    q, v = (torch.randn(69000, 1, 2, device=backend.device, dtype=dtype) for _ in range(2))
    cu = cu_seqlens(lengths, backend.device)
    out = flash_attn_ext.attention_varlen(q, torch.zeros_like(q), v, cu, cu, backend=backend.name)
    singles = torch.arange(0, 69000, 3, device=backend.device)
    expected = v.clone()
    expected[singles + 1] = expected[singles + 2] = (v[singles + 1] + v[singles + 2]) / 2
    torch.testing.assert_close(out, expected)
