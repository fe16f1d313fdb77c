"""The direct way, on which C++ reads the arguments of a plain call, and the general way through Python: one meaning.

The general way is the same public function where no call is taken directly.
"""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

import flash_attn_ext
from flash_attn_ext import _C
from support.direct import (
    ATTENTION,
    CACHE,
    DIRECT,
    FIRST,
    GQA,
    KVCACHE,
    LENGTHS,
    NEW,
    PAGES,
    PLAIN,
    SDPA,
    Call,
    K,
    Q,
    V,
    directly,
    of,
    of_cache,
    tables,
)

DIRECTLY = [
    of(SDPA, "grouped heads", **GQA),
    Call(SDPA, "equal heads", shapes=(Q, (2, 4, 9, 16), (2, 4, 9, 8))),
    Call(SDPA, "equal heads, grouped allowed", lambda *_: GQA, (Q, (2, 4, 9, 16), (2, 4, 9, 8))),
    of(SDPA, "causal", is_causal=True, **GQA),
    of(SDPA, "scale", scale=0.5, **GQA),
    of(SDPA, "scale of an int", scale=1, dropout_p=0, **GQA),
    of(SDPA, "boolean mask", attn_mask=tables(2, 1, 5, 9) > 0, **GQA),
    of(SDPA, "float mask", attn_mask=tables(1, 4, 1, 9), **GQA),
    Call(SDPA, "mask in q's dtype", lambda device, dtype: dict(attn_mask=tables(2, 4, 5, 9).to(device, dtype), **GQA)),
    Call(SDPA, "gradients", lambda *_: GQA, requires_grad=True),
    Call(SDPA, "no queries", lambda *_: GQA, ((2, 4, 0, 16), K, V)),
    of(ATTENTION, "plain"),
    of(ATTENTION, "lse", return_lse=True),
    of(ATTENTION, "largest of heads", return_max_logit=True),
    of(ATTENTION, "largest of heads, lse", return_max_logit="head", return_lse=True),
    of(ATTENTION, "largest of rows", return_max_logit="row", causal="bottom_right", window=1),
    Call(ATTENTION, "largest of heads, gradients", lambda *_: dict(return_max_logit=True), requires_grad=True),
    Call(ATTENTION, "largest of heads, no queries", lambda *_: dict(return_max_logit=True), ((2, 4, 0, 16), K, V)),
    Call(ATTENTION, "sequence first, largest", lambda *_: dict(layout="bshd", return_max_logit="row"), FIRST),
    of(ATTENTION, "top left", causal="top_left"),
    of(ATTENTION, "bottom right, window", causal="bottom_right", window=3),
    of(ATTENTION, "window pair", window=(2, None)),
    of(ATTENTION, "softcap, scale", softcap=2.0, scale=2),
    of(ATTENTION, "sink, slopes", sink=tables(4), alibi_slopes=tables(2, 4)),
    of(ATTENTION, "bias and mask", bias=tables(2, 4, 5, 1), mask=tables(1, 1, 5, 9) > 0),
    of(ATTENTION, "tf32", allow_tf32=True),
    Call(ATTENTION, "sequence first", lambda *_: dict(layout="bshd", return_lse=True), FIRST),
    Call(ATTENTION, "sequence first, gradients", lambda *_: dict(layout="bshd", return_lse=True), FIRST, True),
    Call(ATTENTION, "gradients", lambda *_: dict(return_lse=True), requires_grad=True),
    of_cache("cache"),
    of_cache("lse", return_lse=True, causal=None),
    of_cache("largest of heads", return_max_logit=True, return_lse=True),
    of_cache("largest of rows", return_max_logit="row", **NEW),
    of_cache("append", **NEW),
    of_cache("one length", cache_seqlens=11, **NEW),
    of_cache("window, softcap, sink", window=(4, 0), softcap=3.0, sink=tables(4), scale=0.3),
    of_cache("mask", mask=tables(2, 1, 1, 32) > 0),
    of_cache("pages", ((2, 4, 1, 16), (4, 2, 16, 16), (4, 2, 16, 8)), block_table=PAGES, **NEW),
    of_cache("one length, pages", ((2, 4, 1, 16), (4, 2, 16, 16), (4, 2, 16, 8)), block_table=PAGES, cache_seqlens=29),
    of_cache("entries", cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32)),
    of_cache("sequence first", ((2, 1, 4, 16), (2, 32, 2, 16), (2, 32, 2, 8)), layout="bshd", return_lse=True)
]  # fmt: skip


@pytest.fixture
def ways(monkeypatch):
    """ways(function, "direct" or "general")(...): that call, which fails where it takes another way."""

    def way(function: str, name: str):
        original = getattr(_C, DIRECT[function])

        def run(*tensors, **options):
            taken = []

            def directly(*arguments):
                taken.append(original(*arguments) if name == "direct" else None)
                return taken[-1]

            with monkeypatch.context() as patch:
                patch.setattr(_C, DIRECT[function], directly)
                results = getattr(flash_attn_ext, function)(*tensors, **options)
            assert (taken[0] is not None) == (name == "direct")
            return results

        return run

    return way


