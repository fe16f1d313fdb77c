"""Hopper's single-tile forward kernels, whose key tile holds all keys of a sequence: each number of keys that a kernel
is compiled for, work tiles of few and of many query tiles, lengths that differ, masks and biases of keys, ALiBi, and
NaN."""

import math

import pytest
import torch

from support.cases import Case, Inputs, make_inputs, without_dbias
from support.checks import check_case, check_drawn, check_hidden_keys, check_on_sm_counts, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed, run_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SM_COUNTS = (1, 2, 7, 132)
RUNS = 100
pytestmark = pytest.mark.usefixtures("on_hopper")
over_16_bits = over_dtypes((torch.bfloat16, torch.float16))

# Kernels hold 80, 96, 128, 160, 192, 208 and 256 keys at head dim 64, 80 and 128 at 128, and 80 at 192.
KEYS = (1, 64, 65, 80, 81, 96, 97, 127, 128, 129, 160, 161, 192, 193, 197, 208, 209, 255, 256)
QUERIES = (65, 1, 63, 64, 128, 129, 192, 257, 700)
EDGES = [
    Case(sq=QUERIES[(i + j) % len(QUERIES)], sk=sk, heads=3, d=d, dv=dv)
    for j, (d, dv) in enumerate(((64, 64), (40, 64), (64, 24), (8, 8), (60, 50)))
    for i, sk in enumerate(KEYS)
]
WIDE_EDGES = [
    Case(sq=QUERIES[(i + j) % len(QUERIES)], sk=sk, heads=3, d=d, dv=dv)
    for j, (d, dv) in enumerate(((128, 128), (80, 96), (65, 66), (40, 128), (128, 8)))
    for i, sk in enumerate((1, 33, 64, 77, 80, 81, 100, 127, 128))
] + [
    Case(sq=sq, sk=sk, heads=3, d=d, dv=dv)
    for d, dv in ((160, 160), (192, 136), (130, 192))
    for sq, sk in ((65, 1), (128, 64), (70, 80), (300, 77), (129, 79))
]
VISIBLE = (
    [
        Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=64, sink=sink, dlse=sink, **visible)
        for sq, sk, kv_heads, sink in ((100, 100, 4, False), (129, 160, 2, True), (300, 77, 1, True))
        for visible in (dict(causal="top_left"), dict(causal="bottom_right"))
    ]
    + [
        Case(sq=sq, sk=sk, heads=4, kv_heads=2, d=64, window=window)
        for sq, sk in ((197, 197), (256, 256), (70, 250))
        for window in ((9, 9), (100, 30), (0, 0))
    ]
    + [
        Case(sq=sq, sk=sk, heads=4, kv_heads=2, d=d, sink=sink, dlse=sink, **visible)
        for d, sq, sk in ((128, 50, 50), (80, 128, 128), (128, 90, 120), (160, 70, 80))
        for sink in (False, True)
        for visible in (dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(9, 30)))
    ]
)
PACKED = [
    PackedCase(queries, keys, Case(d=d, heads=4, kv_heads=2, **visible))
    for d, queries, keys in (
        *((d, (197, 0, 65, 130, 1, 64), (197, 40, 129, 0, 30, 208)) for d in (64, 40)),
        *((d, (30, 77, 12, 128), (30, 77, 12, 128)) for d in (64, 40, 128)),
        *((d, (300, 5, 64, 700), (77, 77, 1, 20)) for d in (64, 40, 128, 72, 160)),
    )
    for visible in (dict(), dict(window=(50, 20)))
]
MASKED_PACKED = [
    PackedCase(queries, keys, Case(d=d, heads=4, kv_heads=2, dlse=True, **bias))
    for d, queries, keys in (
        (64, (197, 0, 65, 130, 1, 64), (197, 40, 129, 0, 30, 208)),
        (128, (300, 5, 64, 700), (77, 77, 1, 20)),
    )
    for bias in (dict(mask="b11k"), dict(mask="bh1k", sink=True), dict(bias="b11k"), dict(bias="1h1k"))
]
ALIBI_PACKED = [
    PackedCase(queries, keys, Case(d=d, heads=4, kv_heads=2, alibi=alibi, **visible))
    for d, queries, keys in (
        *((d, (60, 77, 12, 0, 80), (60, 77, 12, 0, 80)) for d in (64, 128)),
        *((d, (30, 77, 12, 128), (50, 40, 12, 120)) for d in (40, 128)),
        (64, (197, 0, 65, 130, 1, 64), (197, 40, 129, 0, 30, 208)),
        (64, (256, 1, 90, 5), (256, 200, 90, 5)),
    )
    for alibi, visible in (("h", dict()), ("bh", dict(window=(50, 20))))
]
WORK_TILES = [
    Case(sq=sq, sk=sk, batch=batch, heads=4, kv_heads=2, d=64)
    for sq, sk in ((197, 197), (1500, 77), (256, 256))
    for batch in (1, 5)
]
WORK_TILES += [
    Case(sq=sq, sk=sk, batch=3, heads=4, d=d) for sq, sk, d in ((50, 50, 128), (700, 128, 96), (500, 77, 160))
]
WORK_TILES += [
    Case(sq=sq, sk=sk, batch=5, heads=4, d=d, **bias)
    for sq, sk, d in ((197, 197, 64), (1500, 77, 64), (70, 128, 128))
    for bias in (dict(mask="b11k"), dict(bias="bh1k"))
]
WORK_TILES += [
    Case(sq=sq, sk=sk, batch=5, heads=4, d=d, alibi="bh")
    for sq, sk, d in ((70, 80, 64), (1500, 77, 64), (128, 128, 40), (150, 150, 64), (300, 208, 64), (256, 256, 64))
]
WORK_TILES += [Case(sq=sq, sk=sk, batch=5, heads=4, d=128, alibi="h") for sq, sk in ((16, 16), (80, 80), (700, 128))]
# Kernels with a key bias hold 80, 128, 160, 208 and 256 keys at head dim 64, and 80 and 128 at 128. A mask of keys is
# such a bias.
KEY_BIAS_OPTIONS = (
    dict(mask="b11k"),
    dict(bias="bh1k", dlse=True),
    dict(mask="bh1k", sink=True),
    dict(bias="b11k"),
    dict(mask="b11k", padding=True, dlse=True),
    dict(bias="111k", sink=True),
    dict(mask="1h1k"),
)
ALIBI_OPTIONS = (dict(), dict(window=(30, 9)), dict(sink=True, dlse=True))
KEY_BIASES = [
    Case(sq=QUERIES[1:][(i + j) % 8], sk=sk, heads=4, kv_heads=2, d=d, **KEY_BIAS_OPTIONS[(i + 2 * j) % 7])
    for j, (d, keys) in enumerate(((64, KEYS), (40, KEYS), (128, KEYS[:9]), (72, KEYS[:9])))
    for i, sk in enumerate(keys)
]
# Kernels with ALiBi hold as many keys as those with a key bias. Causal calls have at most 160.
ALIBI = [
    Case(sq=QUERIES[(i + j) % 9], sk=sk, heads=4, kv_heads=2, d=d, alibi=("h", "bh")[i % 2], **options)
    for j, (d, keys) in enumerate(((64, KEYS), (40, KEYS), (128, KEYS[:9]), (72, KEYS[:9])))
    for i, sk in enumerate(keys)
    for options in (ALIBI_OPTIONS[(i + j) % 3], dict(causal=("top_left", "bottom_right")[(i + j) % 2]))
    if sk <= 160 or "causal" not in options
]
MASKS_BESIDE_VISIBILITY = [
    Case(sq=sq, sk=sk, heads=4, d=d, mask="b11k", **visible)
    for d, sq, sk in ((64, 100, 100), (64, 129, 160), (128, 90, 120))
    for visible in (dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(9, 30)))
]


