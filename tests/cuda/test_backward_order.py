"""Hopper's key-stationary backward kernel, whose CTAs add to dQ in a fixed order: edges of tiles, few CTAs, few keys
whose queries are divided into shares, and NaN.

CTAs wait for each other. FLASH_ATTN_EXT_MULTIPROCESSORS has a plan made for a GPU with so many SMs, and as many CTAs
are launched. Whatever that number is, the launch comes to an end. Its gradients obey the error rule and are bitwise
reproducible.
"""

import math
import subprocess
import sys

import pytest
import torch

import flash_attn_ext
from support.backends import SM90, not_runnable_because
from support.cases import Case, make_inputs
from support.checks import (
    SM_COUNT_SWITCH,
    check_case,
    check_hidden_keys,
    check_on_sm_counts,
    check_packed_drawn,
)
from support.disturbance import assert_repeats
from support.errors import assert_same_answer
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SM_COUNTS = (1, 2, 3, 7, 20, 31, 132)
RUNS = 100
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

LENGTHS = ((257, 257), (320, 319), (383, 65), (512, 1), (513, 640), (300, 1500), (1100, 700))
# More than 8 keys for each query: dQ accumulators for each phase, where enough keys are visible.
FEW_QUERIES = ((1, 9), (1, 1024), (7, 1030), (64, 1153), (65, 1100), (129, 2049))
MASKS = (
    dict(),
    dict(causal="top_left"),
    dict(causal="bottom_right"),
    dict(window=(100, 30)),
    dict(window=(None, 70)),
    dict(window=(200, None)),
    dict(window=(0, 0)),
    dict(window=(64, 0), causal="bottom_right"),
)
EDGES = [
    Case(sq=sq, sk=sk, batch=1, heads=2, kv_heads=kv_heads, d=d, dv=dv, **mask)
    for (d, dv, kv_heads) in ((64, 64, 2), (128, 128, 1), (96, 40, 2))
    for sq, sk in LENGTHS + FEW_QUERIES
    for mask in MASKS
]
# Few keys: of one share, and of several shares of one to five key tiles, whose last query tile may be one query.
FEW_KEYS = ((300, 77), (1024, 20), (1025, 64), (1500, 129), (2049, 256), (4000, 300), (3137, 600))
SCORES = (
    dict(),
    dict(dropout_p=0.2),
    dict(softcap=8.0),
    dict(sink=True, dlse=True),
    dict(bias="b11k", dlse=True),
    dict(mask="b11k", padding=True),
    dict(mask="b1qk"),  # has no shares
)
SHARES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, dv=dv, **SCORES[(n + i) % len(SCORES)])
    for i, (d, dv, kv_heads) in enumerate(((64, 64, 4), (128, 128, 2), (96, 40, 1), (40, 64, 2)))
    for n, (sq, sk) in enumerate(FEW_KEYS)
]
SHARES += [Case(sq=1500, sk=sk, heads=2, d=d, **scores) for d in (64, 128) for sk in (80, 200) for scores in SCORES]
SHARES += [Case(sq=1600, sk=sk, heads=3, d=64, bias=bias, dlse=True) for sk in (80, 200) for bias in ("1hqk", "11qk")]
SHARES += [Case(sq=1024, sk=1, heads=2, d=d) for d in (64, 128)]
SHARES += [
    Case(sq=3000, sk=sk, heads=3, d=64, mask=mask, padding=True) for sk in (77, 300, 1000) for mask in ("1h1k", "111k")
]
PACKED = [
    PackedCase(lengths_q, lengths_k, Case(d=d, heads=4, kv_heads=2, dlse=True, **mask))
    for d in (64, 80, 128)
    for lengths_q, lengths_k in (
        ((300, 0, 65, 700, 64), (300, 40, 129, 500, 0)),
        ((1, 1000, 63), (1, 1000, 300)),
        ((3, 0, 65, 70, 64), (900, 40, 1290, 2000, 0)),
    )
    for mask in MASKS[:4]
] + [
    # So long that each query head of a group is a work tile of its own.
    PackedCase((1100, 0, 65, 1300), (1100, 40, 129, 1300), Case(d=d, heads=8, kv_heads=2, causal="bottom_right"))
    for d in (64, 80, 128)
]
PACKED += [
    PackedCase((2000, 0, 65, 704, 64), (304, 40, 129, 0, 1), Case(d=d, heads=4, kv_heads=2, **scores))
    for d in (64, 80, 128)
    for scores in (dict(), dict(softcap=8.0), dict(dropout_p=0.1, dlse=True))
]
# One sequence is so long that only the work tiles that exist are listed.
SHORT = (1, 40, 0, 65, 129, 7, 64, 33, 200, 3, 0, 77) * 3
PACKED += [
    PackedCase((*SHORT, 2500), (*SHORT, 2500), Case(d=d, heads=8, kv_heads=4, **mask))
    for d in (64, 96, 128)
    for mask in MASKS[:4]
]
FEW_CTAS = [
    Case(sq=sq, sk=sk, batch=2, heads=4, kv_heads=kv_heads, d=d, **mask)
    for d in (64, 80, 128)
    for sq, sk, kv_heads in ((1000, 1300, 2), (700, 2100, 4), (1200, 1200, 1), (100, 3000, 2))
    for mask in (dict(), dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(200, 200)))
]
FEW_CTAS += [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, **scores)
    for d in (64, 96, 128)
    for sq, sk, kv_heads in ((1500, 77, 2), (2100, 300, 4))
    for scores in (dict(), dict(dropout_p=0.2))
]
REPEATED = [
    Case(sq=sq, sk=sk, batch=3, heads=8, kv_heads=kv_heads, d=d, dlse=True, **mask)
    for sq, sk in ((1100, 1500), (100, 4000))
    for d, kv_heads in ((64, 8), (96, 4), (128, 2))
    for mask in (dict(), dict(causal="bottom_right"), dict(window=(300, 100)))
]
REPEATED += [
    Case(sq=3000, sk=sk, batch=2, heads=8, kv_heads=kv_heads, d=d, dlse=True, **scores)
    for d, kv_heads in ((64, 8), (96, 4), (128, 2))
    for sk in (77, 400)
    for scores in (dict(), dict(dropout_p=0.1))
]


