"""What flash_attn's functions refuse: each message names the argument, what it got and what to do."""

import pytest
import torch

from flash_attn_ext.integrations import flash_attn

CU_SEQLENS = torch.tensor([0, 3, 8], dtype=torch.int32)
PACKING = (CU_SEQLENS, CU_SEQLENS, 5, 5)

WRONG_OPTIONS = {
    "causal": (dict(causal="bottom_right"), TypeError, "causal must be True or False, got 'bottom_right'"),
    "deterministic": (dict(deterministic=1), TypeError, "deterministic must be True or False"),
    "return_attn_probs": (dict(return_attn_probs=None), TypeError, "return_attn_probs must be True or False"),
    "window_of_one": (dict(window_size=5), ValueError, r"window_size must be \(left, right\)"),
    "window_of_three": (dict(window_size=(1, 2, 3)), ValueError, r"window_size must be \(left, right\)"),
    "window_of_floats": (dict(window_size=(1.5, 0)), TypeError, "window_size must be an int or None, got 1.5"),
    "negative_window": (dict(window_size=(-2, 0)), ValueError, r"window_size must be .* got \(-2, 0\)"),
    "negative_softcap": (dict(softcap=-1.0), ValueError, "softcap is -1, expected"),
    "softcap": (dict(softcap="1"), TypeError, "softcap must be a number"),
    "softmax_scale": (dict(softmax_scale="1"), TypeError, "softmax_scale must be a number"),
    "infinite_scale": (dict(softmax_scale=float("inf")), ValueError, "scale is inf, expected"),
    "dropout_p": (dict(dropout_p=1.5), ValueError, "dropout_p is 1.5, expected"),
    "no_dropout_p": (dict(dropout_p=None), TypeError, "dropout_p must be a number, got NoneType"),
    "alibi_shape": (dict(alibi_slopes=torch.ones(3)), RuntimeError, "alibi_slopes"),
    "alibi_dtype": (dict(alibi_slopes=torch.ones(4, dtype=torch.bfloat16)), RuntimeError, "alibi_slopes"),
    "alibi_type": (dict(alibi_slopes=[1.0] * 4), TypeError, "alibi_slopes must be a torch.Tensor, got list"),
}


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


