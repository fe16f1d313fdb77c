"""replace_sdpa(fallback=...): what ours cannot take raises, or goes to PyTorch with one warning for each reason."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from flash_attn_ext import replace_sdpa
from flash_attn_ext.integrations.torch_sdpa import attention
from support.frames import attention_ranges

pytestmark = pytest.mark.usefixtures("every_reason_is_new")


def qkv(device: str, length: int = 5, head_dim: int = 8) -> list[torch.Tensor]:
    return [torch.randn(2, 3, length, head_dim, device=device) for _ in range(3)]


def call(device: str, length: int = 5) -> torch.Tensor:
    """A call that PyTorch takes and ours does not: an infinite scale, and on a GPU a float32 head dim past 256."""
    if device == "cpu":
        return F.scaled_dot_product_attention(*qkv(device, length), scale=float("inf"))
    return F.scaled_dot_product_attention(*qkv(device, length, head_dim=300))


REASON = {"cpu": "scale", "cuda": "head dim"}


def test_raises_by_default(device):
    with replace_sdpa(), pytest.raises((ValueError, RuntimeError), match=REASON[device]):
        call(device)


def test_goes_to_pytorch_when_asked(device):
    with replace_sdpa(fallback="torch"), pytest.warns(UserWarning, match=rf"PyTorch[\s\S]*{REASON[device]}") as record:
        out = call(device)
    assert out.shape == (2, 3, 5, 8 if device == "cpu" else 300)
    assert "MiB" in str(record[0].message)  # what the unfused path may cost


def test_one_warning_for_each_reason(device):
    q, k, v = qkv(device)
    with replace_sdpa(fallback="torch"), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for length in (5, 4, 3):
            call(device, length)  # the same reason at other sizes
        assert len(record) == 1
        with pytest.raises(RuntimeError):  # another reason, and PyTorch refuses it too
            F.scaled_dot_product_attention(q, k, v.double())
    assert len(record) == 2
    assert all("flash_attn_ext" in str(warning.message) for warning in record)


def test_sizes_in_a_reason_make_it_no_other(device, monkeypatch):
    def refuse(query, *args, **kwargs):
        raise RuntimeError(f"query has {query.size(-2)} rows of {query.size(-1)} columns, expected others")

    monkeypatch.setattr(attention, "scaled_dot_product_attention", refuse)
    with replace_sdpa(fallback="torch"), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for length in (5, 4, 30):
            F.scaled_dot_product_attention(*qkv(device, length))
    assert len(record) == 1 and "query has 5 rows of 8 columns" in str(record[0].message)


def test_no_warning_where_ours_runs(device):
    with replace_sdpa(fallback="torch"), warnings.catch_warnings():
        warnings.simplefilter("error")
        F.scaled_dot_product_attention(*qkv(device))


def test_running_out_of_memory_is_no_reason(device, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(attention, "scaled_dot_product_attention", fail)
    with replace_sdpa(fallback="torch"), pytest.raises(torch.OutOfMemoryError, match="none left"):
        F.scaled_dot_product_attention(*qkv(device))


def test_nor_is_what_an_allocator_says(device):
    """That of the CPU has no type of its own for it. PyTorch's attention would take more."""
    one = torch.zeros(1, 1, 1, 1, device=device)
    with replace_sdpa(fallback="torch"), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="memory"):
            F.scaled_dot_product_attention(one.expand(2**12, 2**12, 2**20, 64), *[one.expand(1, 1, 2, 64)] * 2)


def test_the_innermost_context_decides(device):
    with replace_sdpa(fallback="torch"), replace_sdpa(), pytest.raises((ValueError, RuntimeError)):
        call(device)
    with replace_sdpa(), replace_sdpa(fallback="torch"), pytest.warns(UserWarning, match=REASON[device]):
        call(device)
    assert not attention.of_thread.is_left_to_torch


@pytest.mark.usefixtures("fresh_compiler")
def test_the_innermost_context_decides_in_compiled_code(device, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("refused")

    def attend():
        return F.scaled_dot_product_attention(*qkv(device))

    monkeypatch.setattr(attention, "scaled_dot_product_attention", refuse)  # by the inner one
    with replace_sdpa(), replace_sdpa(fallback="torch"):
        compiled = torch.compile(attend, backend="eager")
        assert attention_ranges(compiled) == (0, 1)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("fallback", ["raise", "torch"])
def test_compiled_code_raises_what_only_the_extension_refuses(fallback, device):
    compiled = torch.compile(call, backend="eager")
    with replace_sdpa(fallback=fallback), pytest.raises((ValueError, RuntimeError), match=REASON[device]):
        compiled(device)


def test_meta_tensors_have_shapes():
    """Models built on the meta device run without computing."""
    q, k, v = (t.to("meta") for t in qkv("cpu"))
    with replace_sdpa():
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.is_meta and out.shape == q.shape
