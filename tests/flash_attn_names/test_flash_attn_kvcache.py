"""flash_attn_with_kvcache: what each argument does, by the reference in float64 on each sequence's own keys."""

import inspect

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.integrations.flash_attn import flash_attn_with_kvcache
from flash_attn_ext.reference import attention_reference

BATCH, QUERIES, HEADS, KEY_HEADS, HEAD_DIM, CAPACITY, PAGE = 3, 5, 4, 2, 16, 64, 16
LENGTHS = (17, 0, 41)
ENTRIES = (3, 0, 2)  # of a cache with four
PAGES = ((7, 2, 9, 4), (1, 0, 11, 10), (3, 8, 5, 6))  # of twelve

ARGUMENTS = {
    "q": inspect.Parameter.empty,
    "k_cache": inspect.Parameter.empty,
    "v_cache": inspect.Parameter.empty,
    "k": None,
    "v": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}

# flash_attn's spelling, and the reference's.
OPTIONS = {
    "none": ({}, {}),
    "softmax_scale": (dict(softmax_scale=0.7), dict(scale=0.7)),
    "causal": (dict(causal=True), dict(causal="bottom_right")),
    "window": (dict(window_size=(3, 2)), dict(window=(3, 2))),
    "left": (dict(window_size=(3, -1)), dict(window=(3, None))),
    "causal_window": (dict(causal=True, window_size=(4, 9)), dict(causal="bottom_right", window=(4, 0))),
    "softcap": (dict(softcap=0.8), dict(softcap=0.8)),
    "alibi": (dict(alibi_slopes="slopes"), dict(alibi_slopes="slopes")),
    "num_splits": (dict(num_splits=7), {}),
}
# Which kind of cache, and whether the call appends.
KINDS = ("contiguous", "entries", "paged")
ROTATIONS = {"no_rotation": None, "interleaved": True, "halves": False}


