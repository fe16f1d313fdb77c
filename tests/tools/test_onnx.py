"""torch.onnx.export refuses this library's operators, and takes what docs/tools.md says to export instead."""

import pytest
import torch
import torch.nn.functional as F

import flash_attn_ext
from flash_attn_ext.integrations import torch_backend
from flash_attn_ext.reference import attention_reference

pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install onnxscript")


class Model(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, q, k, v):
        return self.attention(q, k, v)


def pytorchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def windowed(attention):
    return lambda q, k, v: attention(q, k, v, causal="top_left", window=(2, 0))


def operators_of(attention) -> set[str]:
    """In the exported graph."""
    tensors = tuple(torch.randn(1, 2, 5, 8) for _ in range(3))
    program = torch.onnx.export(Model(attention).eval(), tensors, dynamo=True, verbose=False)
    return {node.op_type for node in program.model.graph}


@pytest.fixture(params=["replace_sdpa", "install_sdpa"])
def replaced(request):
    if request.param == "replace_sdpa":
        with flash_attn_ext.replace_sdpa():
            yield
    else:
        flash_attn_ext.install_sdpa()
        yield
        flash_attn_ext.uninstall_sdpa()


def assert_refused(attention) -> None:
    with pytest.raises(torch.onnx.OnnxExporterError) as error:
        operators_of(attention)
    assert "No ONNX function found for" in str(error.value)
    assert "flash_attn_ext.attention_forward" in str(error.value)


@pytest.mark.usefixtures("replaced")
def test_a_replaced_call_is_refused():
    assert_refused(pytorchs)


def test_a_call_of_ours_is_refused():
    assert_refused(windowed(flash_attn_ext.attention))


def test_pytorchs_attention_is_exported():
    assert {"MatMul", "Softmax"} <= operators_of(pytorchs)


def test_pytorchs_switch_may_stay_on():
    torch_backend.register()
    torch.nn.attention.activate_flash_attention_impl(torch_backend.NAME)
    try:
        assert {"MatMul", "Softmax"} <= operators_of(pytorchs)
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def test_the_reference_is_exported():
    attention = windowed(attention_reference)
    assert "MatMul" in operators_of(lambda q, k, v: attention(q, k, v)[0])
