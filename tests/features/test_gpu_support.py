"""What a GPU backend must run, so that a refusal elsewhere in the suite, which is a skip there, cannot hide a loss."""

import pytest
import torch

import flash_attn_ext

HEAD_DIMS = (1, 8, 40, 64, 96, 128, 160, 192, 256)
FEATURES = (
    dict(),
    dict(causal="top_left"),
    dict(causal="bottom_right", window=(64, 0)),
    dict(softcap=30.0),
    dict(dropout_p=0.1),
    dict(scale=-1.0),
)


def qkv(dtype, head_dim):
    return [torch.zeros(1, 2, 3, head_dim, dtype=dtype, device="cuda") for _ in range(3)]


@pytest.mark.parametrize("options", FEATURES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_types(dtype, head_dim, options, backend):
    if backend.is_cpu:
        pytest.skip("about GPU backends")
    explanation = flash_attn_ext.explain(*qkv(dtype, head_dim), **options, backend=backend.name)
    assert explanation.backend == backend.name, str(explanation)


def test_refusals_name_the_reason(backend):
    if backend.name != "sm80":
        pytest.skip("about the portable GPU backend")
    reasons = flash_attn_ext.explain(*qkv(torch.float32, 64)).reasons["sm80"]
    assert any("float16" in reason for reason in reasons)
    reasons = flash_attn_ext.explain(*qkv(torch.float16, 257)).reasons["sm80"]
    assert any("256" in reason for reason in reasons)