CALLS = {
    "func": lambda **o: flash_attn.flash_attn_func(*[tokens(2, 8, 4, 8)] * 3, **o),
    "kvpacked": lambda **o: flash_attn.flash_attn_kvpacked_func(tokens(2, 8, 4, 8), tokens(2, 8, 2, 4, 8), **o),
    "qkvpacked": lambda **o: flash_attn.flash_attn_qkvpacked_func(tokens(2, 8, 3, 4, 8), **o),
    "varlen": lambda **o: flash_attn.flash_attn_varlen_func(*[tokens(8, 4, 8)] * 3, *PACKING, **o),
    "varlen_kvpacked": lambda **o: flash_attn.flash_attn_varlen_kvpacked_func(
        tokens(8, 4, 8), tokens(8, 2, 4, 8), *PACKING, **o
    ),
    "varlen_qkvpacked": lambda **o: flash_attn.flash_attn_varlen_qkvpacked_func(tokens(8, 3, 4, 8), CU_SEQLENS, 5, **o),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_options(option, call):
    options, error, message = WRONG_OPTIONS[option]
    with pytest.raises(error, match=message):
        CALLS[call](**options)


WRONG_TENSORS = {
    "packed_where_dense": (
        "func",
        [(8, 4, 8)] * 3,
        r"q must be \(batch, seqlen, heads, headdim\), got shape \(8, 4, 8\)",
    ),
    "five_dimensions": ("func", [(1, 2, 8, 4, 8)] * 3, r"q must be \(batch, seqlen, heads, headdim\)"),
    "heads": ("func", [(2, 8, 4, 8), (2, 8, 3, 8), (2, 8, 3, 8)], "heads"),
    "head_dim": ("func", [(2, 8, 4, 8), (2, 8, 4, 9), (2, 8, 4, 8)], "head dim"),
    "v_is_shorter": ("func", [(2, 8, 4, 8), (2, 8, 4, 8), (2, 7, 4, 8)], "v"),
    "batch": ("func", [(2, 8, 4, 8), (3, 8, 4, 8), (3, 8, 4, 8)], "batch"),
    "batch_of_one": ("func", [(1, 8, 4, 8), (2, 8, 4, 8), (2, 8, 4, 8)], "batches of 1, 2 and 2, expected the same"),
    "kv_of_three": ("kvpacked", [(2, 8, 4, 8), (2, 8, 3, 4, 8)], r"kv must be \(batch, seqlen, 2, heads, headdim\)"),
    "kv_unpacked": ("kvpacked", [(2, 8, 4, 8), (2, 8, 4, 8)], r"kv must be \(batch, seqlen, 2, heads, headdim\)"),
    "qkv_of_two": ("qkvpacked", [(2, 8, 2, 4, 8)], r"qkv must be \(batch, seqlen, 3, heads, headdim\)"),
    "qkv_of_tokens": ("qkvpacked", [(8, 3, 4, 8)], r"qkv must be \(batch, seqlen, 3, heads, headdim\)"),
    "dense_where_packed": ("varlen", [(2, 8, 4, 8)] * 3, r"q must be \(total, heads, headdim\)"),
    "packed_kv": ("varlen_kvpacked", [(8, 4, 8), (8, 3, 4, 8)], r"kv must be \(total, 2, heads, headdim\)"),
    "packed_qkv": ("varlen_qkvpacked", [(2, 8, 3, 4, 8)], r"qkv must be \(total, 3, heads, headdim\)"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_shapes(case):
    name, shapes, message = WRONG_TENSORS[case]
    packing = {"varlen_qkvpacked": (CU_SEQLENS, 5)}.get(name, PACKING if name.startswith("varlen") else ())
    suffix = "_func" if name != "func" else ""
    with pytest.raises(RuntimeError, match=message):
        getattr(flash_attn, f"flash_attn_{name}{suffix}")(*(tokens(*shape) for shape in shapes), *packing)


def test_dtypes():
    q, k = tokens(2, 8, 4, 8), tokens(2, 8, 4, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        flash_attn.flash_attn_func(q, k, k)
    with pytest.raises(RuntimeError, match="q has dtype int64, expected float32"):
        flash_attn.flash_attn_func(*[torch.ones(2, 8, 4, 8, dtype=torch.int64)] * 3)


def test_types():
    q = tokens(2, 8, 4, 8)
    with pytest.raises(TypeError, match=r"k must be a torch.Tensor, got list"):
        flash_attn.flash_attn_func(q, [1], q)
    with pytest.raises(TypeError, match=r"qkv must be a torch.Tensor, got NoneType"):
        flash_attn.flash_attn_qkvpacked_func(None)
    with pytest.raises(TypeError, match="nested"):
        flash_attn.flash_attn_func(torch.nested.nested_tensor([tokens(8, 4, 8)]), q, q)


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "error", "message"),
    [
        (CU_SEQLENS.long(), 5, RuntimeError, "cu_seqlens_q"),
        (CU_SEQLENS + 1, 5, RuntimeError, "cu_seqlens_q"),
        (CU_SEQLENS, 3, ValueError, "max_seqlen_q is 3"),
        (CU_SEQLENS, 5.0, TypeError, "max_seqlen_q must be an int or None"),
    ],
)
def test_packing(cu_seqlens, max_seqlen, error, message):
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_varlen_qkvpacked_func(tokens(8, 3, 4, 8), cu_seqlens, max_seqlen)


def test_block_table():
    with pytest.raises(
        NotImplementedError, match=r"block_table must be None.*call flash_attn_with_kvcache.*gather the pages"
    ):
        CALLS["varlen"](block_table=torch.zeros(2, 1, dtype=torch.int32))
