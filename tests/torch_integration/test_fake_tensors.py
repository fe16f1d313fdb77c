"""Fake kernels promise exactly the shapes, dtypes and strides that the real ones deliver."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.runners import call_ours, gradients
from support.strides import with_stride_zero, with_strides

CASES = (
    Case(sq=5, sk=7, d=8, dv=6),
    Case(sq=5, sk=7, d=8, heads=4, kv_heads=2, layout="bshd"),
    Case(sq=1, sk=7, d=8, heads=1, bias="bh1k", alibi="h", sink=True),
    Case(sq=5, sk=0, d=8, mask="b11k"),
    Case(sq=5, sk=7, d=1, batch=1, bias="1hqk", mask="bhqk", alibi="bh", sink=True, dlse=True),
)


def train(inputs: Inputs) -> dict[str, torch.Tensor]:
    leaves = inputs.leaves()
    out, lse = call_ours(inputs, leaves)
    return {"out": out, "lse": lse} | gradients({"out": out, "lse": lse}, inputs, leaves)


def described(results: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Strides of an empty tensor address nothing, so they are left out."""
    return {
        name: (tuple(t.shape), t.dtype, t.stride() if t.numel() else None, t.device.type) for name, t in results.items()
    }


@pytest.mark.parametrize("seed", range(40))
def test_metadata_equals_the_real_one(seed, backend):
    rng = random.Random(seed)
    case, dtype = CASES[seed % len(CASES)], rng.choice((torch.float32, torch.bfloat16, torch.float64))
    inputs = make_inputs(case, dtype, backend.device, seed)
    changes = {name: with_strides(getattr(inputs, name), rng) for name in ("q", "k", "v", "dout")}
    if rng.random() < 0.3:
        name = rng.choice(("q", "k", "v", "dout"))
        dim = rng.choice([dim for dim in range(4) if changes[name].shape[dim] > 0])
        changes[name] = with_stride_zero(changes[name], (dim,))
    inputs = inputs.replace(**changes)
    real = described(train(inputs))
    mode = FakeTensorMode()
    fakes = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    fakes = {name: mode.from_tensor(t) for name, t in fakes.items() if t is not None}
    with mode:
        assert described(train(inputs.replace(**fakes))) == real


def test_meta_tensors(backend):
    q, k = (torch.empty(2, 3, n, 8, device="meta", requires_grad=True) for n in (5, 7))
    out, lse = flash_attn_ext.attention(q, k, k, causal="bottom_right", return_lse=True)
    out.sum().backward()
    assert out.shape == q.shape and lse.shape == (2, 3, 5) and q.grad.is_meta and k.grad.shape == k.shape
