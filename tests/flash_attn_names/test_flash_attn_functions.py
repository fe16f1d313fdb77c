"""flash_attn's functions: values and gradients of each, and what each argument does, by the reference in float64."""

import inspect

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.integrations import flash_attn
from flash_attn_ext.reference import attention_reference, attention_varlen_reference
from support.params import over_dtypes

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, HEAD_DIM = 2, 37, 53, 4, 2, 16
CU_SEQLENS_Q, CU_SEQLENS_K = (0, 5, 5, 37), (0, 21, 30, 53)  # the second sequence has no queries

OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic")
DEFAULTS = (0.0, None, False, (-1, -1), 0.0, None, False)
PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
TENSORS_OF = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_varlen_func": ("q", "k", "v", *PACKING),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", *PACKING),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen"),
}

# flash_attn's spelling, and ours.
ARGUMENTS = {
    "none": ({}, {}),
    "softmax_scale": (dict(softmax_scale=0.7), dict(scale=0.7)),
    "causal": (dict(causal=True), dict(causal="bottom_right")),
    "window": (dict(window_size=(3, 2)), dict(window=(3, 2))),
    "left": (dict(window_size=(3, -1)), dict(window=(3, None))),
    "right": (dict(window_size=[-1, 0]), dict(window=(None, 0))),
    "None_in_a_window": (dict(window_size=(None, 4)), dict(window=(None, 4))),
    "causal_window": (dict(causal=True, window_size=(4, 9)), dict(causal="bottom_right", window=(4, 0))),
    "softcap": (dict(softcap=0.8), dict(softcap=0.8)),
    "no_softcap": (dict(softcap=None), {}),
    "alibi": (dict(alibi_slopes="heads"), dict(alibi_slopes="heads")),
    "alibi_of_each_batch_entry": (dict(alibi_slopes="batch"), dict(alibi_slopes="batch")),
    "deterministic": (dict(deterministic=True), {}),
    "all": (
        dict(softmax_scale=0.5, causal=True, window_size=(9, 0), softcap=2.0, alibi_slopes="heads"),
        dict(scale=0.5, causal="bottom_right", window=(9, 0), softcap=2.0, alibi_slopes="heads"),
    ),
}


def filled(options: dict, batch: int, device: str, dtype: torch.dtype = torch.float32) -> dict:
    """The slopes that a word in `options` stands for."""
    shape = {"heads": (HEADS,), "batch": (batch, HEADS)}.get(options.get("alibi_slopes"))
    if shape is None:
        return options
    slopes = torch.linspace(0.1, 0.9, BATCH * 6 * HEADS)[: torch.Size(shape).numel()].reshape(shape)
    return options | dict(alibi_slopes=slopes.to(device, dtype))


