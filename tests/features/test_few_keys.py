"""Many queries and few keys: images that attend to a text, sets of a few tokens, a single key.

On the CPU up to 8 keys are multiplied where they lie, and up to 256, a tile, are packed by each thread.
"""

import math

import pytest
import torch

from support.caches import CacheCase, check_cache_case
from support.cases import Case, make_inputs
from support.checks import check_case, check_packed_drawn
from support.errors import assert_same_answer
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours, run_reference
from support.terms import largest_terms

COUNTS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 77, 256, 257)
SHAPES = [
    *(Case(sq=200, sk=sk, d=64, dlse=sk % 2 == 0) for sk in COUNTS),
    *(Case(sq=130, sk=sk, d=d, dv=dv, heads=4, kv_heads=2) for sk in (1, 4, 8, 20) for d, dv in ((32, 128), (71, 9))),
    *(Case(sq=sq, sk=sq, d=64, batch=40, heads=3) for sq in (1, 3, 8, 17, 50)),  # sets
    *(Case(sq=3, sk=3, d=d, dv=7, batch=5, heads=6, kv_heads=2) for d in (1, 2, 33)),
    Case(sq=1000, sk=77, d=64, heads=3),
]
FEATURES = [
    Case(sq=150, sk=sk, d=32, heads=4, kv_heads=2, **features)
    for sk in (1, 6, 40)
    for features in (
        dict(causal="top_left", dlse=True),
        dict(causal="bottom_right"),  # whose first queries see nothing
        dict(window=(2, 1)),
        dict(causal="bottom_right", window=(3, 0), sink=True),
        dict(bias="bhqk"),
        dict(bias="1h1k", mask="b1qk", dlse=True),
        dict(bias="11qk", causal="top_left"),
        dict(mask="b11k", mask_keep=0.3, sink=True),
        dict(alibi="bh", softcap=5.0),
        dict(dropout_p=0.3, sink=True, dlse=True),
        dict(scale=-0.7),
        dict(scale=0.0),
    )
]
PACKED = [
    PackedCase((70, 5, 0, 200), (3, 8, 4, 0), Case(d=32, heads=4, kv_heads=2, **features))
    for features in (dict(), dict(causal="bottom_right", sink=True), dict(bias="bhqk", dlse=True))
] + [
    PackedCase((3,) * 60, (3,) * 60, Case(d=64, heads=2)),
    PackedCase((300, 70), (77, 0), Case(d=64, heads=2, causal="top_left")),
]


@over_dtypes()
@over_cases(SHAPES)
def test_shapes(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(FEATURES)
def test_features(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(PACKED)
def test_packed(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases([CacheCase((3, 0, 8, 5), 2, 16, page_size, base=Case(sq=2, d=64, heads=40)) for page_size in (None, 16)])
def test_caches(case, dtype, backend):
    check_cache_case(case, dtype, backend)


@over_dtypes()
@pytest.mark.parametrize("sk", [2, 6, 40])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_hidden_key_reaches_nothing(value, sk, dtype, backend):
    """Queries, too, whose rows are not finite spoil no key that they do not see."""
    inputs = make_inputs(Case(sq=150, sk=sk, d=64, mask="111k"), dtype, backend.device)
    inputs.mask[...] = torch.arange(sk, device=backend.device) != 1
    clean = run_ours(inputs, backend)
    doubles = inputs.to(torch.float64)
    terms = largest_terms(doubles, run_reference(doubles))  # of one visible key, gradients of q and k cancel
    for tensor in (inputs.k, inputs.v):
        tensor[:, :, 1] = value
    for name, tensor in run_ours(inputs, backend).items():
        assert_same_answer(tensor, clean[name], backend, name, terms=terms.get(name, 0.0))
    inputs.q[:, :, 70] = value
    spoilt = run_ours(inputs, backend)
    for name in ("dk", "dv"):
        assert not bool(spoilt[name][:, :, 1].any())


@pytest.mark.parametrize("d", [32, 64, 200])
def test_one_key_has_weight_1(d, backend):
    """In both passes, and dP and delta are the same dots: nothing reaches q and k."""
    if not backend.is_cpu:
        pytest.skip("a GPU's product with 1 is the sum of two TF32 products")
    inputs = make_inputs(Case(sq=300, sk=1, d=d), torch.float32, backend.device)
    result = run_ours(inputs, backend)
    assert torch.equal(result["out"], inputs.v.expand_as(result["out"]))
    assert not bool(result["dq"].any()) and not bool(result["dk"].any())
