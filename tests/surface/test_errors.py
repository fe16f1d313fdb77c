"""Bad input: every error names the tensor or option, what it got, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import flash_attn_ext
from flash_attn_ext import _C, attention, attention_varlen, scaled_dot_product_attention
from support.backends import generator_state
from support.binding import forward, problem
from support.refusals import ON, assert_says
from support.refusals import zeros as t


@dataclass(frozen=True)
class Bad:
    name: str
    call: Callable[[str], object]  # of a device
    says: tuple[str, ...]  # what is named, got, allowed, and the way out
    exception: type[Exception] = RuntimeError
    only_cpu: bool = False  # about values that the host does not read on a GPU


def on(device: str, *values):
    """The tensors among the values on the device of the test; those on the meta device stay there."""
    return [x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x for x in values]


def calling(function, tensors, options):
    return lambda device: function(
        *on(device, *tensors), **dict(zip(options, on(device, *options.values()), strict=True))
    )


def dense(q=(2, 4, 5, 8), k=(2, 2, 7, 8), v=(2, 2, 7, 6), **options):
    """A call that is right but for what a case changes."""
    tensors = [x if isinstance(x, torch.Tensor) else t(*x) for x in (q, k, v)]
    return calling(attention, tensors, options)


def long_sequence(queries: int = 5, keys: int = 7):
    """Of one token that is repeated, made on the device: a copy there would take memory for all of them."""

    def call(device: str):
        token = t(1, 1, 1, 8, device=device)
        key = token.expand(1, 1, keys, 8)
        return attention(token.expand(1, 1, queries, 8), key, key)

    return call


def packed(cu_q=(0, 3, 5), cu_k=(0, 4, 7), q=(5, 4, 8), k=(7, 2, 8), v=(7, 2, 8), **options):
    tensors = [x if isinstance(x, torch.Tensor) else t(*x) for x in (q, k, v)]
    cu = [x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k)]
    return calling(attention_varlen, tensors + cu, options)


def sdpa(q=(2, 4, 5, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 6), **options):
    tensors = [x if isinstance(x, torch.Tensor) else t(*x) for x in (q, k, v)]
    return calling(scaled_dot_product_attention, tensors, options)


NAN, INF = float("nan"), float("inf")
SHAPES = [
    Bad("one dimension", dense(q=(8,), k=(8,), v=(8,)), ("q", "(8,)", "at least 2", "dimensions")),
    Bad("ranks differ", dense(q=(4, 5, 8)), ("q (4, 5, 8)", "k (2, 2, 7, 8)", "same number", "size 1")),
    Bad("head counts", dense(q=(2, 3, 5, 8)), ("q", "3", "k", "2", "multiple")),
    Bad("no key heads", dense(k=(2, 0, 7, 8), v=(2, 0, 7, 6)), ("q", "4", "k", "0", "multiple")),
    Bad("v heads", dense(v=(2, 4, 7, 6)), ("v", "number of heads 4", "expected 2")),
    Bad("v length", dense(v=(2, 2, 6, 6)), ("v", "sequence length 6", "expected 7")),
    Bad("head dims", dense(k=(2, 2, 7, 9)), ("k", "head dim 9", "expected 8")),
    Bad("batch", dense(q=(3, 4, 5, 8)), ("batch", "q (3, 4, 5, 8)", "k (2, 2, 7, 8)", "or 1")),
    Bad("queries", long_sequence(queries=2**29 + 1), ("q", "536870913", "k", "7", "2^29", "split")),
    Bad("keys", long_sequence(keys=2**31), ("q", "5", "k", "2147483648", "2^29", "split")),
    Bad("bound", packed(max_seqlen_q=3, max_seqlen_k=2**29 + 1), ("q", "3", "k", "536870913", "2^29", "max_seqlen_k")),
    Bad("packed rank", packed(q=(1, 5, 4, 8)), ("q", "4 dimensions", "expected 3", "total tokens")),
    Bad("packed k rank", packed(k=(7, 8)), ("k", "2 dimensions", "expected 3")),
    Bad("sdpa heads", sdpa(k=(2, 2, 7, 8), v=(2, 2, 7, 6)), ("heads", "query (2, 4, 5, 8)", "enable_gqa=True")),
    Bad("sdpa gqa heads", sdpa(k=(2, 3, 7, 8), v=(2, 3, 7, 6), enable_gqa=True), ("heads", "key", "divide")),
    Bad("sdpa head dims", sdpa(k=(2, 4, 7, 9)), ("key", "head dim 9", "expected 8", "query")),
    Bad("sdpa lengths", sdpa(v=(2, 4, 6, 6)), ("value", "sequence length 6", "expected 7", "key")),
    Bad("sdpa one dimension", sdpa(q=(8,), k=(8,), v=(8,)), ("query", "at least 2", "(8,)")),
]
DTYPES = [
    Bad("int q", dense(*(t(2, 2, 5, 8, dtype=torch.int32),) * 3), ("q", "int32", "float32", "cast")),
    Bad("complex q", dense(*(t(2, 2, 5, 8, dtype=torch.complex64),) * 3), ("q", "complex64", "bfloat16", "cast")),
    Bad("k differs", dense(k=t(2, 2, 7, 8, dtype=torch.float64)), ("k", "float64", "float32", ".to(q.dtype)")),
    Bad("v differs", dense(v=t(2, 2, 7, 6, dtype=torch.bfloat16)), ("v", "bfloat16", ".to(q.dtype)")),
    Bad("bool bias", dense(bias=t(5, 7, dtype=torch.bool)), ("bias", "bool", "float32", "mask=")),
    Bad("half bias", dense(bias=t(5, 7, dtype=torch.half)), ("bias", "float16", "float32")),
    Bad("float mask", dense(mask=t(5, 7)), ("mask", "float32", "bool", "True = attend", "bias=")),
    Bad("int mask", dense(mask=t(5, 7, dtype=torch.uint8)), ("mask", "uint8", "bool")),
    Bad(
        "slopes",
        dense(alibi_slopes=t(4, dtype=torch.half)),
        ("alibi_slopes", "float16", "float32", "alibi_slopes.float()"),
    ),
    Bad("sink", dense(sink=t(4, dtype=torch.float64)), ("sink", "float64", "float32", "sink.float()")),
    Bad("sdpa mask", sdpa(attn_mask=t(5, 7, dtype=torch.int64)), ("attn_mask", "int64", "float32", "attn_mask.bool()")),
    Bad("sdpa key", sdpa(k=t(2, 4, 7, 8, dtype=torch.half)), ("key", "float16", "query", "float32", "cast")),
    Bad("cu_seqlens int64", packed(cu_q=torch.tensor([0, 3, 5])), ("cu_seqlens_q", "int64", "int32", ".to(")),
    Bad("cu_seqlens float", packed(cu_k=torch.tensor([0.0, 4, 7])), ("cu_seqlens_k", "float32", "int32")),
]
SPARSE = [
    Bad("q", dense(q=t(2, 4, 5, 8).to_sparse()), ("q", "sparse_coo", "expected a dense", "q.to_dense()"), TypeError),
    Bad("key", sdpa(k=t(2, 4, 7, 8).to_sparse()), ("key", "sparse_coo", "key.to_dense()"), TypeError),
    Bad(
        "mask", dense(mask=t(5, 7, dtype=torch.bool).to_sparse()), ("mask", "sparse_coo", "mask.to_dense()"), TypeError
    ),
    Bad("packed v", packed(v=t(7, 2, 8).to_sparse()), ("v", "sparse_coo", "v.to_dense()"), TypeError),
]
DEVICES = [
    Bad("key", sdpa(k=t(2, 4, 7, 8, device="meta")), ("key is on meta", "query", ON, "key.to(query.device)")),
    Bad("attn_mask", sdpa(attn_mask=t(1, 1, 5, 7, device="meta")), ("attn_mask is on meta", "query is on", ON)),
    Bad("k", dense(k=t(2, 2, 7, 8, device="meta")), ("k", "meta", ON, ".to(q.device)")),
    Bad("mask", dense(mask=t(5, 7, dtype=torch.bool, device="meta")), ("mask", "meta", ON)),
    Bad("bias", dense(bias=t(5, 7, device="meta")), ("bias", "meta", ON)),
    Bad("sink", dense(sink=t(4, device="meta")), ("sink", "meta", ON)),
    Bad("slopes", dense(alibi_slopes=t(4, device="meta")), ("alibi_slopes", "meta", ON)),
    Bad("cu_seqlens", packed(cu_q=t(3, dtype=torch.int32, device="meta")), ("cu_seqlens_q", "meta", ON)),
]
CU_SEQLENS = [
    Bad(
        "decreasing",
        packed(cu_q=(0, 4, 3, 5), cu_k=(0, 2, 4, 7)),
        ("cu_seqlens_q", "4", "3", "decreases", "sum"),
        only_cpu=True,
    ),
    Bad("start", packed(cu_q=(1, 3, 5)), ("cu_seqlens_q[0] is 1", "expected 0"), only_cpu=True),
    Bad("end", packed(cu_k=(0, 4, 8)), ("cu_seqlens_k", "8", "7", "total number of tokens"), only_cpu=True),
    Bad("short end", packed(cu_q=(0, 3, 4)), ("cu_seqlens_q", "4", "5", "total number of tokens"), only_cpu=True),
    Bad("lengths differ", packed(cu_k=(0, 4, 5, 7)), ("cu_seqlens_k", "4", "expected 3", "cu_seqlens_q")),
    Bad("rank", packed(cu_q=torch.zeros(1, 3, dtype=torch.int32)), ("cu_seqlens_q", "[1, 3]", "(batch + 1,)")),
    Bad("empty", packed(cu_q=torch.zeros(0, dtype=torch.int32)), ("cu_seqlens_q", "[0]", "(batch + 1,)")),
    Bad("max too small", packed(max_seqlen_q=2), ("max_seqlen_q", "2", "3", "upper bound"), ValueError, only_cpu=True),
    Bad("negative max", packed(max_seqlen_k=-1), ("max_seqlen_k", "-1", "0 or more"), ValueError),
    Bad("two max", packed(max_seqlen_k=torch.tensor([7, 7])), ("max_seqlen_k", "int or None", "(2,)"), TypeError),
    Bad("float max", packed(max_seqlen_q=torch.tensor(7.0)), ("max_seqlen_q", "int or None", "float32"), TypeError),
    Bad("bool max", packed(max_seqlen_q=True), ("max_seqlen_q", "int or None", "True", "bool"), TypeError),
    Bad(
        "a list",
        lambda device: attention_varlen(*on(device, t(5, 4, 8), t(7, 2, 8), t(7, 2, 8)), [0, 5], [0, 7]),
        ("cu_seqlens_q", "Tensor", "list"),
        TypeError,
    ),
]
MASKS = [
    Bad("mask", dense(mask=t(5, 6, dtype=torch.bool)), ("mask", "(5, 6)", "(2, 4, 5, 7)", "broadcast")),
    Bad("bias", dense(bias=t(4, 7, 5)), ("bias", "(4, 7, 5)", "(2, 4, 5, 7)", "broadcast")),
    Bad("bias heads", dense(bias=t(2, 2, 5, 7)), ("bias", "(2, 2, 5, 7)", "(2, 4, 5, 7)")),
    Bad("bias rank", dense(bias=t(3, 2, 4, 5, 7)), ("bias", "(3, 2, 4, 5, 7)", "broadcast")),
    Bad("attn_mask", sdpa(attn_mask=t(7, 5)), ("attn_mask", "(7, 5)", "(2, 4, 5, 7)", "broadcast")),
    Bad(
        "packed mask",
        packed(mask=t(2, 1, 3, 5, dtype=torch.bool), max_seqlen_q=3, max_seqlen_k=4),
        ("mask", "[2, 1, 3, 5]", "[2, 4, 3, 4]"),
    ),
    Bad("slopes", dense(alibi_slopes=t(2)), ("alibi_slopes", "[2]", "(4,)", "(2, 4)", "query head")),
    Bad("sink", dense(sink=t(2, 4)), ("sink", "[2, 4]", "(4,)", "query head")),
    Bad("mask and is_causal", sdpa(attn_mask=t(5, 7), is_causal=True), ("attn_mask", "is_causal", "attention(")),
]
OPTIONS = [
    *(
        Bad(f"dropout {p}", dense(dropout_p=p), ("dropout_p", f"{p:g}", "0 <= dropout_p <= 1"), ValueError)
        for p in (-0.1, 1.5, NAN)
    ),
    Bad("sdpa dropout", sdpa(dropout_p=1.5), ("dropout_p", "1.5", "0 <= dropout_p <= 1"), ValueError),
    *(Bad(f"scale {x}", dense(scale=x), ("scale", str(x), "finite"), ValueError) for x in (NAN, INF, -INF, 1e39)),
    *(Bad(f"softcap {x}", dense(softcap=x), ("softcap", "above 0", "None"), ValueError) for x in (0.0, -1.0, NAN, INF)),
    *(Bad(f"softcap {x}", dense(softcap=x), ("softcap", f"{x:g}", "float32"), ValueError) for x in (1e-46, 1e39)),
    Bad("sdpa scale", sdpa(scale=NAN), ("scale", "nan", "finite"), ValueError),
    Bad("scale type", dense(scale="1"), ("scale", "number", "str"), TypeError),
    *(
        Bad(
            f"{name} with gradient",
            dense(**{name: torch.tensor(0.5, requires_grad=True)}),
            (name, "requires_grad=True", "no gradient"),
            TypeError,
        )
        for name in ("scale", "softcap", "dropout_p")
    ),
    Bad("causal True", dense(causal=True), ("causal", "True", "top_left", "bottom_right", "None"), ValueError),
    Bad("causal name", dense(causal="bottomright"), ("causal", "'bottomright'", "'bottom_right'"), ValueError),
    Bad("layout", dense(layout="sbhd"), ("layout", "'sbhd'", "'bhsd'", "'bshd'"), ValueError),
    Bad("backend", dense(backend="sm70"), ("backend", "'sm70'", "'cpu'", "None"), ValueError),
    Bad("window -1", dense(window=(-1, 0)), ("window", "-1", ">= 0", "None"), ValueError),
    Bad("window length", dense(window=(1, 2, 3)), ("window", "(1, 2, 3)", "(left, right)"), ValueError),
    Bad("window beyond 64 bits", dense(window=(2**70, 0)), ("window", str(2**70), "64 bits", "None"), ValueError),
    Bad("max_seqlen beyond 64 bits", packed(max_seqlen_q=2**63), ("max_seqlen_q", str(2**63), "64 bits"), ValueError),
    Bad("window float", dense(window=(1.5, 0)), ("window", "1.5", "int"), TypeError),
    Bad("window bool", dense(window=(1, True)), ("window", "True", "bool", "int"), TypeError),
    Bad("window NumPy float", dense(window=np.float64(2)), ("window", "2.0", "float64", "int"), TypeError),
    Bad("window bool tensor", dense(window=torch.tensor(True)), ("window", "torch.bool", "int"), TypeError),
    Bad("allow_tf32 type", dense(allow_tf32=1), ("allow_tf32", "True or False", "int"), TypeError),
    Bad(
        "positional option",
        lambda device: attention(*on(device, t(5, 8), t(7, 8), t(7, 8)), "top_left"),
        ("positional",),
        TypeError,
    ),
    Bad("unknown keyword", dense(sliding_window=3), ("sliding_window",), TypeError),
    Bad(
        "not a tensor",
        lambda device: attention([1.0], *on(device, t(2, 8), t(2, 8))),
        ("q", "Tensor", "list"),
        TypeError,
    ),
    Bad("bias not a tensor", dense(bias=0.5), ("bias", "Tensor", "float"), TypeError),
    Bad("is_causal type", sdpa(is_causal=1), ("is_causal", "True or False", "int"), TypeError),
    Bad(
        "fallback",
        lambda _: flash_attn_ext.replace_sdpa(fallback="math"),
        ("fallback", "'math'", "'torch'"),
        ValueError,
    ),
]
SEED = torch.zeros(1, dtype=torch.int64)
SIZES = dict(batch=1, num_heads=1, seqlen_q=1, seqlen_k=1)
QKV = (t(1, 1, 2, 4),) * 3
BINDING = [
    Bad("no seed", calling(forward, QKV, dict(dropout_p=0.5)), ("dropout_p", "0.5", "rng_seed", "int64")),
    Bad("seed without dropout", calling(forward, QKV, dict(rng_seed=SEED)), ("rng_seed", "dropout_p is 0")),
    Bad("seed dtype", calling(forward, QKV, dict(dropout_p=0.5, rng_seed=SEED.int())), ("rng_seed", "int32", "int64")),
    Bad("seed shape", calling(forward, QKV, dict(dropout_p=0.5, rng_seed=SEED.expand(2))), ("rng_seed", "[2]", "(1,)")),
    Bad(
        "one cu_seqlens",
        calling(forward, QKV, dict(cu_seqlens_q=t(1, dtype=torch.int32))),
        ("cu_seqlens_q", "cu_seqlens_k"),
    ),
    Bad(
        "max without cu",
        calling(forward, QKV, dict(max_seqlen_q=3)),
        ("max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "cu_seqlens_k"),
    ),
    Bad(
        "window_left",
        calling(forward, QKV, dict(window_left=-2)),
        ("window_left", "-2", "0 or more", "None"),
        ValueError,
    ),
    Bad(
        "dropout_mask p",
        lambda device: _C.dropout_mask(*on(device, SEED), 1.5, 1, 1, 1, 1),
        ("dropout_p", "1.5", "0 <= dropout_p <= 1"),
        ValueError,
    ),
    *(
        Bad(
            f"dropout_mask {name}",
            lambda device, name=name: _C.dropout_mask(*on(device, SEED), 0.5, **(SIZES | {name: -3})),
            (f"{name} is -3", "expected 0 to"),
            ValueError,
        )
        for name in ("batch", "num_heads", "seqlen_q", "seqlen_k")
    ),
    Bad(
        "dropout_mask seed",
        lambda device: _C.dropout_mask(*on(device, SEED.int()), 0.5, **SIZES),
        ("rng_seed", "int32", "[1]", "int64 and (1,)", "torch.tensor([seed])"),
    ),
    *(
        Bad(f"visible_{of} {name}", lambda _, f=f, options=options: f(4, 4, **options), says, ValueError)
        for of, f in (("keys", _C.visible_keys), ("queries", _C.visible_queries))
        for name, options, says in (
            ("causal", dict(causal="left"), ("causal is 'left'", "'top_left'", "None")),
            ("window", dict(window_right=-1), ("window_right is -1", "0 or more", "None")),
        )
    ),
    Bad("visible_keys length", lambda _: _C.visible_keys(-1, 4), ("seqlen_q is -1", "expected 0 to"), ValueError),
    Bad("dropout of all", calling(forward, QKV, dict(dropout_p=1.0)), ("dropout_p", "1", "less than 1"), ValueError),
    Bad(
        "delta dtype",
        calling(_C.delta, (t(2, 3, 4, dtype=torch.int64), t(2, 3, 4, dtype=torch.int64), None), {}),
        ("out", "int64", "bfloat16", "cast out and dout"),
    ),
    Bad(
        "delta shapes",
        calling(_C.delta, (t(2, 3, 4, 5), t(2, 3, 4, 6), None), {}),
        ("dout", "[2, 3, 4, 6]", "[2, 3, 4, 5]"),
    ),
    Bad("delta dlse", calling(_C.delta, (t(2, 3, 4, 5), t(2, 3, 4, 5), t(2, 3)), {}), ("dlse", "[2, 3]", "[2, 3, 4]")),
]
GROUPS = dict(
    shape=SHAPES,
    dtype=DTYPES,
    sparse=SPARSE,
    device=DEVICES,
    cu_seqlens=CU_SEQLENS,
    mask=MASKS,
    option=OPTIONS,
    binding=BINDING,
)


@pytest.mark.parametrize(
    "bad", [pytest.param(bad, id=f"{group}: {bad.name}") for group, cases in GROUPS.items() for bad in cases]
)
def test_says_what_is_wrong(bad, device):
    if bad.only_cpu and device != "cpu":
        pytest.skip("the host does not read these values on a GPU")
    with pytest.raises(bad.exception) as error:
        bad.call(device)
    assert_says(error.value, bad.says, device)


def backward_of(device: str, **changes):
    out, wanted = t(1, 1, 2, 4), [True, True, True, False, False, False]
    arguments = dict(dout=out, dlse=None, out=out, lse=t(1, 1, 2), residual=t(0), wanted=wanted) | changes
    return _C.attention_backward(*on(device, *arguments.values()), problem(*on(device, *QKV)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(dout=t(1, 1, 2, 3)), ("dout", "[1, 1, 2, 3]", "[1, 1, 2, 4]")),
        (dict(dout=t(1, 1, 2, 4, dtype=torch.float64)), ("dout", "float64", "float32")),
        (dict(dlse=t(1, 1, 3)), ("dlse", "[1, 1, 3]", "[1, 1, 2]")),
        (dict(wanted=[True] * 6), ("output_mask", "bias")),
        (dict(lse=t(1, 1, 2, dtype=torch.float64)), ("lse", "float64", "float32")),
        (dict(lse=t(1, 1, 3)), ("lse", "[1, 1, 3]", "[1, 1, 2]")),
        (dict(lse=t(1, 1, 2, device="meta")), ("lse is on meta", "lse.to(q.device)")),
        (dict(dlse=t(1, 1, 2, device="meta")), ("dlse is on meta", "dlse.to(q.device)")),
        (dict(residual=t(1, 1, 2, device="meta")), ("lse_residual is on meta", "lse_residual.to(q.device)")),
        (dict(out=t(1, 1, 3, 4), dout=t(1, 1, 3, 4)), ("out", "[1, 1, 3, 4]", "[1, 1, 2, 4]")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_backward_of_the_binding(changes, says, device):
    with pytest.raises(RuntimeError) as error:
        backward_of(device, **changes)
    assert_says(error.value, says)


def test_a_wrong_call_does_not_disturb_the_next(device):
    with pytest.raises(RuntimeError):
        dense(k=(2, 2, 7, 9))(device)
    assert dense()(device).shape == (2, 4, 5, 6)


def test_a_wrong_call_leaves_the_generator_alone(device):
    state = generator_state(device)
    with pytest.raises(RuntimeError):
        dense(k=(2, 2, 7, 9))(device)
    assert torch.equal(state, generator_state(device))