@over_16_bits
@over_cases(EDGES + WIDE_EDGES)
def test_edges_of_tiles(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(VISIBLE)
def test_causality_and_windows(case, dtype, gpu):
    check_case(case, dtype, gpu)


@over_16_bits
@over_cases(KEY_BIASES + MASKS_BESIDE_VISIBILITY)
def test_key_biases(case, dtype, gpu):
    check_drawn(lambda seed: without_dbias(make_inputs(case, dtype, "cuda", seed)), gpu)


@over_16_bits
@over_cases(ALIBI)
def test_alibi(case, dtype, gpu):
    check_drawn(lambda seed: make_inputs(case, dtype, "cuda", seed), gpu)


@over_16_bits
@pytest.mark.parametrize("value", ["-inf", "finfo.min", "-1e9", "-1e6", "-1e5", "-1e4", "-4e3", "-300", "4e3", "3e4"])
@pytest.mark.parametrize(("d", "sk"), [(64, 80), (64, 250), (40, 200), (72, 100), (80, 70), (96, 120), (128, 128)])
def test_key_biases_of_empty_and_large_entries(d, sk, value, dtype, gpu):
    """The first batch entry has nothing else, the second one from a key on, the third one in its first 160 keys."""
    number = torch.tensor(torch.finfo(dtype).min if value == "finfo.min" else float(value)).to(dtype)
    if value != "-inf" and number == -math.inf:
        pytest.skip(f"{value} is -inf in {dtype}")

    def draw(seed: int) -> Inputs:
        inputs = make_inputs(Case(sq=130, sk=sk, batch=3, heads=2, d=d, bias="b11k", dlse=True), dtype, "cuda", seed)
        inputs.bias[0] = number
        inputs.bias[1, ..., sk - 30 :] = number
        inputs.bias[2, ..., : min(sk - 30, 160)] = number
        return without_dbias(inputs)

    check_drawn(draw, gpu)
    if value == "-inf":
        result = run_ours(draw(0), gpu)
        assert bool((result["lse"][0] == -math.inf).all()) and bool((result["out"][0] == 0).all())


@over_dtypes((torch.bfloat16,))
@over_cases(PACKED + MASKED_PACKED + ALIBI_PACKED)
def test_packed(case, dtype, gpu):
    check_packed_drawn(case, lambda seed: without_dbias(make_packed(case, dtype, "cuda", seed, draw_on="cuda")), gpu)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("d", [64, 128])
def test_large_scores_of_the_next_sequence(d, dtype, gpu):
    """Rows of large scores are recomputed, but not those of the sequence before, whose tile holds some of them, too."""
    case = PackedCase((70, 200), (80, 80), Case(d=d, heads=2, bias="b11k"))
    inputs = without_dbias(make_packed(case, dtype, "cuda"))
    q = inputs.q.clone()
    q[70:] *= 1e4
    expected, result = (run_packed(case, each, gpu) for each in (inputs, inputs.replace(q=q)))
    assert torch.equal(result["out"][:70], expected["out"][:70])
    assert torch.equal(result["lse"][:, :70], expected["lse"][:, :70])


@over_dtypes((torch.bfloat16,))
@over_cases(WORK_TILES)
def test_work_tiles(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch, of=without_dbias)


@over_dtypes((torch.bfloat16,))
@over_cases(
    [Case(sq=sq, sk=sk, batch=40, heads=12, d=64) for sq, sk in ((197, 197), (128, 128), (500, 77), (256, 256))]
    + [Case(sq=sq, sk=sk, batch=40, heads=12, d=d) for sq, sk, d in ((50, 50, 128), (128, 128, 80), (200, 77, 160))]
    + [
        Case(sq=sk, sk=sk, batch=40, heads=12, d=d, **bias)
        for sk, d in ((80, 64), (128, 64), (256, 64), (128, 80))
        for bias in (dict(mask="b11k"), dict(bias="b11k"), dict(alibi="h"))
    ]
)
def test_repeats(case, dtype, gpu):
    assert_repeats(without_dbias(make_inputs(case, dtype, "cuda", draw_on="cuda")), gpu, RUNS)


@over_16_bits
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(("sq", "sk", "d"), [(70, 90, 64), (100, 150, 64), (70, 90, 128), (30, 60, 80), (70, 80, 160)])
@pytest.mark.parametrize("alibi", [None, "h"])
def test_nan_in_what_no_query_attends(sq, sk, d, alibi, poison, dtype, gpu):
    inputs = make_inputs(Case(sq=sq, sk=sk, batch=20, heads=12, d=d, causal="top_left", alibi=alibi), dtype, "cuda")
    check_hidden_keys(inputs, sq, poison, gpu)


@over_16_bits
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(("sk", "d"), [(80, 64), (200, 64), (256, 64), (120, 128)])
def test_nan_in_what_a_mask_hides(sk, d, poison, dtype, gpu):
    inputs = make_inputs(Case(sq=130, sk=sk, batch=20, heads=4, d=d, mask="b11k"), dtype, "cuda")
    inputs.mask[..., sk - 20 :] = False
    check_hidden_keys(inputs, sk - 20, poison, gpu)