def leaves(results) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def check_equal(of_direct, of_general):
    assert type(of_direct) is type(of_general)
    for a, b in zip(leaves(of_direct), leaves(of_general), strict=True):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad)
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", DIRECTLY, ids=str)
def test_both_ways_are_one(call, dtype, backend, ways):
    more = {} if call.function == SDPA else dict(backend=backend.name)
    results, caches = [], []
    for way in ("direct", "general"):
        tensors, options = call.make(backend.device, dtype)
        if call.function == KVCACHE:
            options |= {name: options[name].to(dtype) for name in ("k_new", "v_new") if name in options}
        results.append(ways(call.function, way)(*tensors, **options, **more))
        if call.requires_grad:
            sum(result.float().sum() for result in leaves(results[-1])).backward()
        caches.append([t.grad for t in tensors] if call.requires_grad else tensors[1:])
    check_equal(*results)
    check_equal(*map(tuple, caches))


def error_of(run, *tensors, **options) -> tuple[type, str]:
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        run(*tensors, **options)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("function", "shapes", "options"),
    [
        (SDPA, (Q, K, V), GQA | dict(scale=float("inf"))),
        (ATTENTION, ((2, 3, 5, 16), K, V), {}),
        (ATTENTION, (Q, K, V), dict(softcap=-1.0)),
        (ATTENTION, (Q, K, V), dict(sink=tables(3))),
        (ATTENTION, (Q, K, V), dict(mask=tables(2, 4, 5, 9))),
        (ATTENTION, (Q, K, V), dict(backend="none")),
        (ATTENTION, FIRST, {}),
        (KVCACHE, CACHE, dict(cache_seqlens=LENGTHS.long())),
        (KVCACHE, CACHE, dict(cache_seqlens=LENGTHS + 30)),
        (KVCACHE, CACHE, dict(cache_seqlens=LENGTHS, k_new=NEW["k_new"])),
        (KVCACHE, CACHE[:2] + ((2, 2, 31, 8),), dict(cache_seqlens=LENGTHS)),
        (KVCACHE, CACHE, dict(cache_seqlens=LENGTHS, mask=tables(2, 4, 1, 9) > 0)),
    ],
)
def test_both_ways_raise_the_same(function, shapes, options, monkeypatch):
    tensors, _ = Call(function, "", shapes=shapes).make("cpu", torch.float32)
    run = getattr(flash_attn_ext, function)
    of_direct = error_of(run, *tensors, **options)
    with pytest.raises(of_direct[0]):
        directly(function, tensors, options)  # it is the direct way that raises
    monkeypatch.setattr(_C, DIRECT[function], lambda *_: None)
    assert error_of(run, *tensors, **options) == of_direct


@pytest.mark.parametrize("shapes", [(Q, (2, 2, 9, 8), V), (Q, K, (2, 2, 8, 8))], ids=["key", "value"])
def test_operands_that_do_not_fit_are_named_as_in_pytorch(shapes):
    """C++ leaves them to Python, whose names they have: "key has head dim 8", not "k"."""
    tensors, _ = Call(SDPA, "", shapes=shapes).make("cpu", torch.float32)
    assert directly(SDPA, tensors, GQA) is None
    with pytest.raises(RuntimeError, match=r"^(key has head dim 8|value has sequence length 8), expected"):
        flash_attn_ext.scaled_dot_product_attention(*tensors, **GQA)


def test_a_tensor_that_requires_grad_does_not_go_to_a_cache(monkeypatch):
    tensors, options = PLAIN[KVCACHE].make("cpu", torch.float32)
    tensors[0].requires_grad_()
    of_direct = error_of(flash_attn_ext.attention_with_kvcache, *tensors, **options)
    monkeypatch.setattr(_C, DIRECT[KVCACHE], lambda *_: None)
    assert error_of(flash_attn_ext.attention_with_kvcache, *tensors, **options) == of_direct


def test_a_wrong_number_of_arguments_is_refused():
    for name in DIRECT.values():
        with pytest.raises(TypeError, match=r"expected \d+ arguments, got 2"):
            getattr(_C, name)(None, None)


@pytest.mark.parametrize("function", DIRECT)
def test_nothing_is_held_after_a_call(function):
    tensors, options = PLAIN[function].make("cpu", torch.float32)
    left = dict(scale=np.float32(1.0))
    wrong = dict(scale=float("nan"))
    run = getattr(flash_attn_ext, function)
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(3):
        run(*tensors, **options)
        run(*tensors, **options | left)
        error_of(run, *tensors, **options | wrong)
    gc.collect()  # the tracebacks of errors
    assert [sys.getrefcount(tensor) for tensor in tensors] == before


@pytest.mark.usefixtures("fresh_compiler")
def test_compilers_do_not_see_it(monkeypatch):
    def refuse(*_):
        raise AssertionError("a compiled call took the direct way")

    def all_three(q, k, v, k_cache, v_cache, lengths):
        a = flash_attn_ext.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        b = flash_attn_ext.attention(q, k, v)
        c = flash_attn_ext.attention_with_kvcache(q[:, :, :1], k_cache, v_cache, cache_seqlens=lengths)
        return a, b, c

    tensors = (*PLAIN[SDPA].make("cpu", torch.float32)[0], *PLAIN[KVCACHE].make("cpu", torch.float32)[0][1:], LENGTHS)
    expected = all_three(*tensors)
    for name in DIRECT.values():
        monkeypatch.setattr(_C, name, refuse)
    compiled = torch.compile(all_three, fullgraph=True, backend="eager")
    check_equal(compiled(*tensors), expected)
