"""The direct way, on which C++ reads the arguments of a plain call, and the general way through Python: one meaning.

The general way is the same public function where no call is taken directly.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right

import flash_attn_ext
from flash_attn_ext import _C

SDPA = "scaled_dot_product_attention"
ATTENTION = "attention"
KVCACHE = "attention_with_kvcache"
DIRECT = {SDPA: "direct_sdpa", ATTENTION: "direct_attention", KVCACHE: "direct_attention_with_kvcache"}
Q, K, V = (2, 4, 5, 16), (2, 2, 9, 16), (2, 2, 9, 8)  # shapes


@dataclass(frozen=True)
class Call:
    """`options`: keywords, made for a device and q's dtype."""

    function: str
    name: str
    options: Callable[[str, torch.dtype], dict] = lambda device, dtype: {}
    shapes: tuple[tuple[int, ...], ...] = (Q, K, V)
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{self.function}-{self.name}"

    def make(self, device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict]:
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in self.shapes]
        if self.requires_grad:
            tensors = [tensor.requires_grad_() for tensor in tensors]
        return tensors, self.options(device, dtype)


def of(function: str, name: str, **options) -> Call:
    """Options that are tensors are moved to the device; floating ones have q's dtype unless they are float32 logits."""

    def on_device(device, dtype):
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}

    return Call(function, name, on_device)


