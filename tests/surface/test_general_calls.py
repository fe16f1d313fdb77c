"""Calls that C++ does not take directly: whatever is not plain goes the general way, which runs it or raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right

from support.direct import (
    ATTENTION,
    DIRECT,
    KVCACHE,
    NEW,
    PLAIN,
    SDPA,
    directly,
    tables,
)


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
    Other("heads that are not shared", options=dict(enable_gqa=False), functions=(SDPA,)),
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
