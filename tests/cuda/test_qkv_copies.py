"""What a kernel cannot read where it is gets copied, and says so: logger "flash_attn_ext", level DEBUG.

That results do not depend on strides is in features/test_strides.py.
"""

import logging
import re

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.packed import cu_seqlens
from support.params import computes_in
from support.runners import call_ours, gradients

pytestmark = computes_in(torch.bfloat16)

CASE = Case(sq=70, sk=130, d=64)
OPERANDS = ("q", "k", "v", "dout")


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values beginning one element behind a multiple of 16 bytes."""
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return storage[1:].view(tensor.shape).copy_(tensor)


def rows_apart(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of an odd number of elements, of which the first ones count."""
    storage = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype, device=tensor.device)
    return storage[..., :-1].copy_(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


def train(inputs: Inputs, gpu) -> None:
    leaves = inputs.leaves()
    out, lse = call_ours(inputs, leaves, gpu)
    gradients({"out": out, "lse": lse}, inputs, leaves)


def copies(caplog) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("flash_attn_ext")]
    return [message for message in messages if "copied" in message]


@pytest.fixture
def at_debug(caplog):
    caplog.set_level(logging.DEBUG, logger="flash_attn_ext")
    return caplog


@pytest.mark.parametrize("change", [misaligned, rows_apart, transposed], ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", OPERANDS)
def test_a_copy_is_logged_by_its_name(name, change, at_debug, gpu):
    inputs = make_inputs(CASE, torch.bfloat16, "cuda")
    train(inputs.replace(**{name: change(getattr(inputs, name))}), gpu)
    assert any(re.search(rf"\b{name}\b", message) for message in copies(at_debug)), copies(at_debug)


def test_aligned_tensors_are_not_copied(at_debug, gpu):
    inputs = make_inputs(CASE, torch.bfloat16, "cuda")
    train(inputs, gpu)
    packed = torch.randn(2, 70, 3, 2, 64, device="cuda").bfloat16().requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
    out = flash_attn_ext.attention(q, k, v, backend=gpu.name)
    out.backward(torch.randn(2, 70, 2, 64, device="cuda").bfloat16().transpose(1, 2))
    assert not copies(at_debug)


def test_packed_tensors_are_logged_too(at_debug, gpu):
    q, k, v = (torch.randn(100, 2, 64, device="cuda").bfloat16() for _ in range(3))
    cu = cu_seqlens((60, 40), "cuda")
    flash_attn_ext.attention_varlen(q, misaligned(k), v, cu, cu, max_seqlen_q=60, max_seqlen_k=60, backend=gpu.name)
    assert copies(at_debug)


def test_nothing_is_said_above_debug(caplog, gpu):
    caplog.set_level(logging.INFO, logger="flash_attn_ext")
    inputs = make_inputs(CASE, torch.bfloat16, "cuda")
    train(inputs.replace(q=misaligned(inputs.q)), gpu)
    assert not copies(caplog)