def tables(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


GQA = dict(enable_gqa=True)
FIRST = ((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))  # sequence first
CACHE = ((2, 4, 1, 16), (2, 2, 32, 16), (2, 2, 32, 8))
LENGTHS = torch.tensor([7, 20], dtype=torch.int32)
NEW = dict(k_new=tables(2, 2, 3, 16), v_new=tables(2, 2, 3, 8))
PAGES = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def of_cache(name: str, shapes=CACHE, **options) -> Call:
    call = of(KVCACHE, name, **(dict(cache_seqlens=LENGTHS) | options))
    return Call(KVCACHE, name, call.options, shapes)


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


class OfUser(Tensor):
    pass


class TextOfUser(str):
    pass


@dataclass(frozen=True)
class Other:
    """A change of a plain call after which it takes the general way, whether that runs it or raises."""

    name: str
    tensors: Callable[[list[Tensor]], list] = lambda tensors: tensors
    options: dict = field(default_factory=dict)
    functions: tuple[str, ...] = (SDPA, ATTENTION, KVCACHE)


OF_ALL = [
    Other("subclass", lambda t: [t[0].as_subclass(OfUser), *t[1:]]),
    Other("subclass of v", lambda t: [*t[:2], t[2].as_subclass(OfUser)]),
    Other("meta", lambda t: [x.to("meta") for x in t]),
    Other("no tensor", lambda t: [t[0], t[1].tolist(), t[2]]),
    Other("None", lambda t: [None, *t[1:]]),
    Other("numpy scale", options=dict(scale=np.float32(0.5))),
    Other("boolean scale", options=dict(scale=True)),
    Other("huge scale", options=dict(scale=10**400)),
    Other("scale of a tensor", options=dict(scale=torch.tensor(0.5))),
]
OF_BOTH = (SDPA, ATTENTION)
OF_OURS = (ATTENTION, KVCACHE)
OTHERS = OF_ALL + [
    Other("three dimensions", lambda t: [x[0] for x in t], functions=OF_BOTH),
    Other("two dtypes", lambda t: [t[0], t[1].double(), t[2]], functions=OF_BOTH),
    Other("sparse", lambda t: [t[0].to_sparse(), *t[1:]], functions=OF_BOTH),
    Other("broadcast batch", lambda t: [t[0], t[1][:1], t[2][:1]], functions=OF_BOTH),
    Other("dropout", options=dict(dropout_p=0.5), functions=OF_BOTH),
    Other("dropout out of range", options=dict(dropout_p=-1.0), functions=OF_BOTH),
    Other("dropout of None", options=dict(dropout_p=None), functions=OF_BOTH),
    Other("heads that nobody shares", options=dict(enable_gqa=False), functions=(SDPA,)),
    Other("heads that do not divide", lambda t: [t[0][:, :3], *t[1:]], functions=(SDPA,)),
    Other("no key heads", lambda t: [t[0], t[1][:, :0], t[2][:, :0]], functions=(SDPA,)),
    Other("flag of an int", options=dict(is_causal=1), functions=(SDPA,)),
    Other("mask and is_causal", options=dict(attn_mask=tables(2, 4, 5, 9), is_causal=True), functions=(SDPA,)),
    Other("mask of two dimensions", options=dict(attn_mask=tables(5, 9)), functions=(SDPA,)),
    Other("mask that does not broadcast", options=dict(attn_mask=tables(2, 4, 5, 8)), functions=(SDPA,)),
    Other("mask of integers", options=dict(attn_mask=torch.ones(1, 1, 5, 9, dtype=torch.int32)), functions=(SDPA,)),
    Other("mask of float64", options=dict(attn_mask=tables(1, 1, 5, 9).double()), functions=(SDPA,)),
    Other("mask of a type", options=dict(attn_mask=causal_lower_right(5, 9)), functions=(SDPA,)),
    Other("mask of no tensor", options=dict(attn_mask=True), functions=(SDPA,)),
    Other("sparse mask", options=dict(attn_mask=torch.ones(1, 1, 5, 9).to_sparse()), functions=(SDPA,)),
    Other("bias of two dimensions", options=dict(bias=tables(5, 9)), functions=OF_OURS),
    Other("bias that does not broadcast", options=dict(bias=tables(2, 4, 5, 8)), functions=(ATTENTION,)),
    Other("mask of a subclass", options=dict(mask=(tables(1, 1, 1, 1) > 0).as_subclass(OfUser)), functions=OF_OURS),
    Other("slopes of three dimensions", options=dict(alibi_slopes=tables(2, 1, 4)), functions=OF_OURS),
    Other("sink of a number", options=dict(sink=1.0), functions=OF_OURS),
    Other("causal of bool", options=dict(causal=True), functions=OF_OURS),
    Other("causal of a subclass", options=dict(causal=TextOfUser("top_left")), functions=OF_OURS),
    Other("causal unknown", options=dict(causal="top"), functions=OF_OURS),
    Other("window of numpy", options=dict(window=np.int64(3)), functions=OF_OURS),
    Other("window of a list", options=dict(window=[3, 0]), functions=OF_OURS),
    Other("window below 0", options=dict(window=(-1, 0)), functions=OF_OURS),
    Other("window of bool", options=dict(window=True), functions=OF_OURS),
    Other("window past 64 bits", options=dict(window=2**64), functions=OF_OURS),
    Other("window of three", options=dict(window=(1, 2, 3)), functions=OF_OURS),
    Other("layout unknown", options=dict(layout="sbhd"), functions=OF_OURS),
    Other("flag of None", options=dict(return_lse=None), functions=OF_OURS),
    Other("backend of a number", options=dict(backend=80), functions=OF_OURS),
    Other("backend that is no text", options=dict(backend="\udcff"), functions=OF_OURS),
    Other("softcap of a text", options=dict(softcap="2"), functions=OF_OURS),
    Other("length below 0", options=dict(cache_seqlens=-1), functions=(KVCACHE,)),
    Other("length past the cache", options=dict(cache_seqlens=33), functions=(KVCACHE,)),
    Other("length past new ones", options=dict(cache_seqlens=30, **NEW), functions=(KVCACHE,)),
    Other("no lengths", options=dict(cache_seqlens=None), functions=(KVCACHE,)),
    Other("new tokens of a subclass", options=NEW | dict(k_new=NEW["k_new"].as_subclass(OfUser)), functions=(KVCACHE,)),
    Other("sequence first, three dimensions", lambda t: [t[0][0], *t[1:]], dict(layout="bshd"), (KVCACHE,)),
]
PLAIN = {SDPA: of(SDPA, "plain", **GQA), ATTENTION: of(ATTENTION, "plain"), KVCACHE: of_cache("plain")}


def directly(function: str, tensors, options: dict):
    """What the direct way answers: None where it does not take the call."""
    answers = []

    class Asked(Exception):
        pass

    def ask(*arguments):
        answers.append(original(*arguments))
        raise Asked

    original = getattr(_C, DIRECT[function])
    setattr(_C, DIRECT[function], ask)
    try:
        with pytest.raises(Asked):
            getattr(flash_attn_ext, function)(*tensors, **options)
    finally:
        setattr(_C, DIRECT[function], original)
    return answers[0]


@pytest.mark.parametrize(
    ("function", "other"),
    [pytest.param(function, other, id=f"{function}-{other.name}") for other in OTHERS for function in other.functions],
)
def test_what_is_not_plain_is_left_to_the_general_way(function, other):
    tensors, options = PLAIN[function].make("cpu", torch.float32)
    assert directly(function, tensors, options) is not None
    assert directly(function, other.tensors(tensors), options | other.options) is None


@pytest.mark.parametrize("function", DIRECT)
def test_what_watches_or_transforms_is_left_to_the_general_way(function):
    tensors, options = PLAIN[function].make("cpu", torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert directly(function, tensors, options) is None
    with forward_ad.dual_level():
        assert directly(function, tensors, options) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):  # does nothing to a cache, and its tensors stay in their dtype
        assert (directly(function, tensors, options) is None) == (function != KVCACHE)
    seen = []

    def loss(q):
        seen.append(directly(function, [q, *tensors[1:]], options))
        return q.sum()

    torch.func.grad(loss)(tensors[0])
    torch.vmap(loss)(tensors[0][None])
    torch.jit.trace(loss, tensors[0], check_trace=False)
    assert seen == [None, None, None]


def error_of(run, *tensors, **options) -> tuple[type, str]:
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        run(*tensors, **options)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("function", "shapes", "options"),
    [
        (SDPA, (Q, (2, 2, 9, 8), V), GQA),
        (SDPA, (Q, K, (2, 2, 8, 8)), GQA),
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
    torch._dynamo.reset()
    compiled = torch.compile(all_three, fullgraph=True, backend="eager")
    check_equal(compiled(*tensors), expected)
