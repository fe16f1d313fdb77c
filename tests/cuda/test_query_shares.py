"""Many queries and few keys on Hopper: the key-stationary backward kernel divides the query tiles of a head into
shares, and adds up their partial dK and dV. Edges of tiles and of shares, scores, packed batches, few CTAs, repeated
runs, and NaN."""

import math

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_case, check_on_sm_counts, check_packed_drawn
from support.disturbance import assert_repeats
from support.errors import assert_same_answer
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SM_COUNTS = (1, 5, 31, 132)
RUNS = 20
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))
over_bfloat16 = over_dtypes((torch.bfloat16,))

DIMS = ((64, 64, 4), (128, 128, 2), (96, 40, 1), (40, 64, 2))  # of q and k, of v; key heads
# Of one share; of several shares of one to five key tiles, whose last query tile may be one query.
LENGTHS = ((300, 77), (1024, 20), (1025, 64), (1500, 129), (2049, 256), (4000, 300), (3137, 600))
SCORES = (
    dict(),
    dict(dropout_p=0.2),
    dict(softcap=8.0),
    dict(sink=True, dlse=True),
    dict(bias="b11k", dlse=True),
    dict(mask="b1qk"),  # has no shares
)
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, dv=dv, **SCORES[(n + i) % len(SCORES)])
    for i, (d, dv, kv_heads) in enumerate(DIMS)
    for n, (sq, sk) in enumerate(LENGTHS)
]
EDGES += [Case(sq=1500, sk=sk, heads=2, d=d, **scores) for d in (64, 128) for sk in (80, 200) for scores in SCORES]
EDGES += [Case(sq=1024, sk=1, heads=2, d=d) for d in (64, 128)]
WITH_BIAS = [Case(sq=1600, sk=sk, heads=3, d=64, bias=bias, dlse=True) for sk in (80, 200) for bias in ("1hqk", "11qk")]
PACKED = [
    PackedCase((2000, 0, 65, 704, 64), (304, 40, 129, 0, 1), Case(d=d, heads=4, kv_heads=2, **scores))
    for d in (64, 80, 128)
    for scores in (dict(), dict(softcap=8.0), dict(dropout_p=0.1, dlse=True))
]
FEW_CTAS = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, **scores)
    for d in (64, 96, 128)
    for sq, sk, kv_heads in ((1500, 77, 2), (2100, 300, 4))
    for scores in (dict(), dict(dropout_p=0.2))
]
REPEATED = [
    Case(sq=3000, sk=sk, batch=2, heads=8, kv_heads=kv_heads, d=d, dlse=True, **scores)
    for d, kv_heads in ((64, 8), (96, 4), (128, 2))
    for sk in (77, 400)
    for scores in (dict(), dict(dropout_p=0.1))
]


@over_16_bits
@over_cases(EDGES + WITH_BIAS)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"), gpu)


@over_bfloat16
@over_cases(FEW_CTAS)
def test_few_ctas(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_bfloat16
@over_cases(REPEATED)
def test_repeats(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


@over_bfloat16
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
