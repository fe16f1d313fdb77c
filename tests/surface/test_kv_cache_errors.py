"""Bad calls with a cache: every error names the tensor or option, what it got, what is allowed, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import _C
from flash_attn_ext._call.problem import KvCache
from support.binding import problem
from support.refusals import ON, assert_says
from support.refusals import zeros as t


@dataclass(frozen=True)
class Bad:
    name: str
    change: dict  # of a call that is right
    says: tuple[str, ...]  # what is named, got, allowed, and the way out
    exception: type[Exception] = RuntimeError


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments() -> dict:
    """Two sequences of 4 query heads and 2 key heads, with room for 48 keys, of which they have 3 and 5."""
    return dict(q=t(2, 4, 1, 64), k_cache=t(2, 2, 48, 64), v_cache=t(2, 2, 48, 32), cache_seqlens=ints(3, 5))


NEW = dict(k_new=t(2, 2, 2, 64), v_new=t(2, 2, 2, 32))
PAGED = dict(k_cache=t(6, 2, 16, 64), v_cache=t(6, 2, 16, 32), block_table=ints([0, 1, 2], [3, 4, 5]))
ROTARY = dict(rotary_cos=t(48, 32), rotary_sin=t(48, 32))


def call(change: dict, device: str, **more):
    def on_device(value):
        return value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value

    keywords = {name: on_device(value) for name, value in (arguments() | change | more).items()}
    tensors = [keywords.pop(name) for name in ("q", "k_cache", "v_cache")]
    return flash_attn_ext.attention_with_kvcache(*tensors, **keywords)


SHAPES = [
    Bad("q rank", dict(q=t(4, 1, 64)), ("q", "3 dimensions", "[4, 1, 64]", "expected 4", "head dim")),
    Bad("k_cache rank", dict(k_cache=t(2, 48, 64)), ("k_cache", "3 dimensions", "expected 4")),
    Bad("heads", dict(q=t(2, 3, 1, 64)), ("q", "3", "k_cache", "2", "multiple")),
    Bad("v heads", dict(v_cache=t(2, 4, 48, 32)), ("v_cache", "number of heads 4", "expected 2", "k_cache")),
    Bad("v rows", dict(v_cache=t(2, 2, 47, 32)), ("v_cache", "rows 47", "expected 48", "k_cache")),
    Bad("v entries", dict(v_cache=t(3, 2, 48, 32)), ("v_cache", "3", "expected 2", "k_cache")),
    Bad("head dim", dict(q=t(2, 4, 1, 32)), ("k_cache", "head dim 64", "expected 32", "q")),
    Bad(
        "batch",
        dict(q=t(3, 4, 1, 64), cache_seqlens=ints(1, 1, 1)),
        ("k_cache", "2", "3", "cache_batch_idx", "block_table"),
    ),
    Bad("lengths", dict(cache_seqlens=ints(1, 1, 1)), ("cache_seqlens", "[3]", "(2,)", "sequence")),
    Bad("lengths rank", dict(cache_seqlens=ints([1, 1])), ("cache_seqlens", "[1, 2]", "(2,)")),
    Bad("index", dict(cache_batch_idx=ints(1)), ("cache_batch_idx", "[1]", "(2,)")),
    Bad("table rank", PAGED | dict(block_table=ints(1, 1)), ("block_table", "[2]", "(2, pages)")),
    Bad("one length, table rank", PAGED | dict(block_table=ints(1, 1), cache_seqlens=1), ("block_table", "(2, pages)")),
    Bad("one length, rank", dict(k_cache=t(48), cache_seqlens=1), ("k_cache", "1 dimensions", "expected 4")),
    Bad("table rows", PAGED | dict(block_table=ints([1, 1])), ("block_table", "[1, 2]", "(2, pages)")),
    Bad(
        "page size",
        dict(block_table=ints([0], [1]), k_cache=t(2, 2, 24, 64), v_cache=t(2, 2, 24, 32)),
        ("k_cache", "pages of 24", "multiple of 16", "(pages, heads, page size, head dim)"),
    ),
    Bad(
        "no pages", PAGED | dict(k_cache=t(0, 2, 16, 64), v_cache=t(0, 2, 16, 32)), ("k_cache", "no pages", "1 or more")
    ),
    Bad("both", PAGED | dict(cache_batch_idx=ints(0, 1)), ("block_table", "cache_batch_idx", "both", "leave out")),
    Bad("mask", dict(mask=t(1, 47, dtype=torch.bool)), ("mask", "[1, 1, 1, 47]", "[2, 4, 1, 48]")),
    Bad("paged bias", PAGED | dict(bias=t(16)), ("bias", "[1, 1, 1, 16]", "[2, 4, 1, 48]")),
    Bad("bias rank", dict(bias=t(2, 2, 4, 1, 48)), ("bias", "(2, 2, 4, 1, 48)", "capacity")),
    Bad("bshd rank", dict(q=t(2, 1, 256), layout="bshd"), ("q", "(2, 1, 256)", "(batch, sequence, heads, head dim)")),
]
NEW_TOKENS = [
    Bad("only k_new", dict(k_new=NEW["k_new"]), ("only k_new", "both", "v_new")),
    Bad("only v_new", dict(v_new=NEW["v_new"]), ("only v_new", "both", "k_new")),
    Bad("k_new shape", NEW | dict(k_new=t(2, 4, 2, 64)), ("k_new", "[2, 4, 2, 64]", "(2, 2, new tokens, 64)")),
    Bad("v_new shape", NEW | dict(v_new=t(2, 2, 2, 64)), ("v_new", "[2, 2, 2, 64]", "(2, 2, new tokens, 32)")),
    Bad("v_new tokens", NEW | dict(v_new=t(2, 2, 3, 32)), ("v_new", "tokens 3", "expected 2", "k_new")),
    Bad("none", dict(k_new=t(2, 2, 0, 64), v_new=t(2, 2, 0, 32)), ("k_new", "0 tokens", "1 or more", "leave out")),
    Bad("no room", dict(k_new=t(2, 2, 49, 64), v_new=t(2, 2, 49, 32)), ("k_new", "49", "48", "longer cache")),
]
ROTATION = [
    Bad("without new", ROTARY, ("rotary_cos", "k_new", "q alone")),
    Bad("only cos", NEW | dict(rotary_cos=t(48, 32)), ("only rotary_cos", "both")),
    Bad("only sin", NEW | dict(rotary_sin=t(48, 32)), ("only rotary_sin", "both")),
    Bad("too wide", NEW | dict(rotary_cos=t(48, 33), rotary_sin=t(48, 33)), ("rotary_cos", "[48, 33]", "head dim, 64")),
    Bad("differ", NEW | dict(rotary_cos=t(48, 32), rotary_sin=t(48, 16)), ("rotary_sin", "[48, 16]", "the same")),
    Bad(
        "rank", NEW | dict(rotary_cos=t(1, 48, 32), rotary_sin=t(1, 48, 32)), ("rotary_cos", "[1, 48, 32]", "positions")
    ),
    Bad("dtype", NEW | ROTARY | dict(rotary_sin=t(48, 32).double()), ("rotary_sin", "float64", ".to(q.dtype)")),
    Bad("interleaved", dict(rotary_interleaved=True), ("rotary_interleaved", "rotary_cos", "False"), ValueError),
    Bad("interleaved type", dict(rotary_interleaved=1), ("rotary_interleaved", "True or False", "int"), TypeError),
]
DTYPES = [
    Bad("q", dict(q=t(2, 4, 1, 64, dtype=torch.int32)), ("q", "int32", "float32", "cast")),
    Bad("k_cache", dict(k_cache=t(2, 2, 48, 64).half()), ("k_cache", "float16", "float32", ".to(q.dtype)")),
    Bad("v_new", NEW | dict(v_new=t(2, 2, 2, 32).half()), ("v_new", "float16", "float32", ".to(q.dtype)")),
    Bad("lengths", dict(cache_seqlens=torch.tensor([1, 1])), ("cache_seqlens", "int64", "int32", ".to(torch.int32)")),
    Bad("table", PAGED | dict(block_table=t(2, 3)), ("block_table", "float32", "int32")),
    Bad("index", dict(cache_batch_idx=torch.tensor([0, 1])), ("cache_batch_idx", "int64", "int32")),
    Bad("mask", dict(mask=t(1, 48)), ("mask", "float32", "bool", "bias=")),
    Bad("k_cache on meta", dict(k_cache=t(2, 2, 48, 64, device="meta")), ("k_cache", "meta", ON, ".to(q.device)")),
    Bad("lengths on meta", dict(cache_seqlens=t(2, dtype=torch.int32, device="meta")), ("cache_seqlens", "meta", ON)),
    Bad("not a tensor", dict(q=[1.0]), ("q", "Tensor", "list"), TypeError),
    Bad("k_new is no tensor", dict(k_new=[1.0], v_new=[1.0]), ("k_new", "list", "Tensor"), TypeError),
    Bad("bshd", dict(k_new=[1.0], v_new=[1.0], layout="bshd"), ("k_new", "list", "Tensor"), TypeError),
    Bad("one length, k_new", dict(k_new=[1.0], v_new=[1.0], cache_seqlens=1), ("k_new", "list", "Tensor"), TypeError),
    Bad("one length, table", PAGED | dict(block_table=[1], cache_seqlens=1), ("block_table", "list"), TypeError),
    Bad("rotary is no tensor", NEW | dict(rotary_cos=1, rotary_sin=1), ("rotary_cos", "int", "Tensor"), TypeError),
    Bad("mask is no tensor", dict(mask=True), ("mask", "Tensor", "bool"), TypeError),
    Bad("sparse", dict(k_cache=t(2, 2, 48, 64).to_sparse()), ("k_cache", "Sparse", "dense", ".to_dense()")),
]
OPTIONS = [
    Bad("a number", dict(cache_seqlens=49), ("cache_seqlens", "49", "0 to 48", "room for 48"), ValueError),
    Bad("with new", NEW | dict(cache_seqlens=47), ("cache_seqlens", "47", "0 to 46", "k_new has 2"), ValueError),
    Bad("negative", dict(cache_seqlens=-1), ("cache_seqlens", "-1", "0 to 48"), ValueError),
    Bad("paged number", PAGED | dict(cache_seqlens=49), ("cache_seqlens", "49", "0 to 48"), ValueError),
    Bad("float", dict(cache_seqlens=3.0), ("cache_seqlens", "int32 tensor", "3.0"), TypeError),
    Bad("None", dict(cache_seqlens=None), ("cache_seqlens", "int32 tensor", "None"), TypeError),
    Bad("causal", dict(causal=True), ("causal", "'bottom_right'", "True"), ValueError),
    Bad("softcap", dict(softcap=0.0), ("softcap", "above 0", "None"), ValueError),
    Bad("layout", dict(layout="sbhd"), ("layout", "'sbhd'", "'bhsd'", "'bshd'"), ValueError),
    Bad("backend", dict(backend="sm70"), ("backend", "'sm70'", "'cpu'"), ValueError),
    Bad("return_lse", dict(return_lse=1), ("return_lse", "True or False", "int"), TypeError),
    Bad("dropout", dict(dropout_p=0.1), ("dropout_p",), TypeError),
]
VALUES = [
    Bad("length", dict(cache_seqlens=ints(3, 49)), ("cache_seqlens[1] is 49", "0 to 48", "room for 48", "longer")),
    Bad("negative length", dict(cache_seqlens=ints(-1, 4)), ("cache_seqlens[0] is -1", "0 to 48")),
    Bad("length and new", NEW | dict(cache_seqlens=ints(3, 47)), ("cache_seqlens[1] is 47", "0 to 46", "k_new has 2")),
    Bad("paged length", PAGED | dict(cache_seqlens=ints(49, 3)), ("cache_seqlens[0] is 49", "0 to 48")),
    Bad("index", dict(cache_batch_idx=ints(0, 2)), ("cache_batch_idx[1] is 2", "0 to 1", "2 entries")),
    Bad("equal indices", NEW | dict(cache_batch_idx=ints(1, 1)),
        ("cache_batch_idx[0]", "cache_batch_idx[1]", "both 1", "append", "of its own")),
    Bad("page", PAGED | dict(block_table=ints([0, 1, 2], [6, 4, 5])), ("block_table[1][0] is 6", "0 to 5", "6 pages")),
    Bad("new page", PAGED | NEW | dict(block_table=ints([0, -1, 2], [3, 4, 5]), cache_seqlens=ints(15, 3)),
        ("block_table[0][1] is -1", "0 to 5", "first 2")),
    Bad("one page to append to", PAGED | NEW | dict(block_table=ints([0, 1, 2], [3, 1, 5]), cache_seqlens=ints(20, 30)),
        ("sequences 0 and 1", "block_table", "append to page 1", "of its own")),
    Bad("a page with keys", PAGED | NEW | dict(block_table=ints([0, 1, 2], [3, 0, 5]), cache_seqlens=ints(20, 16)),
        ("sequence 1", "appends to page 0", "sequence 0 has keys", "of its own")),
    Bad("positions", NEW | dict(rotary_cos=t(6, 32), rotary_sin=t(6, 32)),
        ("rotary_cos", "6 positions", "sequence 1 needs 7", "cache_seqlens[1] is 5", "longer")),
    Bad("positions of q", NEW | ROTARY | dict(q=t(2, 4, 45, 64)), ("rotary_cos", "48 positions", "1 needs 50", "45")),
]  # fmt: skip
GROUPS = dict(shape=SHAPES, new=NEW_TOKENS, rotary=ROTATION, dtype=DTYPES, option=OPTIONS, value=VALUES)


@pytest.mark.parametrize(
    ("group", "bad"),
    [pytest.param(group, bad, id=f"{group}: {bad.name}") for group, cases in GROUPS.items() for bad in cases],
)
def test_says_what_is_wrong(group, bad, device, monkeypatch):
    if group == "value":  # which the host looks at on a GPU only when it is asked to
        monkeypatch.setenv("FLASH_ATTN_EXT_CHECK", "1")
    with pytest.raises(bad.exception) as error:
        call(bad.change, device)
    assert_says(error.value, bad.says, device)


def overlapping(device: str) -> dict[str, tuple[dict, tuple[str, ...]]]:
    """Calls with new tokens in which memory is written twice, or read where it is written; and what is said."""
    buffer = t(2, 2, 48, 96, device=device)
    halves = dict(k_cache=buffer[..., :64], v_cache=buffer[..., 64:])
    return {
        "one cache": (dict(k_cache=buffer[..., :64], v_cache=buffer[..., :32]), ("k_cache", "v_cache", "share")),
        "columns": (dict(k_cache=buffer[..., :64], v_cache=buffer[..., 40:72]), ("k_cache", "v_cache", "share")),
        "expanded": (
            dict(k_cache=t(2, 1, 48, 64, device=device).expand(-1, 2, -1, -1)),
            ("k_cache", "[2, 2, 48, 64]", "stride 0", "contiguous()"),
        ),
        "k_new": (halves | dict(k_new=buffer[:, :, 7:9, :64]), ("k_new", "cache", ".clone()")),
        "v_new": (halves | dict(v_new=buffer[:, :, 47:, :64].view(2, 2, 2, 32)), ("v_new", "cache", ".clone()")),
    }


@pytest.mark.parametrize("name", overlapping("cpu"))
def test_overlapping_memory(name, device):
    change, says = overlapping(device)[name]
    with pytest.raises(RuntimeError) as error:
        call(NEW | change, device)
    assert_says(error.value, says)


def test_memory_that_lies_between(device):
    """Caches in columns, rows or pages of one buffer, and new tokens in the gaps between them."""
    columns, pages = t(2, 2, 48, 128, device=device), t(2, 3, 2, 48, 64, device=device)
    apart = [
        dict(k_cache=columns[..., :64], v_cache=columns[..., 64:96], v_new=columns[:, :, 3:5, 96:]),
        dict(k_cache=pages[:, 0], v_cache=pages[:, 1, ..., :32], k_new=pages[:, 2, :, :2]),
    ]
    for change in apart:
        call(NEW | change, device)


def test_what_is_read_may_be_shared(device):
    """Without new tokens nothing is written: one cache for keys and values, entries and pages of several sequences."""
    cache = t(2, 1, 48, 64, device=device).expand(-1, 2, -1, -1)
    call(dict(k_cache=cache, v_cache=cache), device)
    call(dict(cache_batch_idx=ints(1, 1)), device)
    call(PAGED | dict(block_table=ints([0, 0, 0], [0, 0, 0]), cache_seqlens=ints(48, 20)), device)


@pytest.mark.parametrize("name", ["q", "k_cache", "k_new", "bias", "sink", "rotary_cos"])
def test_no_backward_pass(name, device):
    given = arguments() | NEW | ROTARY | dict(bias=t(48), sink=t(4))
    change = given | {name: given[name].to(device, copy=True).requires_grad_()}
    with pytest.raises(
        RuntimeError, match=rf"^{name} requires grad, .* no backward pass; .*no_grad.*{name}.detach\(\)"
    ):
        call(change, device)
    with torch.no_grad():
        call(change, device)


TRANSFORMS = {
    "grad": lambda function, q: torch.func.grad(lambda q: function(q).sum())(q),
    "vmap": lambda function, q: torch.vmap(function)(q[None]),
    "jvp": lambda function, q: torch.func.jvp(function, (q,), (q,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_are_refused(transform, device):
    with pytest.raises(RuntimeError, match=r"torch\.func .* flash_attn_ext\.attention"):
        transform(lambda q: call(dict(q=q), device), arguments()["q"].to(device))


@pytest.mark.parametrize("text", ["yes", "2"])
def test_the_switch_is_0_or_1(text, device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_CHECK", text)
    if device == "cpu":
        call({}, device)  # checked whatever the switch says
        return
    with pytest.raises(ValueError, match=rf"FLASH_ATTN_EXT_CHECK is '{text}', expected 1 .* or 0"):
        call({}, device)


def test_a_wrong_call_writes_nothing(device):
    caches = [t(2, 2, 48, d, device=device) for d in (64, 32)]
    new = dict(k_new=NEW["k_new"] + 1, v_new=NEW["v_new"] + 1)
    with pytest.raises(RuntimeError):
        call(new | dict(k_cache=caches[0], v_cache=caches[1], mask=t(47, dtype=torch.bool)), device)
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize(("columns", "first", "is_aligned"), [(65, 0, False), (68, 1, False), (68, 4, True)])
def test_a_copy_of_a_cache_is_logged(columns, first, is_aligned, device, caplog):
    """A GPU's kernels read a copy of rows that they cannot read in place."""
    change = dict(k_cache=t(2, 2, 48, columns, device=device)[..., first : first + 64])
    with caplog.at_level("DEBUG", logger="flash_attn_ext"):
        call(change, device)
    assert ("k_cache" in caplog.text) == (device != "cpu" and not is_aligned)