@over_16_bits
@over_cases(EDGES + SHARES)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_dtypes((torch.bfloat16,))
@over_cases(FEW_CTAS)
def test_few_ctas(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


def test_more_sms_than_there_are(monkeypatch):
    """Where every query sees every key, the CTAs of a group wait for each other."""
    if reason := not_runnable_because(SM90):
        pytest.skip(reason)
    monkeypatch.setenv(SM_COUNT_SWITCH, "1000")
    q, k, v = (torch.randn(2, 8, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    flash_attn_ext.attention(q, k, v, causal="top_left").sum().backward()
    refusal = f"{SM_COUNT_SWITCH} is 1000, but cuda:0 has [0-9]+ SMs, .* at most [0-9]+"
    with pytest.raises(ValueError, match=refusal):
        flash_attn_ext.attention(q, k, v).sum().backward()


@over_dtypes((torch.bfloat16,))
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_nan_in_what_no_query_attends(d, poison, dtype, gpu):
    """Causal: the keys behind the last query, and in packed batches what follows a sequence."""
    inputs = make_inputs(Case(sq=700, sk=900, d=d, heads=2, causal="top_left"), dtype, "cuda")
    check_hidden_keys(inputs, 700, poison, gpu)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("sq", [1000, 30000])
@pytest.mark.parametrize("d", [64, 128])
def test_nan_in_padding_of_few_keys(d, sq, poison, dtype, gpu):
    """A mask of keys hides the padding from shares of queries. With 30000 of them, its key tiles are left out."""
    inputs = make_inputs(Case(sq=sq, sk=300, batch=1, d=d, heads=4, mask="b11k"), dtype, "cuda", draw_on="cuda")
    inputs.mask[...] = torch.arange(300, device="cuda") < 120
    check_hidden_keys(inputs, 120, poison, gpu)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("d", [64, 128])
def test_nan_of_a_query_reaches_no_other_query(d, dtype, gpu):
    """But the gradients of all keys."""
    inputs = make_inputs(Case(sq=2000, sk=200, d=d, heads=2), dtype, "cuda")
    clean = run_ours(inputs, gpu)
    inputs.q[:, :, 1000] = math.nan
    spoilt = run_ours(inputs, gpu)
    others = torch.arange(2000, device="cuda") != 1000
    assert_same_answer(spoilt["dq"][:, :, others], clean["dq"][:, :, others], gpu, "dq")
    assert bool(spoilt["dk"].isnan().all()) and bool(spoilt["dv"].isnan().all())


def test_the_first_call_of_a_thread():
    """The forward pass of a short call takes portable kernels: autograd's thread is the first to use TMA."""
    if reason := not_runnable_because(SM90):
        pytest.skip(reason)
    program = """
import torch, flash_attn_ext
q, k, v = (torch.randn(1, 2, 128, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
flash_attn_ext.attention(q, k, v, backend="sm90").sum().backward()
assert bool(q.grad.isfinite().all())
"""
    subprocess.run([sys.executable, "-c", program], check=True)