def random_tensors(*shapes: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def dense(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    keys = (BATCH, KEYS, KEY_HEADS, HEAD_DIM)
    return random_tensors((BATCH, QUERIES, HEADS, HEAD_DIM), keys, keys, device=device, dtype=dtype)


def packed(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    keys = (CU_SEQLENS_K[-1], KEY_HEADS, HEAD_DIM)
    return random_tensors((CU_SEQLENS_Q[-1], HEADS, HEAD_DIM), keys, keys, device=device, dtype=dtype)


def packing(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (CU_SEQLENS_Q, CU_SEQLENS_K))
    return cu_q, cu_k


def in_float64(tensors) -> list[torch.Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def with_gradients(out: torch.Tensor, tensors) -> list[torch.Tensor]:
    """out, and the gradients that a fixed dout gives."""
    dout = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def assert_close(results, expected, dtype: torch.dtype = torch.float32) -> None:
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for result, exact in zip(results, expected, strict=True):
        result, exact = result.detach(), exact.detach()
        assert result.dtype == dtype
        atol = tolerance * max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(result.double(), exact.double(), atol=atol, rtol=tolerance)


@pytest.mark.parametrize("name", TENSORS_OF)
def test_arguments_order_and_defaults(name):
    last = [("block_table", None)] if name == "flash_attn_varlen_func" else []
    expected = [
        *((tensor, inspect.Parameter.empty) for tensor in TENSORS_OF[name]),
        *zip(OPTIONS, DEFAULTS, strict=True),
        ("return_attn_probs", False),
        *last,
    ]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == expected
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)


def test_everything_is_documented():
    for name in flash_attn.__all__:
        assert inspect.getdoc(getattr(flash_attn, name)), name


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_dense(argument, device):
    theirs, ours = ARGUMENTS[argument]
    q, k, v = tensors = dense(device)
    exact_inputs = in_float64(tensors)
    exact, exact_lse = attention_reference(*exact_inputs, **filled(ours, BATCH, device, torch.float64), layout="bshd")
    options = filled(theirs, BATCH, device)
    out = flash_attn.flash_attn_func(q, k, v, **options)
    expected = with_gradients(exact, exact_inputs)
    assert_close(with_gradients(out, tensors), expected)

    again, lse, s_dmask = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert torch.equal(again, out)
    assert s_dmask is None
    assert_close([lse], [exact_lse])

    kv = torch.stack([k, v], dim=2).detach().requires_grad_()
    out, dq, dkv = with_gradients(flash_attn.flash_attn_kvpacked_func(q, kv, **options), [q, kv])
    assert_close([out, dq, *dkv.unbind(2)], expected)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_dense_in_one_tensor(argument, device):
    theirs, ours = ARGUMENTS[argument]
    (qkv,) = random_tensors((BATCH, KEYS, 3, HEADS, HEAD_DIM), device=device)
    (exact_qkv,) = in_float64([qkv])
    exact = attention_reference(
        *exact_qkv.unbind(2), **filled(ours, BATCH, device, torch.float64), layout="bshd", return_lse=False
    )
    out = flash_attn.flash_attn_qkvpacked_func(qkv, **filled(theirs, BATCH, device))
    assert out.is_contiguous()
    assert_close(with_gradients(out, [qkv]), with_gradients(exact, [exact_qkv]))


@pytest.mark.parametrize("bounds", [(32, 23), (None, None), (64, 24)], ids=str)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_packed(argument, bounds, device):
    theirs, ours = ARGUMENTS[argument]
    q, k, v = tensors = packed(device)
    cu_seqlens = packing(device)
    exact_inputs = in_float64(tensors)
    exact, exact_lse = attention_varlen_reference(*exact_inputs, *cu_seqlens, **filled(ours, 3, device, torch.float64))
    options = filled(theirs, 3, device)
    out = flash_attn.flash_attn_varlen_func(q, k, v, *cu_seqlens, *bounds, **options)
    expected = with_gradients(exact, exact_inputs)
    assert_close(with_gradients(out, tensors), expected)

    again, lse, s_dmask = flash_attn.flash_attn_varlen_func(
        q, k, v, *cu_seqlens, *bounds, **options, return_attn_probs=True
    )
    assert torch.equal(again, out)
    assert s_dmask is None
    assert_close([lse], [exact_lse])

    kv = torch.stack([k, v], dim=1).detach().requires_grad_()
    out = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *cu_seqlens, *bounds, **options)
    out, dq, dkv = with_gradients(out, [q, kv])
    assert_close([out, dq, *dkv.unbind(1)], expected)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_packed_in_one_tensor(argument, device):
    theirs, ours = ARGUMENTS[argument]
    (qkv,) = random_tensors((CU_SEQLENS_K[-1], 3, HEADS, HEAD_DIM), device=device)
    (exact_qkv,) = in_float64([qkv])
    cu_seqlens = packing(device)[1]
    exact, _ = attention_varlen_reference(
        *exact_qkv.unbind(1), cu_seqlens, cu_seqlens, **filled(ours, 3, device, torch.float64)
    )
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 23, **filled(theirs, 3, device))
    assert_close(with_gradients(out, [qkv]), with_gradients(exact, [exact_qkv]))


@over_dtypes()
def test_dtypes(dtype, device):
    tensors = dense(device, dtype)
    exact_inputs = in_float64(tensors)
    exact = attention_reference(*exact_inputs, causal="bottom_right", layout="bshd", return_lse=False)
    out = flash_attn.flash_attn_func(*tensors, causal=True)
    assert_close(with_gradients(out, tensors), with_gradients(exact, exact_inputs), dtype)


def test_head_dim_of_v_may_differ(device):
    q, k, _ = dense(device)
    (v,) = random_tensors((BATCH, KEYS, KEY_HEADS, 2 * HEAD_DIM), device=device)
    expected = flash_attn_ext.attention(q, k, v, layout="bshd")
    assert torch.equal(flash_attn.flash_attn_func(q, k, v), expected)


def test_positions(device):
    """Every option by position, as older code passes them."""
    q, k, v = dense(device)
    slopes = torch.full((HEADS,), 0.25, device=device)
    options = (0.0, 0.5, True, (7, 0), 3.0, slopes, True)
    by_name = dict(zip(OPTIONS, options, strict=True))
    expected = flash_attn.flash_attn_func(q, k, v, **by_name)
    for function in (flash_attn.flash_attn_func, flash_attn.flash_attn_kvpacked_func):
        tensors = (q, k, v) if function is flash_attn.flash_attn_func else (q, torch.stack([k, v], dim=2))
        assert torch.equal(function(*tensors, *options), expected)


def test_causal_is_bottom_right(device):
    q, k, v = dense(device)
    more_queries = flash_attn.flash_attn_func(k, q[:, :, :2], q[:, :, :2], causal=True)
    assert bool((more_queries[:, : KEYS - QUERIES] == 0).all())  # the first ones see nothing
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert bool(lse.isfinite().all())
    assert torch.equal(out, flash_attn_ext.attention(q, k, v, causal="bottom_right", layout="bshd"))


def test_slices_of_a_cache(device):
    """Bottom-right causality lines up the last query with the last key, step by step as in one call."""
    q, k, v = (t.detach() for t in dense(device))
    k, v = k[:, :QUERIES], v[:, :QUERIES]
    k_cache, v_cache = torch.full((2, BATCH, 64, KEY_HEADS, HEAD_DIM), torch.nan, device=device)
    steps, length = [], 0
    for new in (30, 1, 1, 5):
        now = slice(length, length + new)
        k_cache[:, now], v_cache[:, now] = k[:, now], v[:, now]
        length += new
        steps.append(flash_attn.flash_attn_func(q[:, now], k_cache[:, :length], v_cache[:, :length], causal=True))
    torch.testing.assert_close(torch.cat(steps, dim=1), flash_attn.flash_attn_func(q, k, v, causal=True))


def test_gradients_of_lse_and_slopes(device):
    """flash_attn gives neither."""
    tensors = [*dense(device), torch.full((HEADS,), 0.25, device=device, requires_grad=True)]
    exact_inputs = in_float64(tensors)
    q, k, v, slopes = tensors
    _, lse, _ = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)
    q, k, v, slopes = exact_inputs
    _, exact = attention_reference(q, k, v, alibi_slopes=slopes, layout="bshd")
    del tensors[2], exact_inputs[2]
    assert_close(with_gradients(lse, tensors), with_gradients(exact, exact_inputs))


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_repeat_bitwise_with_either_value(deterministic, device):
    tensors = dense(device)
    first, second = (
        with_gradients(flash_attn.flash_attn_func(*tensors, deterministic=deterministic), tensors) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiles(fullgraph):
    q, k, v = dense("cpu")
    compiled = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=fullgraph)
    out, lse, _ = compiled(q, k, v, causal=True, window_size=(5, -1), return_attn_probs=True)
    expected, expected_lse, _ = flash_attn.flash_attn_func(
        q, k, v, causal=True, window_size=(5, -1), return_attn_probs=True
    )
    assert_close([out, lse], [expected, expected_lse])
