"""What a GPU backend takes and what it refuses, so that none of it is lost without a test that fails.

Every feature, in the dtypes and up to the head dims that support/backends.py states. Whether it computes them right is
what all the other files here ask.
"""

import pytest
import torch

import flash_attn_ext
from support.backends import SM80, SM90, Backend, not_runnable_because
from support.cases import DTYPES
from support.packed import cu_seqlens
from support.params import computes_in, over_dtypes
from support.strides import with_stride_zero


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
def test_head_dims(dtype, gpu):
    widest = gpu.widest(dtype)
    for head_dim in range(1, widest.qk + 1):
        for head_dim_v in {1, 64, min(head_dim, widest.v), widest.v}:
            assert_runs(gpu, *qkv(dtype, head_dim, head_dim_v))
    for head_dim_v in range(1, widest.v + 1):
        for head_dim in {1, 64, min(head_dim_v, widest.qk), widest.qk}:
            assert_runs(gpu, *qkv(dtype, head_dim, head_dim_v))


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
    """What cannot be read in place is copied, not refused. (Rows that are one row: below.)"""
    q, k, v = qkv(dtype, 64)
    odd = [torch.zeros(1, 2, 3, 129, dtype=dtype, device="cuda")[..., 1::2] for _ in range(3)]
    assert_runs(gpu, *odd)
    assert_runs(gpu, *(t.mT.contiguous().mT for t in (q, k, v)))
    dims = (0, 1, 2, 3) if gpu.takes_repeated_rows else (0, 1, 3)
    assert_runs(gpu, *(with_stride_zero(t, dims) for t in (q, k, v)))


def assert_refused(gpu: Backend, *tensors: torch.Tensor, because: tuple[str, ...]) -> None:
    """By explain, and by a call that asks for this backend, each with the reason."""
    explanation = flash_attn_ext.explain(*tensors, backend=gpu.name)
    assert explanation.backend is None
    reasons = " ".join(explanation.reasons[gpu.name])
    assert all(part in reasons for part in because), reasons
    with pytest.raises(RuntimeError, match=r"no backend can run this call") as error:
        flash_attn_ext.attention(*tensors, backend=gpu.name)
    assert all(part in str(error.value) for part in because)


@over_dtypes()
@pytest.mark.parametrize("beyond", [1, 44])
@pytest.mark.parametrize("wide", ["qk", "v"])
def test_refusals_name_the_limit_and_what_it_got(wide, beyond, dtype, gpu):
    limit = getattr(gpu.widest(dtype), wide)
    dims = (limit + beyond, 8) if wide == "qk" else (8, limit + beyond)
    assert_refused(gpu, *qkv(dtype, *dims), because=(str(limit), str(limit + beyond)))


@computes_in(None)
@pytest.mark.parametrize("refused", DTYPES, ids=str)
def test_a_refused_dtype_is_a_reason(refused, gpu):
    if gpu.widest(refused) is not None:
        pytest.skip(f"{gpu.name} takes {refused}")
    assert_refused(gpu, *qkv(refused, 64), because=("bfloat16 and float16 only",))


@over_dtypes()
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_refused_rows_that_are_one_row(name, dtype, gpu):
    if gpu.takes_repeated_rows:
        pytest.skip(f"{gpu.name} takes them")
    tensors = qkv(dtype, 64)
    index = "qkv".index(name)
    tensors[index] = with_stride_zero(tensors[index], (2,))
    assert_refused(gpu, *tensors, because=(f"cannot read {name}", "stride 0"))


@over_dtypes()
def test_what_no_backend_takes(dtype, gpu):
    with pytest.raises(RuntimeError, match=r"no backend can run this call") as error:
        flash_attn_ext.attention(*qkv(dtype, 577))
    assert gpu.name in str(error.value)


@pytest.fixture
def hopper() -> None:
    for gpu in (SM80, SM90):
        if reason := not_runnable_because(gpu):
            pytest.skip(reason)


@over_dtypes()
def test_what_sm90_does_not_take_goes_to_sm80(dtype, hopper):
    """And the explanation says why not sm90."""
    taken = qkv(dtype, 64)
    wide, strided = qkv(dtype, 257), [with_stride_zero(taken[0], (2,)), *taken[1:]]
    for head_dim, tensors in ((64, taken), (257, wide), (64, strided)):
        if SM80.refusal(dtype, head_dim):
            continue
        explanation = flash_attn_ext.explain(*tensors)
        first = SM80 if tensors is strided or SM90.refusal(dtype, head_dim) else SM90
        assert explanation.backend == first.name, str(explanation)
        assert bool(explanation.reasons["sm90"]) == (first == SM80)
