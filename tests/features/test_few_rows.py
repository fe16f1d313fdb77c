"""Few queries or few keys, where PyTorch's products add up in many short sums: float32 has to be as exact."""

import pytest
import torch

from support.caches import CacheCase, check_cache_case
from support.cases import Case, Inputs, make_inputs
from support.checks import check_case, check_packed_drawn, compare_with_pytorch
from support.errors import assert_rule, pooled
from support.packed import PackedCase, make_packed
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours

DRAWS = 8

# On the CPU, keys of few queries are divided in parts of 2048; up to 32 rows of a key head's group are worked on
# together, and up to 64 queries share the parts.
LONG = [Case(sq=1, sk=sk, d=64, batch=1, heads=4, kv_heads=2) for sk in (2047, 2048, 2049, 4096, 4097)] + [
    Case(sq=sq, sk=4097, d=d, dv=dv, batch=1, heads=heads, kv_heads=kv_heads)
    for sq, heads, kv_heads, d, dv in (
        (8, 8, 2, 128, None),
        (9, 8, 2, 72, 40),
        (32, 2, 2, 40, 64),
        (33, 2, 1, 64, None),
        (64, 1, 1, 128, None),
        (65, 1, 1, 64, None),
    )
]
LONG += [Case(sq=1, sk=2049, d=24, batch=1, heads=33, kv_heads=1)]
# More heads in a KV group than a tile of packed rows has.
LONG += for_gpus(
    Case(**(dict(sq=1, sk=1100, d=64, batch=2, heads=71, kv_heads=1) | features))
    for features in (
        dict(),
        dict(sq=16, causal="bottom_right"),
        dict(sq=4, d=576, dv=512, heads=128),
        dict(sq=8, d=96, heads=64, kv_heads=4, sink=True),
        dict(sq=3, d=200, mask="b11k"),
    )
)
LONG += for_gpus(
    [
        *(Case(sq=1, sk=4097, d=d, batch=1, heads=33, kv_heads=1) for d in (24, 128)),
        Case(sq=1, sk=8192, d=64, batch=1, heads=4, kv_heads=2),
    ]
)
LONG_FEATURES = [
    Case(sq=sq, sk=4500, d=32, batch=2, heads=4, kv_heads=2, **features)
    for sq in (5, 40)
    for features in (
        dict(causal="bottom_right", dlse=True),
        dict(causal="top_left"),
        dict(causal="bottom_right", window=(500, 0)),
        dict(window=(3000, 10), causal="bottom_right"),
        dict(bias="bhqk"),
        dict(bias="1h1k", mask="b1qk", dlse=True),
        dict(mask="b11k", mask_keep=0.001, sink=True),
        dict(alibi="bh", softcap=5.0),
        dict(dropout_p=0.3, sink=True, dlse=True),
    )
]
# Where a GPU divides the keys of dQ: head dims and score modes whose dQ comes from different kernels.
LONG_BACKWARD = [
    *(Case(sq=sq, sk=4500, d=64, batch=1, heads=2, kv_heads=1) for sq in (17, 100, 300)),
    *for_gpus(Case(sq=sq, sk=4500, d=d, batch=1, heads=2, kv_heads=1) for sq in (17, 100, 300) for d in (96, 128, 200)),
]
LONG_BACKWARD_FEATURES = [
    dict(causal="bottom_right", window=(3000, 0)),
    dict(causal="top_left", dlse=True),
    dict(mask="b11k"),
    dict(bias="1hqk", dropout_p=0.2),
]
LONG_BACKWARD += for_gpus(
    Case(sq=sq, sk=4500, d=d, heads=4, kv_heads=2, **features)
    for sq, d in ((100, 64), (20, 128), (129, 128), (70, 256))
    for features in LONG_BACKWARD_FEATURES
)
# Where a GPU divides the keys of all heads: edges of tiles of 64 keys, and of 64 and 128 queries.
LONG_HEADS = [
    *(Case(sq=sq, sk=1025, d=64, batch=1, heads=2) for sq in (1, 65, 128)),
    *for_gpus(Case(sq=sq, sk=1025, d=64, batch=1, heads=2) for sq in (63, 64, 127)),
    *for_gpus(Case(sq=sq, sk=sk, d=64, batch=1, heads=2) for sq in (1, 63, 64, 65, 127, 128) for sk in (1088, 1600)),
    *for_gpus(Case(sq=128, sk=sk, d=128, heads=3, dlse=True) for sk in (1152, 1153, 1215)),
    *for_gpus(
        Case(sq=100, sk=2000, d=d, dv=dv, heads=3, **features)
        for d, dv in ((40, 64), (96, 96), (120, 16))
        for features in (dict(), dict(dlse=True, sink=True))
    ),
]
LONG_PACKED = [
    PackedCase((1, 5, 0, 33), (5000, 2049, 17, 0), Case(d=32, heads=4, kv_heads=2, **features))
    for features in (dict(), dict(causal="bottom_right", sink=True), dict(bias="bhqk", dlse=True))
] + [
    PackedCase((1, 2), (4097, 100), Case(d=64, heads=4, kv_heads=2, causal="bottom_right")),
    PackedCase((100, 0, 64, 3), (5000, 300, 0, 1025), Case(d=64, heads=4, kv_heads=2)),
    PackedCase((100, 7, 130), (4097, 5, 2049), Case(d=128, heads=4, kv_heads=2, causal="bottom_right")),
]
LONG_CACHES = [
    CacheCase((4097, 100, 0, 2047), new, 6144, page_size, base=Case(sq=sq, d=64, heads=4, kv_heads=2, **features))
    for new, sq, features in (
        (1, 1, dict(causal="bottom_right")),
        (9, 9, dict(causal="bottom_right", window=(2500, 0), sink=True)),
        (0, 5, dict(causal=None, bias="1h1k")),
    )
    for page_size in (None, 16, 512)
]


