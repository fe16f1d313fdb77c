"""What kernels cannot read in place is copied, and the logger "flash_attn_ext" says so at level DEBUG."""

import logging

import pytest
import torch

from flash_attn_ext import _C, _copy_log, attention, attention_varlen
from support.binding import problem
from support.params import computes_in

pytestmark = computes_in(torch.bfloat16)  # on GPU backends


@pytest.fixture
def copied(caplog):
    """The messages so far."""
    caplog.set_level(logging.DEBUG, logger="flash_attn_ext")
    return lambda: [record.getMessage() for record in caplog.records if "was copied" in record.getMessage()]


def randn(device, *shape, dtype=torch.float32):
    return torch.randn(shape, device=device).to(dtype)


def test_nothing_is_copied_without_need(copied, backend):
    dtype = torch.float32 if backend.is_cpu else torch.bfloat16
    leaves = [randn(backend.device, 2, 3, 8, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    out = attention(*leaves, sink=randn(backend.device, 3), backend=backend.name)
    out.backward(torch.ones_like(out))
    assert copied() == []


def test_a_strided_sink(copied, backend):
    dtype = torch.float32 if backend.is_cpu else torch.bfloat16
    q = randn(backend.device, 2, 3, 8, 16, dtype=dtype)
    sink = randn(backend.device, 6)[::2]
    strided = attention(q, q, q, sink=sink, backend=backend.name)
    (message,) = copied()
    assert all(part in message for part in ("sink", "contiguous", "(2,)", "sink.contiguous()")), message
    assert torch.equal(strided, attention(q, q, q, sink=sink.contiguous(), backend=backend.name))


def test_strided_intervals(copied, backend):
    dtype = torch.float32 if backend.is_cpu else torch.bfloat16
    q = randn(backend.device, 2, 3, 8, 16, dtype=dtype)
    rows = torch.tensor([[0, 5]] * 8, dtype=torch.int32, device=backend.device)
    expected = attention(q, q, q, intervals=rows, backend=backend.name)
    assert copied() == []
    strided = attention(q, q, q, intervals=rows.T.contiguous().T, backend=backend.name)
    (message,) = copied()
    assert all(part in message for part in ("intervals", "contiguous", "(1, 1, 8, 2)")), message
    assert torch.equal(strided, expected)


def test_strided_cu_seqlens(copied, backend):
    dtype = torch.float32 if backend.is_cpu else torch.bfloat16
    q = randn(backend.device, 8, 3, 16, dtype=dtype)
    cu = torch.tensor([0, 9, 3, 9, 8, 9], dtype=torch.int32, device=backend.device)[::2]
    attention_varlen(q, q, q, cu, cu, backend=backend.name)
    assert ["cu_seqlens_q" in m or "cu_seqlens_k" in m for m in copied()] == [True, True]


def test_an_expanded_gradient_of_the_lse(copied, backend):
    """From a thread of autograd's where there is a GPU."""
    dtype = torch.float32 if backend.is_cpu else torch.bfloat16
    leaves = [randn(backend.device, 2, 3, 8, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    _, lse = attention(*leaves, return_lse=True, backend=backend.name)
    lse.sum().backward()
    assert any(m.startswith("dlse was copied") and "dense gradient" in m for m in copied())


def test_tensors_with_unaligned_rows(copied, backend):
    if backend.is_cpu:
        pytest.skip("the CPU kernels read any strides")
    q, k = (randn(backend.device, 1, 1, 8, 17, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    v = randn(backend.device, 1, 1, 16, 8, dtype=torch.bfloat16).mT[..., ::2].requires_grad_()
    out = attention(q, k, v, backend=backend.name)
    assert [m.split()[0] for m in copied()] == ["q", "k", "v"]
    assert all("24 elements" in m for m in copied()[:2]) and "v.contiguous()" in copied()[2]
    out.sum().backward()
    assert "dout" in [m.split()[0] for m in copied()]


def test_silent_unless_asked(caplog):
    caplog.set_level(logging.INFO, logger="flash_attn_ext")
    q = torch.randn(2, 3, 8, 16)
    attention(q, q, q, sink=torch.randn(6)[::2])
    assert caplog.records == []


def test_advice_for_rows_that_no_offset_aligns(copied):
    _copy_log.log_copy("k", torch.zeros(2, 3, 5, 33, dtype=torch.half), "aligned rows")
    assert "rows of 40 elements" in copied()[0]


def test_where_a_view_begins(copied):
    """Memory of PyTorch's begins at multiples of 16 bytes and more."""
    _copy_log.log_copy("k", torch.zeros(2, 3, 5, 32)[..., 3:], "aligned rows")
    assert "begins 12 bytes past a multiple of 16" in copied()[0]


def test_an_error_of_the_log_reaches_the_caller():
    def fail(*_):
        raise KeyError("from the log")

    q = torch.randn(1, 2, 8, 16)
    _C.set_copy_log(fail)
    try:
        with pytest.raises(KeyError, match="from the log"):
            _C.attention_forward(problem(q, q, q, sink=torch.randn(4)[::2]))
    finally:
        _C.set_copy_log(_copy_log.log_copy)