def random_tensor(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def int32(values, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_caches(kind: str, device: str) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """k and v, and the arguments that say where each sequence is."""
    shape = {"contiguous": (BATCH, CAPACITY), "entries": (4, CAPACITY), "paged": (12, PAGE)}[kind]
    k, v = random_tensor(2, *shape, KEY_HEADS, HEAD_DIM, device=device)
    where = {
        "contiguous": {},
        "entries": dict(cache_batch_idx=int32(ENTRIES, device)),
        "paged": dict(block_table=int32(PAGES, device)),
    }
    return k, v, where[kind]


def of_sequence(cache: torch.Tensor, kind: str, sequence: int) -> torch.Tensor:
    """(capacity, heads_k, headdim), a copy."""
    if kind == "paged":
        return torch.cat([cache[page] for page in PAGES[sequence]])
    return cache[sequence if kind == "contiguous" else ENTRIES[sequence]].clone()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions, interleaved: bool) -> torch.Tensor:
    """x (tokens, heads, headdim): RoFormer, equation 34, on the first columns."""
    cos, sin = (table[positions, None].double() for table in (cos, sin))
    columns = 2 * cos.shape[-1]
    first, second = ((0, 2) if interleaved else (0, 1)), ((1, 2) if interleaved else (columns // 2, 1))
    one = slice(first[0], columns if interleaved else columns // 2, first[1])
    two = slice(second[0], columns, second[1])
    result = x.double().clone()
    result[..., one] = x[..., one] * cos - x[..., two] * sin
    result[..., two] = x[..., one] * sin + x[..., two] * cos
    return result


def expected_of(q, keys, values, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """out (Sq, heads, headdim) and lse (heads, Sq) of one sequence."""
    out, lse = attention_reference(*(t.double()[None] for t in (q, keys, values)), **options, layout="bshd")
    return out[0], lse[0]


def assert_near(result: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), exact.double(), atol=2e-5, rtol=2e-5)


def with_slopes(options: dict, device: str, dtype: torch.dtype = torch.float32) -> dict:
    if "alibi_slopes" not in options:
        return options
    return options | dict(alibi_slopes=torch.linspace(0.1, 0.9, HEADS).to(device, dtype))


def test_arguments_order_and_defaults():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    assert {name: p.default for name, p in parameters.items()} == ARGUMENTS
    assert list(parameters) == list(ARGUMENTS)
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_there(kind, option, device):
    k_cache, v_cache, where = make_caches(kind, device)
    before = k_cache.clone(), v_cache.clone()
    q = random_tensor(BATCH, QUERIES, HEADS, HEAD_DIM, device=device)
    theirs, ours = OPTIONS[option]
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=int32(LENGTHS, device),
        return_softmax_lse=True,
        **where,
        **with_slopes(theirs, device),
    )
    for sequence, length in enumerate(LENGTHS):
        keys, values = (of_sequence(cache, kind, sequence)[:length] for cache in (k_cache, v_cache))
        exact, exact_lse = expected_of(q[sequence], keys, values, with_slopes(ours, device, torch.float64))
        assert_near(out[sequence], exact)
        assert_near(lse[sequence], exact_lse)
    assert bool((out[1] == 0).all()) and bool((lse[1] == -torch.inf).all())  # no key yet
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@pytest.mark.parametrize("option", ["none", "causal", "left"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_new_keys(kind, rotation, option, device):
    k_cache, v_cache, where = make_caches(kind, device)
    before = k_cache.clone(), v_cache.clone()
    q = random_tensor(BATCH, QUERIES, HEADS, HEAD_DIM, device=device)
    k, v = random_tensor(2, BATCH, QUERIES, KEY_HEADS, HEAD_DIM, device=device)
    theirs, ours = OPTIONS[option]
    interleaved = ROTATIONS[rotation]
    rotary = {}
    if interleaved is not None:
        angles = torch.rand(CAPACITY, HEAD_DIM // 4, device=device) * 6
        cos, sin = angles.cos(), angles.sin()
        rotary = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=int32(LENGTHS, device), **where, **rotary, **theirs
    )
    for sequence, length in enumerate(LENGTHS):
        new_q, new_k = q[sequence], k[sequence]
        if interleaved is not None:
            positions = torch.arange(length, length + QUERIES)
            new_k = rotated(new_k, cos, sin, positions, interleaved)
            new_q = rotated(new_q, cos, sin, positions if theirs else positions[:1], interleaved)
        end = length + QUERIES
        for cache, old, new in ((k_cache, before[0], new_k), (v_cache, before[1], v[sequence])):
            now, then = of_sequence(cache, kind, sequence), of_sequence(old, kind, sequence)
            assert_near(now[length:end], new)
            assert torch.equal(now[:length], then[:length]) and torch.equal(now[end:], then[end:])
        values = of_sequence(v_cache, kind, sequence)[:end]
        keys = torch.cat([of_sequence(before[0], kind, sequence)[:length].double(), new_k.double()])
        exact, _ = expected_of(new_q, keys, values, ours)
        assert_near(out[sequence], exact)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_of_all_sequences_together(kind, device):
    """An int, and None for the whole capacity."""
    k_cache, v_cache, where = make_caches(kind, device)
    q = random_tensor(BATCH, 1, HEADS, HEAD_DIM, device=device)
    for given, length in ((None, CAPACITY), (9, 9)):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=given, **where)
        lengths = int32([length] * BATCH, device)
        assert torch.equal(out, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **where))


def test_generation_token_by_token_is_one_causal_call(device):
    q = random_tensor(BATCH, CAPACITY, HEADS, HEAD_DIM, device=device)
    k, v = random_tensor(2, BATCH, CAPACITY, KEY_HEADS, HEAD_DIM, device=device)
    k_cache, v_cache = (torch.full_like(k, torch.nan) for _ in range(2))
    lengths, steps, start = int32([0] * BATCH, device), [], 0
    for new in (30, 1, 1, 5):
        now = slice(start, start + new)
        options = dict(cache_seqlens=lengths, causal=True)
        steps.append(flash_attn_with_kvcache(q[:, now], k_cache, v_cache, k[:, now], v[:, now], **options))
        lengths, start = lengths + new, start + new
    exact = flash_attn_ext.attention(q[:, :start], k[:, :start], v[:, :start], causal="bottom_right", layout="bshd")
    torch.testing.assert_close(torch.cat(steps, dim=1), exact)


WRONG = {
    "leftpad": (dict(cache_leftpad=[0]), NotImplementedError, "cache_leftpad must be None.*cache_seqlens"),
    "causal": (dict(causal="bottom_right"), TypeError, "causal must be True or False, got 'bottom_right'"),
    "interleaved": (dict(rotary_interleaved=1), TypeError, "rotary_interleaved must be True or False, got 1"),
    "return_lse": (dict(return_softmax_lse=None), TypeError, "return_softmax_lse must be True or False"),
    "splits": (dict(num_splits=1.5), TypeError, "num_splits must be an int or None, got 1.5"),
    "window": (dict(window_size=(-2, 0)), ValueError, r"window_size must be .* got \(-2, 0\)"),
    "softcap": (dict(softcap=-1.0), ValueError, "softcap is -1, expected"),
    "scale": (dict(softmax_scale="1"), TypeError, "softmax_scale must be a number"),
    "lengths": (dict(cache_seqlens=65), ValueError, "cache_seqlens is 65, expected 0 to 64"),
    "lengths_dtype": (
        dict(cache_seqlens=torch.ones(2)),
        RuntimeError,
        "cache_seqlens has dtype float32, expected int32",
    ),
    "new_without_length": (
        dict(k=torch.ones(2, 1, 2, 8), v=torch.ones(2, 1, 2, 8)),
        RuntimeError,
        "cache_seqlens must be given with k and v, got None",
    ),
    "k_alone": (dict(k=torch.ones(2, 1, 2, 8), cache_seqlens=3), RuntimeError, "only k_new was given"),
    "cos_without_k": (
        dict(rotary_cos=torch.ones(64, 4), rotary_sin=torch.ones(64, 4)),
        RuntimeError,
        "rotary_cos was given without k_new",
    ),
    "index_with_pages": (
        dict(block_table=torch.zeros(2, 1).int(), cache_batch_idx=torch.zeros(2).int()),
        RuntimeError,
        "block_table and cache_batch_idx were both given",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    options, error, message = WRONG[case]
    cache = torch.zeros(2, 64, 2, 8)
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(torch.zeros(2, 1, 4, 8), cache, cache.clone(), **options)


def test_shapes():
    q, cache = torch.zeros(2, 1, 4, 8), torch.zeros(2, 64, 2, 8)
    with pytest.raises(RuntimeError, match=r"q must be \(batch, seqlen_q, heads, headdim\), got shape \(1, 4, 8\)"):
        flash_attn_with_kvcache(q[0], cache, cache)
    with pytest.raises(RuntimeError, match=r"v_cache must be \(batch_cache, capacity, heads_k, headdim\)"):
        flash_attn_with_kvcache(q, cache, cache[0])
    with pytest.raises(RuntimeError, match=r"k_cache must be \(num_pages, page_size, heads_k, headdim\)"):
        flash_attn_with_kvcache(q, cache[0], cache, block_table=torch.zeros(2, 1).int())


def test_gradients_are_refused():
    q, cache = torch.zeros(2, 1, 4, 8, requires_grad=True), torch.zeros(2, 64, 2, 8)
    with pytest.raises(RuntimeError, match="q requires grad, but attention_with_kvcache has no backward pass"):
        flash_attn_with_kvcache(q, cache, cache)
    with torch.no_grad():
        assert flash_attn_with_kvcache(q, cache, cache).shape == q.shape
