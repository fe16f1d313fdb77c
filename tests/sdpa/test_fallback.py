"""replace_sdpa(fallback=...): what ours cannot take raises, or goes to PyTorch with one warning for each reason."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from flash_attn_ext import replace_sdpa
from flash_attn_ext.integrations import torch_sdpa


@pytest.fixture(autouse=True)
def _nothing_was_warned_about(monkeypatch):
    monkeypatch.setattr(torch_sdpa, "_warned", set())


def qkv():
    return [torch.randn(2, 3, 5, 8) for _ in range(3)]


def test_raises_by_default():
    with replace_sdpa(), pytest.raises(ValueError, match="dropout_p"):
        F.scaled_dot_product_attention(*qkv(), dropout_p=1.0)


def test_goes_to_pytorch_when_asked():
    with replace_sdpa(fallback="torch"), pytest.warns(UserWarning, match=r"PyTorch.*dropout_p") as record:
        out = F.scaled_dot_product_attention(*qkv(), dropout_p=1.0)
    assert bool((out == 0).all())
    assert "MiB" in str(record[0].message)  # what the unfused path may cost


def test_one_warning_for_each_reason():
    q, k, v = qkv()
    with replace_sdpa(fallback="torch"), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for length in (5, 4, 3):
            # The same reason at other sizes.
            F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length], dropout_p=1.0)
        assert len(record) == 1
        with pytest.raises(RuntimeError):  # another reason, and PyTorch refuses it too
            F.scaled_dot_product_attention(q, k, v.double())
    assert len(record) == 2
    assert all("flash_attn_ext" in str(warning.message) for warning in record)


def test_no_warning_where_ours_runs():
    with replace_sdpa(fallback="torch"), warnings.catch_warnings():
        warnings.simplefilter("error")
        F.scaled_dot_product_attention(*qkv())


def test_the_innermost_context_decides():
    with replace_sdpa(fallback="torch"), replace_sdpa(), pytest.raises(ValueError, match="dropout_p"):
        F.scaled_dot_product_attention(*qkv(), dropout_p=1.0)


def test_meta_tensors_have_shapes():
    """Models built on the meta device run without computing."""
    q, k, v = (t.to("meta") for t in qkv())
    with replace_sdpa():
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.is_meta and out.shape == q.shape
