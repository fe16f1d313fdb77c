"""What a GPU backend takes and what it refuses, so that nobody narrows it without a test that fails.

Every dtype, every feature, any head dim up to 256 and in the 16-bit types up to 512. Whether it computes them right is
what all the other files here ask.
"""

import pytest
import torch

import flash_attn_ext
from support.backends import Backend
from support.cases import DTYPES
from support.packed import cu_seqlens
from support.params import over_dtypes

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def gpu(backend) -> Backend:
    if backend.is_cpu:
        pytest.skip("about GPU backends")
    return backend


def qkv(dtype: torch.dtype, head_dim: int, head_dim_v: int | None = None) -> list[torch.Tensor]:
    dims = (head_dim, head_dim, head_dim if head_dim_v is None else head_dim_v)
    return [torch.zeros(1, 2, 3, d, dtype=dtype, device="cuda") for d in dims]


def assert_runs(gpu: Backend, *tensors: torch.Tensor, **options) -> None:
    explanation = flash_attn_ext.explain(*tensors, **options, backend=gpu.name)
    assert explanation.backend == gpu.name, str(explanation)


@over_dtypes()
def test_head_dims_up_to_256(dtype, gpu):
    for head_dim in range(1, 257):
        for other in (1, 64, head_dim, 256):
            assert_runs(gpu, *qkv(dtype, head_dim, other))
            assert_runs(gpu, *qkv(dtype, other, head_dim))


@over_dtypes(HALVES)
def test_16_bit_head_dims_up_to_512(dtype, gpu):
    for head_dim in range(257, 513):
        for other in (1, 64, head_dim, 512):
            assert_runs(gpu, *qkv(dtype, head_dim, other))
            assert_runs(gpu, *qkv(dtype, other, head_dim))


def features(dtype: torch.dtype) -> list[dict]:
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32

    def zeros(*shape: int, of: torch.dtype = accumulate) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device="cuda")

    alone = [
        dict(causal="top_left"),
        dict(causal="bottom_right"),
        dict(window=(64, 0)),
        dict(softcap=30.0),
        dict(dropout_p=0.1),
        dict(scale=-1.0),
        dict(bias=zeros(1, 2, 3, 3, of=dtype)),
        dict(bias=zeros(3, 1)),
        dict(mask=zeros(2, 3, 3, of=torch.bool)),
        dict(alibi_slopes=zeros(1, 2)),
        dict(sink=zeros(2)),
        dict(return_lse=True),
    ]
    together = {name: value for feature in alone for name, value in feature.items()}
    return [{}, *alone, together]


@over_dtypes()
@pytest.mark.parametrize("head_dim", [64, 256])
def test_every_feature(head_dim, dtype, gpu):
    cu = cu_seqlens((1, 0, 2), "cuda")
    for options in features(dtype):
        assert_runs(gpu, *qkv(dtype, head_dim), **options)
        if not options.keys() & {"bias", "mask", "alibi_slopes"}:  # these have other shapes there
            assert_runs(gpu, *(t[0].transpose(0, 1) for t in qkv(dtype, head_dim)), cu, cu, **options)


@over_dtypes(DTYPES)
def test_any_strides(dtype, gpu):
    """What cannot be read in place is copied, not refused."""
    q, k, v = qkv(dtype, 64)
    odd = [torch.zeros(1, 2, 3, 129, dtype=dtype, device="cuda")[..., 1::2] for _ in range(3)]
    assert_runs(gpu, *odd)
    assert_runs(gpu, *(t.mT.contiguous().mT for t in (q, k, v)))
    assert_runs(gpu, *(t[:1, :1, :1, :1].expand(1, 2, 3, 64) for t in (q, k, v)))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "widest"),
    [(torch.float32, 257, 256), (torch.float64, 300, 256), (torch.bfloat16, 513, 512), (torch.float16, 600, 512)],
    ids=str,
)
@pytest.mark.parametrize("wide", ["qk", "v"])
def test_refusals_name_the_limit_and_what_it_got(wide, dtype, head_dim, widest, gpu):
    tensors = qkv(dtype, head_dim, 8) if wide == "qk" else qkv(dtype, 8, head_dim)
    explanation = flash_attn_ext.explain(*tensors, backend=gpu.name)
    assert explanation.backend is None
    reasons = " ".join(explanation.reasons[gpu.name])
    assert str(widest) in reasons and str(head_dim) in reasons, reasons
    with pytest.raises(RuntimeError, match=r"no backend can run this call") as error:
        flash_attn_ext.attention(*tensors)
    assert str(widest) in str(error.value)
