"""delta = rowsum(dout * out) - dlse, the first stage of the backward pass, on the CPU and as a CUDA kernel."""

import pytest
import torch

from flash_attn_ext import _C
from support.cases import accumulate_dtype
from support.params import over_dtypes

DEVICES = ("cpu", "cuda")
SHAPES = [(2, 3, 70, 64), (1, 1, 1, 1), (2, 2, 33, 40), (1, 2, 5, 300), (3, 1, 129, 7), (0, 2, 5, 8), (2, 2, 0, 8)]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    if request.param == "cuda" and not (_C.build_info()["cuda_version"] and torch.cuda.is_available()):
        pytest.skip("the CUDA kernel is not built, or torch.cuda.is_available() is False")
    return request.param


def check(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, rows_last: bool = False) -> None:
    """The error is within the rounding of a sum of head_dim products in the accumulate dtype."""
    accumulate = accumulate_dtype(out.dtype)
    delta = _C.delta(out, dout, dlse)
    products = out.double() * dout.double()
    exact, magnitude = products.sum(-1), products.abs().sum(-1)
    if rows_last:
        exact, magnitude = exact.T, magnitude.T
    if dlse is not None:
        exact, magnitude = exact - dlse.double(), magnitude + dlse.abs().double()
    assert delta.dtype == accumulate and delta.shape == exact.shape
    allowed = (out.shape[-1] + 2) * torch.finfo(accumulate).eps * magnitude
    assert bool(((delta.double() - exact).abs() <= allowed).all())


@over_dtypes()
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(shape, with_dlse, dtype, device):
    out, dout = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    dlse = torch.randn(shape[:-1], device=device).to(accumulate_dtype(dtype)) if with_dlse else None
    check(out, dout, dlse)


@over_dtypes()
@pytest.mark.parametrize("with_dlse", [False, True])
def test_packed(with_dlse, dtype, device):
    """(T, H, D) gives (H, T), the shape of a packed LSE."""
    out, dout = (torch.randn(133, 3, 40, device=device).to(dtype) for _ in range(2))
    dlse = torch.randn(3, 133, device=device).to(accumulate_dtype(dtype)) if with_dlse else None
    check(out, dout, dlse, rows_last=True)


@over_dtypes()
def test_strides(dtype, device):
    """Operands may be transposed, sliced, or have a stride of 0."""
    out = torch.randn(2, 70, 3, 32, device=device).to(dtype).transpose(1, 2)
    sliced = torch.randn(2, 3, 70, 64, device=device).to(dtype)[..., ::2]
    ones = torch.ones(1, 1, 1, 1, device=device, dtype=dtype).expand(2, 3, 70, 32)
    dlse = torch.randn(2, 1, 1, device=device).to(accumulate_dtype(dtype)).expand(2, 3, 70)
    for dout in (sliced, ones):
        check(out, dout, dlse)
