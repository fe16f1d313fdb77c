"""A typed user's program, which test_types.py gives to mypy and nothing runs.

A line with ``type: ignore[code]`` is wrong, and a checker that does not say so fails: it reports the unused comment.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import flash_attn_ext as fa
from flash_attn_ext import reference
from flash_attn_ext.integrations import dtensor, flash_attn, torch_backend, transformers
from flash_attn_ext.integrations.flash_attn import bert_padding
from flash_attn_ext.integrations.torch_backend.switch import Handle, activate
from flash_attn_ext.integrations.torch_sdpa import SdpaReplacement
from flash_attn_ext.types import AttentionOptions, Backend, Causal, Fallback, KvCacheOptions, Layout, VarlenOptions

WithLse = tuple[Tensor, Tensor]
WithMaxLogit = tuple[Tensor, Tensor]
WithBoth = tuple[Tensor, Tensor, Tensor]
WithProbs = tuple[Tensor, Tensor, Tensor | None]


def plain_calls(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, flag: bool) -> None:
    assert_type(fa.scaled_dot_product_attention(q, k, v, mask, 0.1, False, 0.5, True), Tensor)
    assert_type(fa.attention(q, k, v), Tensor)
    assert_type(fa.attention(q, k, v, causal="top_left", layout="bshd", return_lse=False), Tensor)
    assert_type(fa.attention(q, k, v, causal="bottom_right", window=(256, None), return_lse=True), WithLse)
    assert_type(fa.attention(q, k, v, bias=mask, backend="cpu", return_lse=flag), Tensor | WithLse)
    out, lse = fa.attention(q, k, v, window=3, softcap=30, sink=mask, return_lse=True)
    assert_type(out, Tensor)
    assert_type(lse, Tensor)
    assert_type(fa.attention(q, k, v).sum(), Tensor)  # no tuple in the way
    assert_type(fa.attention(q, k, v, return_max_logit=True), WithMaxLogit)
    assert_type(fa.attention(q, k, v, return_max_logit="row"), WithMaxLogit)
    assert_type(fa.attention(q, k, v, return_lse=True, return_max_logit="head"), WithBoth)
    assert_type(fa.attention(q, k, v, return_max_logit=flag), Tensor | tuple[Tensor, ...])
    fa.attention(q, k, v, return_max_logit="rows")  # type: ignore[call-overload]


def packed_calls(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, flag: bool) -> None:
    assert_type(fa.attention_varlen(q, k, v, ends, ends, max_seqlen_q=8), Tensor)
    assert_type(fa.attention_varlen(q, k, v, ends, ends, causal=None, return_lse=True), WithLse)
    assert_type(fa.attention_varlen(q, k, v, ends, ends, return_lse=flag), Tensor | WithLse)
    assert_type(fa.attention_varlen(q, k, v, ends, ends, return_max_logit=True), WithMaxLogit)
    assert_type(fa.attention_varlen(q, k, v, ends, ends, return_lse=True, return_max_logit="row"), WithBoth)
    fa.attention_varlen(q, k, v, ends, ends, layout="bshd")  # type: ignore[call-overload]
    fa.attention_varlen(q, k, v)  # type: ignore[call-overload]


def cache_calls(q: Tensor, cache: Tensor, lengths: Tensor, flag: bool) -> None:
    assert_type(fa.attention_with_kvcache(q, cache, cache, cache_seqlens=lengths), Tensor)
    assert_type(fa.attention_with_kvcache(q, cache, cache, k_new=q, v_new=q, cache_seqlens=3, return_lse=True), WithLse)
    assert_type(fa.attention_with_kvcache(q, cache, cache, cache_seqlens=3, return_lse=flag), Tensor | WithLse)
    assert_type(fa.attention_with_kvcache(q, cache, cache, cache_seqlens=3, return_max_logit=True), WithMaxLogit)
    fa.attention_with_kvcache(q, cache, cache)  # type: ignore[call-overload]
    fa.attention_with_kvcache(q, cache, cache, cache_seqlens=3, dropout_p=0.1)  # type: ignore[call-overload]


def wrong_options(q: Tensor, k: Tensor, v: Tensor, name: str) -> None:
    fa.attention(q, k, v, causal=True)  # type: ignore[call-overload]
    fa.attention(q, k, v, causal="topleft")  # type: ignore[call-overload]
    fa.attention(q, k, v, causal=name)  # type: ignore[call-overload]
    fa.attention(q, k, v, layout="bhds")  # type: ignore[call-overload]
    fa.attention(q, k, v, backend="sm70")  # type: ignore[call-overload]
    fa.attention(q, k, v, window="all")  # type: ignore[call-overload]
    fa.attention(q, k, v, is_causal=True)  # type: ignore[call-overload]
    fa.attention(q, k, v, "top_left")  # type: ignore[call-overload]
    fa.attention(q, k, v, return_lse=1)  # type: ignore[call-overload]
    fa.scaled_dot_product_attention(q, k, v, is_causal="top_left")  # type: ignore[arg-type]
    fa.explain(q, k, v, causal=True)  # type: ignore[arg-type]
    fa.replace_sdpa(fallback="pytorch")  # type: ignore[arg-type]
    fa.install_sdpa(fallback="pytorch")  # type: ignore[arg-type]
    reference.attention_reference(q, k, v, causal=True)  # type: ignore[call-overload]


def options_of_a_model(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, causal: Causal | None, layout: Layout) -> None:
    options: AttentionOptions = {"causal": causal, "window": (256, 0), "layout": layout}
    assert_type(fa.attention(q, k, v, **options), Tensor)
    assert_type(fa.attention(q, k, v, **options, return_lse=True), WithLse)
    packed: VarlenOptions = {"causal": causal, "max_seqlen_q": 64}
    assert_type(fa.attention_varlen(q, k, v, ends, ends, **packed), Tensor)
    cached: KvCacheOptions = {"k_new": k, "v_new": v, "layout": layout}
    assert_type(fa.attention_with_kvcache(q, k, v, cache_seqlens=ends, **cached), Tensor)
    wrong: AttentionOptions = {"causal": "left"}  # type: ignore[typeddict-item]
    fa.attention(q, k, v, **wrong)


def structured_masks(ids: Tensor, mask: Tensor) -> None:
    packed = fa.masks.documents(ids) & fa.masks.window(128, (16, 0), device="cpu")
    assert_type(packed, fa.masks.Intervals)
    assert_type(packed | fa.masks.from_mask(mask), fa.masks.Intervals)
    assert_type(packed.rows(-1).to(ids.device).tensor, Tensor)
    assert_type(packed.dense(128), Tensor)
    fa.masks.from_mask_mod(lambda b, h, i, j: (i >= j) & (b == h), 1, 1, 128, 128)
    fa.masks.padding(128, ids, "middle")  # type: ignore[arg-type]
    packed & mask  # type: ignore[operator]


def what_runs(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> None:
    explanation = fa.explain(q, k, v, ends, ends, max_seqlen_k=8)
    assert_type(explanation, fa.Explanation)
    assert_type(explanation.backend, Backend | None)
    assert_type(explanation.reasons, dict[Backend, tuple[str, ...]])
    fa.attention(q, k, v, backend=explanation.backend)


def instead_of_pytorch(model: torch.nn.Module, x: Tensor, fallback: Fallback) -> None:
    with fa.replace_sdpa(fallback) as mode:
        assert_type(mode, SdpaReplacement)
        model(x)
    fa.install_sdpa(fallback="torch")
    fa.uninstall_sdpa()
    torch_backend.register()
    assert_type(activate(), Handle)
    transformers.register()
    transformers.unregister()
    dtensor.register()


def names_of_flash_attn(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, flag: bool) -> None:
    assert_type(flash_attn.flash_attn_func(q, k, v, 0.0, None, True, (-1, -1)), Tensor)
    assert_type(flash_attn.flash_attn_func(q, k, v, 0.1, causal=True, return_attn_probs=True), WithProbs)
    assert_type(flash_attn.flash_attn_func(q, k, v, window_size=ends, return_attn_probs=flag), Tensor | WithProbs)
    assert_type(flash_attn.flash_attn_kvpacked_func(q, k), Tensor)
    assert_type(flash_attn.flash_attn_kvpacked_func(q, k, return_attn_probs=True), WithProbs)
    assert_type(flash_attn.flash_attn_qkvpacked_func(q, causal=True), Tensor)
    assert_type(flash_attn.flash_attn_qkvpacked_func(q, return_attn_probs=True), WithProbs)
    assert_type(flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 8, 8), Tensor)
    assert_type(flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 8, None, return_attn_probs=True), WithProbs)
    assert_type(flash_attn.flash_attn_varlen_kvpacked_func(q, k, ends, ends, 8, 8), Tensor)
    assert_type(flash_attn.flash_attn_varlen_kvpacked_func(q, k, ends, ends, 8, 8, return_attn_probs=True), WithProbs)
    assert_type(flash_attn.flash_attn_varlen_qkvpacked_func(q, ends, 8), Tensor)
    assert_type(flash_attn.flash_attn_varlen_qkvpacked_func(q, ends, 8, return_attn_probs=True), WithProbs)
    assert_type(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=3), Tensor)
    assert_type(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=ends, return_softmax_lse=True), WithLse)
    assert_type(flash_attn.flash_attn_with_kvcache(q, k, v, return_softmax_lse=flag), Tensor | WithLse)
    flash_attn.flash_attn_func(q, k, v, causal="bottom_right")  # type: ignore[call-overload]
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(q, ends)
    assert_type((tokens, indices, cu_seqlens, longest, used), tuple[Tensor, Tensor, Tensor, int, Tensor])
    assert_type(bert_padding.pad_input(tokens, indices, 2, longest), Tensor)


def specification(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, flag: bool) -> None:
    assert_type(reference.attention_reference(q, k, v, window=3), WithLse)
    assert_type(reference.attention_reference(q, k, v, return_lse=False), Tensor)
    assert_type(reference.attention_reference(q, k, v, return_lse=flag), Tensor | WithLse)
    assert_type(reference.attention_varlen_reference(q, k, v, ends, ends, softcap=3.0), WithLse)
    results = reference.attention_with_kvcache_reference(q, k, v, cache_seqlens=3)
    assert_type(results, tuple[Tensor, Tensor, Tensor, Tensor])