def with_large_scores(case: Case, device: str, seed: int) -> Inputs:
    """Standard deviation 3: scores of 9 sqrt(d), whose rounding errors are those of the weights."""
    inputs = make_inputs(case, torch.float32, device, seed)
    return inputs.replace(q=3 * inputs.q, k=3 * inputs.k, v=3 * inputs.v)


@over_cases(
    [
        *(Case(sq=sq, sk=128, d=d, batch=1, heads=16) for sq in (1, 2, 3) for d in (64, 128, 200, 256)),
        *(Case(sq=1, sk=300, d=d, batch=1, heads=16, kv_heads=2) for d in (64, 128)),
        Case(sq=1, sk=4097, d=128, batch=1, heads=4),
        *(Case(sq=64, sk=sk, d=d, batch=1, heads=8) for sk in (1, 3) for d in (64, 128)),
        Case(sq=128, sk=128, d=256, batch=1, heads=4),
        Case(sq=65, sk=300, d=256, batch=1, heads=4),  # a tile of one query after one of 64
    ]
)
def test_mean_error_in_float32(case, backend):
    """Over several draws, since a few rows average little."""

    def draw(seed: int):
        inputs = with_large_scores(case, backend.device, seed)
        return compare_with_pytorch(inputs, backend, run_ours(inputs, backend))

    assert_rule(pooled([draw(seed) for seed in range(DRAWS)]))


# On the CPU, float16 differs from bfloat16 in conversions alone, and float64 from float32 in the type of its numbers.
# test_long_caches has both with divided keys.
@over_dtypes((torch.float32, torch.bfloat16, *for_gpus([torch.float16, torch.float64])))
@over_cases(LONG)
def test_long_keys(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float32, *for_gpus([torch.bfloat16])))
@over_cases(LONG_FEATURES)
def test_features_of_long_keys(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(LONG_BACKWARD)
def test_gradients_of_long_keys(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(LONG_HEADS)
def test_gradients_of_heads_with_long_keys(case, dtype, backend):
    check_case(case, dtype, backend)


@pytest.mark.parametrize("mebibytes", for_gpus(["0", "2"]))
@over_dtypes((torch.float32, torch.bfloat16))
@over_cases([Case(sq=100, sk=4500, d=128, batch=1, heads=4, kv_heads=2, causal="bottom_right")])
def test_long_keys_in_a_small_workspace(case, dtype, mebibytes, monkeypatch, backend):
    """Scores of one head at a time are materialised, or none."""
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    check_case(case, dtype, backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(LONG_PACKED)
def test_packed_long_keys(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes()
@over_cases(LONG_CACHES)
def test_long_caches(case, dtype, backend):
    check_cache_case(case, dtype, backend)


@pytest.mark.parametrize("d", [32, 64, 80, 128, 200])
def test_a_single_key_has_weight_1(d, backend):
    """The backward pass forms P = exp(score - lse) again: with one key it is exp(0), and dv is dout bit by bit."""
    if not backend.is_cpu:
        pytest.skip("a GPU's product with 1 is the sum of two TF32 products")
    inputs = with_large_scores(Case(sq=1, sk=1, d=d, batch=3, heads=5), backend.device, seed=0)
    result = run_ours(inputs, backend)
    assert torch.equal(result["out"], inputs.v)
    assert torch.equal(result["dv"], inputs.dout)
