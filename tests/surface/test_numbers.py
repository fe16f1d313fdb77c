"""Numbers may come as Python's, NumPy's, or one-element tensors: the same result for each."""

import numpy as np
import pytest
import torch

import flash_attn_ext

INTEGERS = [int, np.int64, np.int32, np.uint8, torch.tensor, lambda n: torch.tensor([n], dtype=torch.int32)]
FLOATS = [float, np.float32, np.float64, torch.tensor, lambda x: torch.tensor([x], dtype=torch.float64)]


def qkv(device: str, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device) for _ in range(3)]


@pytest.mark.parametrize("make", INTEGERS)
def test_window(make, device):
    tensors = qkv(device, 2, 3, 9, 8)
    expected = flash_attn_ext.attention(*tensors, window=(2, 1))
    assert torch.equal(flash_attn_ext.attention(*tensors, window=(make(2), make(1))), expected)
    assert torch.equal(flash_attn_ext.attention(*tensors, window=make(2)), flash_attn_ext.attention(*tensors, window=2))


@pytest.mark.parametrize("make", INTEGERS)
def test_max_seqlen(make, device):
    tensors = qkv(device, 9, 3, 8)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    expected = flash_attn_ext.attention_varlen(*tensors, cu, cu, max_seqlen_q=5, max_seqlen_k=6)
    ours = flash_attn_ext.attention_varlen(*tensors, cu, cu, max_seqlen_q=make(5), max_seqlen_k=make(6))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("make", FLOATS)
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_floats(name, make, device):
    tensors = qkv(device, 2, 3, 9, 8)
    expected = flash_attn_ext.attention(*tensors, **{name: 0.5})
    assert torch.equal(flash_attn_ext.attention(*tensors, **{name: make(0.5)}), expected)


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(1j)], ids=str)
@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_no_numbers(name, value, device):
    with pytest.raises(TypeError, match=f"{name} must be a number, got a tensor of dtype {value.dtype}"):
        flash_attn_ext.attention(*qkv(device, 2, 3, 9, 8), **{name: value})


class Index:
    """Neither an int nor registered as one: Python takes it for an index all the same."""

    def __init__(self, value: int):
        self.value = value

    def __index__(self) -> int:
        return self.value


PAIRS = [list, np.array, torch.tensor, lambda pair: np.array(pair, dtype=np.int32), lambda pair: (*map(Index, pair),)]


@pytest.mark.parametrize("make", PAIRS)
def test_window_of_any_two_integers(make, device):
    tensors = qkv(device, 2, 3, 9, 8)
    expected = flash_attn_ext.attention(*tensors, window=(2, 1))
    window = make((2, 1))
    window = window.to(device) if isinstance(window, torch.Tensor) else window
    assert torch.equal(flash_attn_ext.attention(*tensors, window=window), expected)
    assert str(flash_attn_ext.explain(*tensors, window=window)) == str(flash_attn_ext.explain(*tensors, window=(2, 1)))


@pytest.mark.parametrize("window", [torch.tensor([2.0, 1.0]), np.array([2.5, 1]), torch.tensor([[2, 1]])], ids=str)
def test_no_two_integers(window, device):
    with pytest.raises((TypeError, ValueError), match="window"):
        flash_attn_ext.attention(*qkv(device, 2, 3, 9, 8), window=window)


def cache_call(tensors, **flags):
    q, k, v = tensors
    angles = torch.ones(16, 4, dtype=q.dtype, device=q.device)
    rotation = dict(k_new=k[:, :, :1], v_new=v[:, :, :1], rotary_cos=angles, rotary_sin=angles)
    return flash_attn_ext.attention_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=5, **rotation, **flags)


def varlen_call(tensors, **flags):
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=tensors[0].device)
    return flash_attn_ext.attention_varlen(*(t[0].transpose(0, 1) for t in tensors), cu, cu, **flags)


FLAGS = {
    "sdpa is_causal": (lambda t, **flags: flash_attn_ext.scaled_dot_product_attention(*t, **flags), "is_causal"),
    "sdpa enable_gqa": (lambda t, **flags: flash_attn_ext.scaled_dot_product_attention(*t, **flags), "enable_gqa"),
    "return_lse": (lambda t, **flags: flash_attn_ext.attention(*t, **flags), "return_lse"),
    "allow_tf32": (lambda t, **flags: flash_attn_ext.attention(*t, **flags), "allow_tf32"),
    "varlen return_lse": (varlen_call, "return_lse"),
    "varlen allow_tf32": (varlen_call, "allow_tf32"),
    "cache return_lse": (cache_call, "return_lse"),
    "cache rotary_interleaved": (cache_call, "rotary_interleaved"),
    "explain return_lse": (lambda t, **flags: str(flash_attn_ext.explain(*t, **flags)), "return_lse"),
    "explain allow_tf32": (lambda t, **flags: str(flash_attn_ext.explain(*t, **flags)), "allow_tf32"),
}


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("of", FLAGS)
def test_flags(of, value, device):
    """NumPy's bool is taken as Python's; PyTorch refuses it. A comparison of NumPy numbers gives one."""
    call, name = FLAGS[of]
    tensors = qkv(device, 2, 3, 9, 8)
    expected, got = (call(tensors, **{name: flag}) for flag in (value, np.bool_(value)))
    assert type(got) is type(expected)
    if isinstance(expected, str):
        assert got == expected
    else:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("value", [1, None, "yes", np.int64(1), torch.tensor(True), np.array([True, False])], ids=repr)
@pytest.mark.parametrize("of", FLAGS)
def test_no_flags(of, value, device):
    call, name = FLAGS[of]
    with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
        call(qkv(device, 2, 3, 9, 8), **{name: value})


def test_pytorch_refuses_a_numpy_flag(device):
    with pytest.raises(TypeError, match="must be bool"):
        torch.nn.functional.scaled_dot_product_attention(*qkv(device, 2, 3, 9, 8), is_causal=np.bool_(True))


@pytest.mark.usefixtures("fresh_compiler")
def test_numpy_flags_and_windows_under_compile(device):
    """In a loop with a graph break, where Dynamo gives the frame up."""
    tensors = qkv(device, 2, 3, 9, 8)
    window, flag = np.array([2, 1]), np.bool_(True)

    def model(q, k, v):
        for _ in range(2):
            q = flash_attn_ext.attention(q, k, v, window=window)
            torch._dynamo.graph_break()
            q = flash_attn_ext.scaled_dot_product_attention(q, k, v, is_causal=flag)
        return q

    torch.testing.assert_close(torch.compile(model, backend="eager")(*tensors), model(*tensors))
