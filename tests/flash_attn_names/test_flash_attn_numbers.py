"""Numbers and flags as flash_attn's callers pass them: NumPy's, tensors, lists. The same result for each."""

import numpy as np
import pytest
import torch

from flash_attn_ext.integrations import flash_attn

TOKENS, HEADS, HEAD_DIM = 9, 4, 16
PACKED = "varlen"
NAMES = [name for name in flash_attn.__all__ if name.startswith("flash_attn_")]


def caller(device: str):
    """call(name, **options): that function with tensors of its own. The packed ones hold two sequences."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    cu = torch.tensor([0, 3, TOKENS], dtype=torch.int32, device=device)
    dense, total = (2, TOKENS), (TOKENS,)
    tensors = {
        "flash_attn_func": [normal(*dense, HEADS, HEAD_DIM) for _ in range(3)],
        "flash_attn_kvpacked_func": [normal(*dense, HEADS, HEAD_DIM), normal(*dense, 2, HEADS, HEAD_DIM)],
        "flash_attn_qkvpacked_func": [normal(*dense, 3, HEADS, HEAD_DIM)],
        "flash_attn_varlen_func": [*(normal(*total, HEADS, HEAD_DIM) for _ in range(3)), cu, cu],
        "flash_attn_varlen_kvpacked_func": [
            normal(*total, HEADS, HEAD_DIM),
            normal(*total, 2, HEADS, HEAD_DIM),
            cu,
            cu,
        ],
        "flash_attn_varlen_qkvpacked_func": [normal(*total, 3, HEADS, HEAD_DIM), cu],
        "flash_attn_with_kvcache": [normal(*dense, HEADS, HEAD_DIM) for _ in range(3)],
    }

    def call(name: str, **options) -> torch.Tensor:
        if PACKED in name:
            longest = options.pop("longest", 6)
            of_both = ("max_seqlen",) if "qkv" in name else ("max_seqlen_q", "max_seqlen_k")
            options |= dict.fromkeys(of_both, longest)
        return getattr(flash_attn, name)(*tensors[name], **options)

    return call


WINDOWS = {
    "list": [2, 1],
    "list of NumPy": [np.int64(2), np.int32(1)],
    "tuple of tensors": (torch.tensor(2), torch.tensor(1)),
    "tensor": torch.tensor([2, 1]),
    "int32 tensor": torch.tensor([2, 1], dtype=torch.int32),
    "array": np.array([2, 1]),
    "int32 array": np.array([2, 1], dtype=np.int32),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", NAMES)
def test_any_two_integers_are_a_window(name, window, device):
    call = caller(device)
    expected = call(name, window_size=(2, 1))
    assert not torch.equal(expected, call(name))
    assert torch.equal(call(name, window_size=WINDOWS[window]), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_drawn_window(name, device):
    """As flash-attention's own tests draw one, on any device."""
    for where in dict.fromkeys(("cpu", device)):
        window = torch.randint(0, TOKENS, (2,), generator=torch.Generator().manual_seed(1)).to(where)
        call = caller(device)
        assert torch.equal(call(name, window_size=window), call(name, window_size=tuple(window.tolist())))


@pytest.mark.parametrize("make", [np.array, torch.tensor, list], ids=["array", "tensor", "list"])
@pytest.mark.parametrize("pair", [(-1, -1), (3, -1), (-1, 0)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_unbounded_sides(name, pair, make, device):
    call = caller(device)
    assert torch.equal(call(name, window_size=make(pair)), call(name, window_size=pair))


# Name, the plain value, and what means the same.
VALUES = [
    ("softmax_scale", 0.5, [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor([0.5])]),
    ("softcap", 2.0, [2, np.float32(2.0), np.int64(2), torch.tensor(2.0)]),
    ("softcap", 0.0, [0, None, np.float32(0.0), torch.tensor(0.0)]),
    ("causal", True, [np.bool_(True), np.int64(3) > 2]),
    ("causal", False, [np.bool_(False)]),
]
EXCEPT_CACHES = [
    ("dropout_p", 0.0, [0, np.float32(0.0), np.float64(0.0), torch.tensor(0.0)]),
    ("deterministic", True, [np.bool_(True)]),
]
OF_CACHES = [
    ("num_splits", 0, [np.int64(3), torch.tensor(1)]),
    ("rotary_interleaved", True, [np.bool_(True), np.bool_(False)]),
    ("cache_seqlens", 7, [np.int64(7)]),
]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_flags(name, device):
    call = caller(device)
    for option, plain, others in VALUES + (OF_CACHES if "cache" in name else EXCEPT_CACHES):
        expected = call(name, **{option: plain})
        for other in others:
            assert torch.equal(call(name, **{option: other}), expected), (option, other)


@pytest.mark.parametrize("name", [name for name in NAMES if PACKED in name])
def test_bounds_of_lengths(name, device):
    call = caller(device)
    expected = call(name)
    for longest in (np.int64(6), np.int32(6), torch.tensor(6), torch.tensor([6], dtype=torch.int32), None):
        assert torch.equal(call(name, longest=longest), expected)


@pytest.mark.parametrize("name", NAMES)
def test_results_besides(name, device):
    option = "return_softmax_lse" if "cache" in name else "return_attn_probs"
    results = caller(device)(name, **{option: np.bool_(True)})
    assert isinstance(results, tuple) and not isinstance(caller(device)(name, **{option: np.bool_(False)}), tuple)


def test_padding_takes_numpys_sizes(device):
    x = torch.randn(2, 5, 3, device=device)
    is_token = torch.arange(5, device=device) < torch.tensor([[5], [2]], device=device)
    tokens, indices, *_ = flash_attn.bert_padding.unpad_input(x, is_token)
    expected = flash_attn.bert_padding.pad_input(tokens, indices, 2, 5)
    for make in (np.int64, torch.tensor):
        assert torch.equal(flash_attn.bert_padding.pad_input(tokens, indices, make(2), make(5)), expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_window_in_a_tensor_under_compile(device):
    call = caller(device)
    window = torch.tensor([2, 1])
    compiled = torch.compile(lambda w: call("flash_attn_func", window_size=w), backend="eager")
    torch.testing.assert_close(compiled(window), call("flash_attn_func", window_size=(2, 1)))
    torch.testing.assert_close(compiled(window + 1), call("flash_attn_func", window_size=(3, 2)))
