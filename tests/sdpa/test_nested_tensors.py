"""Nested tensors under replace_sdpa: refused with a reason, or PyTorch's when asked for."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flash_attn_ext
from flash_attn_ext import replace_sdpa

pytestmark = pytest.mark.usefixtures("every_reason_is_new")


def nested(device: str, *shape: int) -> torch.Tensor:
    """Of two sequences of 5 and 9 tokens: (2, *shape with None = the length)."""
    torch.manual_seed(1)
    return torch.nested.nested_tensor(
        [torch.randn([length if size < 0 else size for size in shape], device=device) for length in (5, 9)]
    )


def encoder(device: str, kind: str) -> nn.Module:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
    return (layer if kind == "layer" else nn.TransformerEncoder(layer, 2)).to(device).eval()


def test_the_functional_goes_to_pytorch_with_one_warning(device):
    query = nested(device, 4, -1, 8)
    expected = F.scaled_dot_product_attention(query, query, query)
    with replace_sdpa(fallback="torch"), pytest.warns(UserWarning, match="query is a nested tensor") as record:
        outs = [F.scaled_dot_product_attention(query, query, query) for _ in range(2)]
    assert len([w for w in record if "flash_attn_ext" in str(w.message)]) == 1
    for out in outs:
        for sequence, wanted in zip(out.unbind(), expected.unbind(), strict=True):
            torch.testing.assert_close(sequence, wanted)


def test_the_functional_raises_otherwise(device):
    query = nested(device, 4, -1, 8)
    with replace_sdpa(), pytest.raises(TypeError, match=r"query is a nested tensor.*attention_varlen"):
        F.scaled_dot_product_attention(query, query, query)


@contextlib.contextmanager
def installed(fallback: str):
    flash_attn_ext.install_sdpa(fallback)
    try:
        yield
    finally:
        flash_attn_ext.uninstall_sdpa()


@pytest.mark.parametrize("replaced", [replace_sdpa, installed])
@pytest.mark.parametrize("kind", ["layer", "encoder"])
def test_transformer_modules_go_to_pytorch(kind, replaced, device):
    model, x = encoder(device, kind), nested(device, -1, 32)
    with torch.no_grad():
        expected = model(x).to_padded_tensor(0.0)
        with replaced(fallback="torch"), pytest.warns(UserWarning, match="TransformerEncoderLayer got a nested tensor"):
            out = model(x)
    torch.testing.assert_close(out.to_padded_tensor(0.0), expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("replaced", [replace_sdpa, installed])
def test_compiled_transformer_modules_go_to_pytorch(replaced, device):
    """Dynamo gives nested inputs up, and what looks for them runs in Python."""
    model, x = encoder(device, "layer"), nested(device, -1, 32)
    with torch.no_grad():
        expected = model(x).to_padded_tensor(0.0)
        with replaced(fallback="torch"), pytest.warns(UserWarning, match="TransformerEncoderLayer got a nested tensor"):
            out = torch.compile(model, backend="eager")(x)
    torch.testing.assert_close(out.to_padded_tensor(0.0), expected)


@pytest.mark.parametrize("kind", ["layer", "encoder"])
def test_transformer_modules_raise_otherwise(kind, device):
    with replace_sdpa(), torch.no_grad(), pytest.raises(TypeError, match=r"nested tensor.*padding_mask.*fallback"):
        encoder(device, kind)(nested(device, -1, 32))


def test_padding_that_pytorch_would_make_nested_runs_on_ours(device):
    """enable_nested_tensor: without the fused path the encoder keeps its input padded."""
    model = encoder(device, "encoder")
    x = torch.randn(2, 9, 32, device=device)
    padding = torch.arange(9, device=device).expand(2, 9) >= torch.tensor([[5], [9]], device=device)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        for fallback in ("raise", "torch"):
            with replace_sdpa(fallback=fallback):
                out = model(x, src_key_padding_mask=padding)
            torch.testing.assert_close(out[~padding], expected[~padding])


def test_a_thread_that_replaces_nothing_keeps_the_fused_path(device):
    """It goes by the thread, although the switch of the path is one for all."""
    model, x, outs = encoder(device, "layer"), nested(device, -1, 32), []
    with torch.no_grad():
        expected = model(x).to_padded_tensor(0.0)

    def infer():
        with torch.no_grad():
            outs.append(model(x).to_padded_tensor(0.0))

    with replace_sdpa():
        thread = threading.Thread(target=infer)
        thread.start()
        thread.join()
    torch.testing.assert_close(outs[0], expected)


def test_nothing_is_left_behind():
    forwards = nn.TransformerEncoderLayer.forward, nn.MultiheadAttention.forward
    with replace_sdpa(), replace_sdpa(fallback="torch"):
        assert nn.MultiheadAttention.forward is not forwards[1]
    assert (nn.TransformerEncoderLayer.forward, nn.MultiheadAttention.forward) == forwards
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_forward_that_somebody_else_replaced_stays(monkeypatch):
    before = nn.MultiheadAttention.forward
    with replace_sdpa():
        ours = nn.MultiheadAttention.forward

        def theirs(self, *args, **kwargs):
            return ours(self, *args, **kwargs)

        monkeypatch.setattr(nn.MultiheadAttention, "forward", theirs)
    assert nn.MultiheadAttention.forward is theirs
    assert torch.backends.mha.get_fastpath_enabled()
    monkeypatch.setattr(nn.MultiheadAttention, "forward", before)


def test_a_forward_that_was_kept_leaves_the_users_switch_alone():
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with replace_sdpa(fallback="torch"):
        kept = layer.forward
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), pytest.raises(AssertionError, match="fast path"):
            kept(nested)
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