def test_only_dense_problems_without_dropout():
    """What the public function has no keyword for."""
    given = arguments()
    q, k, v = given["q"], given["k_cache"], given["v_cache"]
    cache = KvCache(cache_seqlens=given["cache_seqlens"])
    for change, says, exception in (
        (dict(dropout_p=0.5, rng_seed=torch.zeros(1, dtype=torch.int64)), "dropout_p is 0.5", ValueError),
        (dict(cu_seqlens_q=ints(0, 1), cu_seqlens_k=ints(0, 1)), "cu_seqlens_.* cache_seqlens", RuntimeError),
    ):
        with pytest.raises(exception, match=says):
            _C.attention_with_kvcache(problem(q, k, v, **change), cache)
    with pytest.raises(TypeError, match=r"a tuple with the 8 fields of .*KvCache"):
        _C.attention_with_kvcache(problem(q, k, v), (1, 2))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_that_pytorch_negates_later(name):
    caches = dict(k_cache=torch.zeros(1, 2, 20, 8), v_cache=torch.zeros(1, 2, 20, 8))
    caches[name] = torch.complex(caches[name], caches[name]).conj().imag
    with pytest.raises(RuntimeError, match=rf"{name} is a view that PyTorch computes lazily.*{name}\.clone\(\)"):
        flash_attn_ext.attention_with_kvcache(torch.zeros(1, 2, 1, 8), **caches, cache_seqlens=5)
