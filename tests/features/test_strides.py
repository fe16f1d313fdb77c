"""Any strides of any tensor, stride 0 included: the values count, not where they lie."""

import itertools
import random

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.checks import check_inputs
from support.params import computes_in, over_dtypes
from support.runners import Result, run_ours
from support.strides import with_stride_zero, with_strides

CASES = (
    Case(sq=70, sk=130, d=24, batch=2, heads=2, dlse=True),
    Case(sq=130, sk=70, d=40, dv=16, heads=4, kv_heads=2, causal="bottom_right"),
    Case(sq=65, sk=140, d=16, bias="bhqk", mask="bhqk", dlse=True),
    Case(sq=65, sk=140, d=16, bias="1h1k", mask="b1q1"),
    Case(sq=65, sk=140, d=16, bias="11qk", alibi="bh", sink=True, dlse=True),
)
DENSE = ("q", "k", "v", "dout")


def contiguous(inputs: Inputs) -> Inputs:
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    return inputs.replace(**{name: t.contiguous() for name, t in tensors.items() if t is not None})


def assert_same(strided: Result, expected: Result) -> None:
    for name in expected:
        torch.testing.assert_close(strided[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


@computes_in(None)
@pytest.mark.parametrize("seed", range(40))
def test_random_strides_of_everything(seed, backend):
    rng = random.Random(seed)
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    if refusal := backend.refusal(dtype):
        pytest.skip(refusal)
    inputs = make_inputs(CASES[seed % len(CASES)], dtype, backend.device, seed)
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    strided = inputs.replace(**{name: with_strides(t, rng) for name, t in tensors.items() if t is not None})
    assert_same(run_ours(strided, backend), run_ours(contiguous(strided), backend))


ZERO_DIMS = [dims for count in (1, 2, 3, 4) for dims in itertools.combinations(range(4), count)]


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("dims", ZERO_DIMS, ids=str)
@pytest.mark.parametrize("name", [*DENSE, "bias", "mask"])
def test_stride_zero(name, dims, dtype, backend):
    """out.sum().backward() makes a dout of stride 0 everywhere; expand() makes such k, v and masks.

    On Hopper a bias or mask that is expanded along queries or keys takes another 16-bit kernel, and rounds differently.
    """
    if name in ("q", "k", "v") and 2 in dims and not backend.takes_repeated_rows:
        pytest.skip(f"backend {backend.name} does not take a {name} whose rows are one row")
    inputs = make_inputs(CASES[2], dtype, backend.device)
    expanded = inputs.replace(**{name: with_stride_zero(getattr(inputs, name), dims)})
    if backend.name == "sm90" and dtype is torch.bfloat16 and name in ("bias", "mask") and {2, 3} & set(dims):
        check_inputs(expanded, backend)
    else:
        assert_same(run_ours(expanded, backend), run_ours(contiguous(expanded), backend))


def test_everything_expanded_from_one_element(backend):
    inputs = make_inputs(Case(sq=70, sk=130, d=24, dlse=True), torch.float32, backend.device)
    dims = (0, 1, 2, 3)
    expanded = inputs.replace(**{name: with_stride_zero(getattr(inputs, name), dims) for name in DENSE})
    expanded.dlse = with_stride_zero(inputs.dlse, (0, 1, 2))
    assert_same(run_ours(expanded, backend), run_ours(contiguous(expanded), backend))


@over_dtypes((torch.float32, torch.bfloat16))
def test_views_of_one_packed_projection(dtype, backend):
    """qkv.unbind(2) of (B, S, 3, H, D), transposed: what models pass."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 140, 3, 2, 32, generator=generator).to(backend.device, dtype).requires_grad_()
    copy = qkv.detach().clone().requires_grad_()
    views = (t.transpose(1, 2) for t in qkv.unbind(2))
    copies = (t.transpose(1, 2).contiguous() for t in copy.unbind(2))
    for source in (views, copies):
        flash_attn_ext.attention(*source, causal="top_left", backend=backend.name).square().sum().backward()
    torch.testing.assert_close(qkv.grad, copy.grad)


@over_dtypes((torch.float32, torch.bfloat16))
def test_transposed_mask_and_bias(dtype, backend):
    inputs = make_inputs(Case(sq=140, sk=140, bias="11qk", mask="bhqk"), dtype, backend.device)
    transposed = inputs.replace(bias=inputs.bias.mT, mask=inputs.mask.mT)
    assert_same(run_ours(transposed, backend), run_ours(contiguous(transposed), backend))


@computes_in(torch.bfloat16)
def test_storage_offset_breaks_alignment(backend):
    """A view that begins in the middle of a vector register's worth of elements."""
    inputs = make_inputs(Case(sq=70, sk=130, d=24), torch.bfloat16, backend.device)

    def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
        storage = torch.full((tensor.numel() + by,), float("nan"), dtype=tensor.dtype, device=tensor.device)
        return storage[by:].view(tensor.shape).copy_(tensor)

    offset = inputs.replace(**{name: shifted(getattr(inputs, name), i + 1) for i, name in enumerate(DENSE)})
    assert_same(run_ours(offset, backend), run_ours(inputs, backend))


@computes_in(torch.float64)
def test_same_tensor_as_q_k_and_v(backend):
    """One leaf in three roles gets the sum of three gradients."""
    inputs = make_inputs(Case(sq=70, sk=70, d=24), torch.float64, backend.device)
    together = inputs.q.clone().requires_grad_()
    apart = [inputs.q.clone().requires_grad_() for _ in range(3)]
    flash_attn_ext.attention(together, together, together, backend=backend.name).backward(inputs.dout)
    flash_attn_ext.attention(*apart, backend=backend.name).backward(inputs.dout)
    torch.testing.assert_close(together.grad, sum(leaf.grad for leaf in apart))
