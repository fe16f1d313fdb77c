"""install_sdpa: every name of PyTorch's attention is ours, on all threads, and nothing else is touched."""

import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn, overrides
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import flash_attn_ext
from flash_attn_ext.integrations.torch_sdpa.mode import installation
from support.forks import run_forked

KEPT = [F.scaled_dot_product_attention]  # PyTorch's, under no name of a module, which would be replaced


@pytest.fixture
def importer():
    """A module that did `from torch.nn.functional import scaled_dot_product_attention as attend` before."""
    module = types.ModuleType("imported_it_before")
    module.attend = KEPT[0]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def qkv(device) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 5, 8, device=device, requires_grad=True) for _ in range(3)]


def ran_on_ours(out: torch.Tensor) -> bool:
    return out.grad_fn.name() == "FlashAttentionFunctionBackward"


def test_names_imported_before(importer, device):
    tensors = qkv(device)
    flash_attn_ext.install_sdpa()
    try:
        assert ran_on_ours(importer.attend(*tensors))
    finally:
        flash_attn_ext.uninstall_sdpa()
    assert importer.attend is KEPT[0] and F.scaled_dot_product_attention is KEPT[0]


def test_names_imported_meanwhile(device):
    flash_attn_ext.install_sdpa()
    attend = F.scaled_dot_product_attention
    flash_attn_ext.uninstall_sdpa()
    assert not ran_on_ours(attend(*qkv(device)))


def test_a_name_that_somebody_else_replaced_stays(importer):
    flash_attn_ext.install_sdpa()
    importer.attend = theirs = object()
    flash_attn_ext.uninstall_sdpa()
    assert importer.attend is theirs


def test_what_the_public_name_stood_for_comes_back(monkeypatch, device):
    """Somebody else's wrapper too."""

    def wrapper(*args, **kwargs):
        return KEPT[0](*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper)
    flash_attn_ext.install_sdpa()
    try:
        assert ran_on_ours(F.scaled_dot_product_attention(*qkv(device)))
    finally:
        flash_attn_ext.uninstall_sdpa()
    assert F.scaled_dot_product_attention is wrapper


def test_somebody_puts_the_replacement_back_later():
    """As libraries do that patch the function for a while."""
    flash_attn_ext.install_sdpa()
    found = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = KEPT[0]
    flash_attn_ext.uninstall_sdpa()
    F.scaled_dot_product_attention = found
    flash_attn_ext.install_sdpa()
    flash_attn_ext.uninstall_sdpa()
    assert F.scaled_dot_product_attention is KEPT[0]


FIRST_COMPILED_WHILE_INSTALLED = """
import torch
import torch.nn.functional as F
import flash_attn_ext

class Negative(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        return -out if function is PYTORCHS else out

def attend(x):
    return F.scaled_dot_product_attention(x, x, x)

PYTORCHS = F.scaled_dot_product_attention
x = torch.randn(1, 2, 5, 8)
flash_attn_ext.install_sdpa()
torch.compile(attend, backend="aot_eager")(x)
flash_attn_ext.uninstall_sdpa()
torch._dynamo.reset()
with Negative():
    out = torch.compile(attend, backend="aot_eager")(x)
torch.testing.assert_close(out, -PYTORCHS(x, x, x))
"""


def test_modes_of_others_see_pytorchs_function_afterwards():
    """In a process of its own: PyTorch and Dynamo remember which functions may be overridden when they first ask."""
    process = run_forked(FIRST_COMPILED_WHILE_INSTALLED)
    assert process.returncode == 0, process.stderr


def test_no_mode_is_entered(installed):
    assert overrides._get_current_function_mode_stack() == []


def test_other_threads(installed, device):
    outs = []
    thread = threading.Thread(target=lambda: outs.append(F.scaled_dot_product_attention(*qkv(device))))
    thread.start()
    thread.join()
    assert ran_on_ours(outs[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, installed, device):
    """What the backward pass computes again is ours, too, on whatever thread it runs."""
    outs = []

    def attend(*tensors):
        outs.append(F.scaled_dot_product_attention(*tensors))
        return outs[-1]

    with set_checkpoint_early_stop(False):  # which would end the second call before it returns
        checkpoint(attend, *qkv(device), use_reentrant=use_reentrant).sum().backward()
    assert len(outs) == 2 and ran_on_ours(outs[1])


@pytest.mark.parametrize("training", [True, False])
def test_modules_of_pytorch(training, installed, device):
    """Whose fused inference path would call no name."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=device).train(training)
    x = torch.randn(2, 33, 32, device=device)
    calls = []
    attention = installation.attention
    installation.attention = lambda *a, **k: calls.append(1) or attention(*a, **k)
    with torch.set_grad_enabled(training):
        out = layer(x)
    flash_attn_ext.uninstall_sdpa()
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(out, layer(x))
    assert calls == [1]


@pytest.mark.usefixtures("every_reason_is_new")
def test_twice_changes_the_fallback(installed, device):
    flash_attn_ext.install_sdpa(fallback="torch")
    q, k, v = (t.to(torch.int32) for t in qkv(device))
    with pytest.warns(UserWarning, match="flash_attn_ext"), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, v)


def test_an_unknown_fallback_installs_nothing():
    with pytest.raises(ValueError, match="'raise' or 'torch'"):
        flash_attn_ext.install_sdpa(fallback="other")
    assert F.scaled_dot_product_attention is KEPT[0]


def test_a_block_inside_decides_for_itself(installed, device):
    q = torch.nested.nested_tensor([torch.randn(3, 4, 8, device=device)])
    with pytest.raises(TypeError, match="nested"):
        F.scaled_dot_product_attention(q, q, q)
    with flash_attn_ext.replace_sdpa(fallback="torch"):
        assert ran_on_ours(F.scaled_dot_product_attention(*qkv(device)))


@pytest.mark.usefixtures("fresh_compiler")
def test_under_compile(installed, device):
    graphs: list[str] = []

    def recording_backend(graph_module, example_inputs):
        graphs.append(graph_module.print_readable(print_output=False))
        return graph_module.forward

    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2,
        fullgraph=True,
        backend=recording_backend,
    )
    tensors = [t.detach() for t in qkv(device)]
    torch.testing.assert_close(compiled(*tensors), KEPT[0](*tensors, is_causal=True) * 2)
    assert any("flash_attn_ext" in graph for graph in graphs)
