"""A bias that is broadcast along queries, as padding masks are that nn.MultiheadAttention and older models add to
scores. On Hopper such calls take kernels of their own, with and without dropout, where every query sees every key and
the bias has q's dtype. Lengths at edges of tiles, rows of the bias at any address, packed sequences, low and empty
batch entries, and NaN."""

import math

import pytest
import torch

from flash_attn_ext import attention
from support.cases import Case, Inputs, make_inputs, without_dbias
from support.checks import check_drawn, check_hidden_keys, check_inputs, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours, run_reference

RUNS = 100
over_16_bits = over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))

# Rows of the bias of an odd length begin at odd addresses.
LENGTHS = ((300, 257), (640, 577), (513, 1096), (290, 1031), (700, 384))
PATTERNS = ("b11k", "bh1k", "1h1k", "111k")
OPTIONS = (dict(), dict(dropout_p=0.2), dict(dlse=True, sink=True), dict(dropout_p=0.1, dlse=True))
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, bias=PATTERNS[(n + m + i) % 4], **options)
    for i, (d, kv_heads) in enumerate(((64, 4), (128, 2), (96, 1), (40, 4)))
    for n, (sq, sk) in enumerate(LENGTHS)
    for m, options in enumerate(OPTIONS)
]
ON_CPU = EDGES[60::7]
# All keys in one tile.
SHORT = [
    Case(sq=sq, sk=sk, heads=4, d=d, bias=bias, dlse=True)
    for d, bias in ((64, "b11k"), (128, "bh1k"))
    for sq, sk in ((130, 77), (65, 128), (200, 197))
]
# What else changes scores, or hides keys by position, is for other kernels.
BESIDE_OTHERS = [
    Case(sq=300, sk=420, heads=4, d=d, bias="b11k", **options)
    for d in (64, 128)
    for options in (dict(causal="bottom_right"), dict(window=(70, 9)), dict(mask="b1qk"), dict(alibi="h"))
]
PACKED = [
    PackedCase((300, 0, 65, 704, 64), (303, 40, 129, 504, 0), Case(d=d, heads=4, kv_heads=2, bias=bias, **options))
    for d in (64, 128)
    for bias, options in (("b11k", {}), ("1h1k", dict(dropout_p=0.2)))
]


@over_16_bits
@over_cases([*ON_CPU, *SHORT, *for_gpus([case for case in EDGES if case not in ON_CPU])])
def test_edges_of_tiles(case, dtype, backend):
    check_drawn(lambda seed: without_dbias(make_inputs(case, dtype, backend.device, seed)), backend)


@over_dtypes((torch.bfloat16,))
@over_cases([BESIDE_OTHERS[0], *for_gpus(BESIDE_OTHERS[1:] + EDGES[:8])])
def test_with_the_gradient_of_the_bias(case, dtype, backend):
    check_drawn(lambda seed: make_inputs(case, dtype, backend.device, seed), backend)


@over_16_bits
@over_cases([PACKED[0], *for_gpus(PACKED[1:])])
def test_packed(case, dtype, backend):
    check_packed_drawn(case, lambda seed: without_dbias(make_packed(case, dtype, backend.device, seed)), backend)


@over_16_bits
@pytest.mark.parametrize("value", ["-inf", "finfo.min", "-1e4", "-4e4", "3e4"])
@pytest.mark.parametrize(("d", "dropout_p"), [(64, 0.0), *for_gpus([(64, 0.2), (128, 0.0), (128, 0.2)])])
def test_low_and_empty_batch_entries(d, dropout_p, value, dtype, backend):
    """The first batch entry is padding as a whole, the second one from a key on, and the third one at its beginning."""
    number = torch.finfo(dtype).min if value == "finfo.min" else float(value)
    case = Case(sq=320, sk=330, batch=3, heads=2, d=d, bias="b11k", dropout_p=dropout_p, dlse=True)

    def draw(seed: int) -> Inputs:
        inputs = without_dbias(make_inputs(case, dtype, backend.device, seed))
        inputs.bias[0] = number
        inputs.bias[1, ..., 201:] = number
        inputs.bias[2, ..., :70] = number
        return inputs

    check_drawn(draw, backend)
    result = run_ours(draw(0), backend)
    if value == "-inf":
        assert bool((result["lse"][0] == -math.inf).all()) and bool((result["dq"][0] == 0).all())
    if value in ("-inf", "finfo.min"):
        assert bool((result["dk"][1, :, 201:] == 0).all()) and bool((result["dv"][2, :, :70] == 0).all())


def with_low_padding(inputs: Inputs, value: float) -> Inputs:
    """A bias of 0 for keys that are no padding. The first batch entry is padding as a whole, the second one has none,
    the third one has it at its end, the fourth one at its beginning, and the fifth one at both."""
    keys = inputs.k.shape[2]
    inputs.bias.zero_()
    inputs.bias[0] = value
    inputs.bias[2, ..., keys // 2 :] = inputs.bias[3, ..., : keys // 3] = value
    inputs.bias[4, ..., : keys // 4] = inputs.bias[4, ..., keys - 9 :] = value
    return without_dbias(inputs)


LOW_PADDING = [
    Case(sq=sq, sk=sk, batch=5, heads=4, kv_heads=kv_heads, d=d, bias=bias, **options)
    for d, kv_heads in ((64, 2), (128, 4), (72, 1), (44, 4))
    for sq, sk, bias, options in (
        (130, 100, "b11k", dict(dlse=True)),
        (300, 230, "bh1k", {}),
        (850, 420, "b11k", dict(dlse=True)),
        (900, 700, "b11k", dict(sink=True)),
        (850, 1030, "bh1k", dict(dropout_p=0.2)),
        (1000, 640, "b11k", dict(dropout_p=0.2, dlse=True)),
        (600, 700, "b11k", dict(causal="bottom_right")),
        (700, 600, "bh1k", dict(window=(330, 90))),
    )
]


@over_16_bits
@pytest.mark.parametrize("value", ["finfo.min", "-1e9", "-inf"])
@over_cases([LOW_PADDING[2], *for_gpus([case for case in LOW_PADDING if case is not LOW_PADDING[2]])])
def test_low_padding(case, value, dtype, backend):
    number = torch.finfo(dtype).min if value == "finfo.min" else float(value)
    check_drawn(lambda seed: with_low_padding(make_inputs(case, dtype, backend.device, seed), number), backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("value", ["6e4", "-6e4", "1e9", "1e35", "-1e35"])
@over_cases(
    [
        Case(sq=300, sk=420, d=64, bias="b11k", scale=0.3, sink=True),
        *for_gpus(
            [
                Case(sq=300, sk=420, d=128, bias="bh1k", causal="bottom_right"),
                Case(sq=300, sk=420, d=64, bias="b11k", dropout_p=0.2),
                Case(sq=300, sk=420, d=64, bias="b11k", window=(90, 90)),
                Case(sq=300, sk=200, d=64, bias="b11k"),
            ]
        ),
    ]
)
def test_a_large_bias_of_all_keys(case, value, dtype, backend):
    def draw(seed: int) -> Inputs:
        inputs = without_dbias(make_inputs(case, dtype, backend.device, seed))
        inputs.bias[1] = float(value)
        return inputs

    check_drawn(draw, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("values", [(-1e38, -3e38), (-(2.0**101), -(2.0**103)), (-3e38, -math.inf)], ids=str)
@over_cases(
    [
        Case(sq=300, sk=420, d=64, bias="b11k"),
        *for_gpus(
            [
                Case(sq=300, sk=420, d=128, bias="bh1k", causal="top_left", sink=True),
                Case(sq=300, sk=200, d=64, bias="b11k"),
            ]
        ),
    ]
)
def test_keys_of_two_low_biases(case, values, dtype, backend):
    """Of keys that have nothing but low biases, those with the larger one have all weight, and equal shares of it."""

    def draw(seed: int) -> Inputs:
        inputs = without_dbias(make_inputs(case, dtype, backend.device, seed))
        inputs.bias[..., ::3], inputs.bias[..., 1::3] = values[0], values[1]
        inputs.bias[..., 2::3] = values[1]
        return inputs

    check_drawn(draw, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("offset", [-15.0, 15.0])
@over_cases(
    [
        Case(sq=300, sk=420, d=64, bias="b11k"),
        *for_gpus(
            [
                Case(sq=300, sk=420, d=64, bias="b11k", causal="bottom_right"),
                Case(sq=300, sk=420, d=128, bias="b11k", window=(90, 90)),
                Case(sq=300, sk=420, d=64, bias="b11k", dropout_p=0.2),
                Case(sq=300, sk=420, d=64, bias="b11k", bias_float32=True, causal="top_left"),
            ]
        ),
    ]
)
def test_gradients_where_a_bias_hides_the_products(case, offset, dtype, backend):
    """Beside -1e9 float32 has no digits left of q.k, whose mean is far from 0. Both passes have the same weights."""

    def draw(seed: int) -> Inputs:
        inputs = without_dbias(make_inputs(case, dtype, backend.device, seed))
        inputs.bias[1] = -1e9
        inputs.q[..., 0], inputs.k[..., 0] = 4.0, offset / 4.0 * case.d**0.5
        return inputs

    if not case.bias_float32:
        check_drawn(draw, backend)
        return
    # Weights may be those of q.k.
    result = run_ours(draw(0), backend)
    expected = run_reference(draw(0).to(torch.float64))
    for name in ("dq", "dk", "dv"):
        assert result[name].double().norm() < 3 * expected[name].norm(), name


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize(("padding", "others", "sink"), [(-3e38, 5e3, 0.0), (-6e4, 0.5, 0.0), (0.0, 0.0, 5e3)], ids=str)
@over_cases(
    [
        Case(sq=300, sk=420, d=64, bias="b11k", causal="top_left", sink=True, dlse=True),
        *for_gpus(
            [
                Case(sq=300, sk=420, d=128, bias="b11k", sink=True, dlse=True),
                Case(sq=300, sk=200, d=64, bias="b11k", sink=True, dlse=True),
            ]
        ),
    ]
)
def test_a_sink_far_from_biases(case, padding, others, sink, dtype, backend):
    """The first 140 keys are padding, so some tiles of queries see nothing else in a causal call."""

    def draw(seed: int) -> Inputs:
        inputs = without_dbias(make_inputs(case, dtype, backend.device, seed))
        inputs.bias[:] = others
        inputs.bias[..., :140] = padding
        inputs.sink[:] += sink
        return inputs

    check_drawn(draw, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(("d", "sk", "causal"), [(64, 420, None), *for_gpus([(64, 200, None), (128, 420, "top_left")])])
def test_the_largest_score_beside_low_padding(d, sk, causal, with_sink, dtype, backend):
    inputs = make_inputs(Case(sq=300, sk=sk, d=d, bias="b11k", sink=True), dtype, backend.device)
    lowest = torch.finfo(dtype).min
    inputs.bias[0], inputs.bias[1, ..., :70] = lowest, lowest
    options = dict(bias=inputs.bias, causal=causal, sink=inputs.sink if with_sink else None, backend=backend.name)
    _, rows = attention(inputs.q, inputs.k, inputs.v, return_max_logit="row", **options)
    scores = inputs.q.double() @ inputs.k.double().mT * d**-0.5 + inputs.bias.double()
    if causal:
        scores = scores.masked_fill(scores.new_ones(300, sk).triu(1) > 0, -math.inf)
    torch.testing.assert_close(rows.double(), scores.amax(-1), rtol=1e-6, atol=2e-2)


@over_16_bits
@pytest.mark.parametrize("scale", [2.0**-9, *for_gpus([2.0**-12, 1e-30, 4.0])])
@pytest.mark.parametrize(("d", "sk"), [(64, 420), *for_gpus([(64, 200), (128, 420)])])
def test_scales_far_from_one(d, sk, scale, dtype, backend):
    """A bias is divided by the scale."""
    case = Case(sq=300, sk=sk, d=d, bias="bh1k", scale=scale)
    check_drawn(lambda seed: without_dbias(make_inputs(case, dtype, backend.device, seed)), backend)


LENGTHS_OF_KERNELS = [(64, 420, 0.0), *for_gpus([(64, 200, 0.0), (128, 420, 0.0), (64, 420, 0.2)])]


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("value", ["finfo.min", "-1e6", "0"])
@pytest.mark.parametrize(("d", "sk", "dropout_p"), LENGTHS_OF_KERNELS)
def test_large_scores_beside_padding(d, sk, dropout_p, value, dtype, backend):
    """Some scores are about 2^13."""
    number = torch.finfo(dtype).min if value == "finfo.min" else float(value)

    def draw(seed: int) -> Inputs:
        case = Case(sq=300, sk=sk, batch=3, heads=2, d=d, bias="b11k", dropout_p=dropout_p)
        inputs = without_dbias(make_inputs(case, dtype, backend.device, seed))
        inputs.bias[0] = number
        inputs.bias[1, ..., sk // 2 :] = number
        inputs.q[..., :9, :] *= 2.0**6
        inputs.k[..., :5, :] *= 2.0**6
        return inputs

    check_drawn(draw, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("power", [28, 110])
@pytest.mark.parametrize(("d", "sk", "dropout_p"), LENGTHS_OF_KERNELS)
def test_one_query_of_large_scores(d, sk, dropout_p, power, dtype, backend):
    """The LSE of a head's first query may be as large as a bias that dominates scores, and says nothing of others."""
    case = Case(sq=300, sk=sk, batch=2, heads=2, d=d, bias="b11k", dropout_p=dropout_p)
    inputs = without_dbias(make_inputs(case, dtype, backend.device))
    q = inputs.q.clone()
    q[..., 0, :] *= 2.0**power
    expected, result = run_ours(inputs, backend), run_ours(inputs.replace(q=q), backend)
    for name in ("out", "lse", "dq"):
        torch.testing.assert_close(result[name][:, :, 1:], expected[name][:, :, 1:], rtol=2e-2, atol=2e-2)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 2.0**21, 2.0**19], ids=str)
@pytest.mark.parametrize("d", [64, *for_gpus([40, 128])])
def test_large_numbers_in_low_padding(d, value, dtype, backend):
    """A finite bias hides no key, however low it is: NaN and infinity in k reach the scores. In other batch entries not
    a bit changes."""
    case = Case(sq=1400, sk=420, batch=3, heads=4, kv_heads=2, d=d, bias="b11k")
    inputs = without_dbias(make_inputs(case, dtype, backend.device))
    inputs.bias.zero_()
    inputs.bias[..., 250:] = torch.finfo(dtype).min
    k = inputs.k.clone()
    k[1, 1, 260, 3] = value
    expected = run_ours(inputs, backend)
    result = run_ours(inputs.replace(k=k), backend)
    own = (slice(1, 2), slice(2, 4))
    if not math.isfinite(value):
        # q.k is NaN, or infinite and of the sign of an element of q. -inf hides the key, and +inf gives NaN.
        sees_nan = torch.full_like(inputs.q[own][..., 3], math.isnan(value), dtype=torch.bool)
        sees_nan |= inputs.q[own][..., 3] * value == math.inf
        for name in ("out", "lse"):
            is_nan = result[name][own].isnan()
            assert torch.equal(is_nan if name == "lse" else is_nan.all(-1), sees_nan), name
    else:
        torch.testing.assert_close(result["out"][own], expected["out"][own], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(result["lse"][own], expected["lse"][own])
    for name in ("out", "lse", "dq"):
        assert torch.equal(result[name][::2], expected[name][::2]), name
        torch.testing.assert_close(result[name][1, :2], expected[name][1, :2], rtol=2e-2, atol=2e-2)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(("d", "dropout_p"), [(64, 0.0), *for_gpus([(64, 0.2), (128, 0.0), (128, 0.2)])])
def test_nan_in_padding(d, dropout_p, poison, dtype, backend):
    case = Case(sq=500, sk=700, d=d, heads=2, bias="b11k", dropout_p=dropout_p)
    inputs = without_dbias(make_inputs(case, dtype, backend.device))
    inputs.bias[..., 550:] = -math.inf
    check_hidden_keys(inputs, 550, poison, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
def test_nan_in_what_a_mask_hides_beside_dropout(d, poison, dtype, backend):
    inputs = make_inputs(Case(sq=500, sk=700, d=d, heads=2, mask="b11k", dropout_p=0.2), dtype, backend.device)
    inputs.mask[..., 550:] = False
    check_hidden_keys(inputs, 550, poison, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
def test_views(d, dtype, backend):
    """Rows of a bias or a mask that are further apart than they are long, or whose keys are."""
    case = Case(sq=300, sk=420, d=d, heads=4, bias="bh1k")
    inputs = without_dbias(make_inputs(case, dtype, backend.device))
    wide = inputs.bias.new_full((*inputs.bias.shape[:3], 451), math.nan)
    wide[..., :420] = inputs.bias
    check_inputs(inputs.replace(bias=wide[..., :420]), backend)
    check_inputs(inputs.replace(bias=inputs.bias.repeat_interleave(2, -1)[..., ::2]), backend)
    masked = make_inputs(Case(sq=300, sk=420, d=d, heads=4, mask="bh1k", dropout_p=0.2), dtype, backend.device)
    check_inputs(masked.replace(mask=masked.mask.repeat_interleave(2, -1)[..., ::2]), backend)


# A mask of keys beside dropout is such a bias in Hopper's backward pass, and in short forward calls.
MASKS = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, mask=mask, padding=padding, dropout_p=0.2, **options)
    for d, kv_heads in ((64, 4), (96, 2), (128, 1))
    for sq, sk in ((80, 100), (130, 200), (577, 640), (513, 1031))
    for mask, padding, options in (
        ("b11k", True, {}),
        ("bh1k", False, dict(dlse=True)),
        ("111k", True, dict(sink=True)),
    )
]


@over_16_bits
@over_cases([MASKS[0], *for_gpus(MASKS[1:])])
def test_masks_beside_dropout(case, dtype, backend):
    check_drawn(lambda seed: make_inputs(case, dtype, backend.device, seed), backend)


# Which keys are padding, for each head. On Hopper batch entries that keep one interval of keys, the same for all heads,
# take the kernels of calls without a bias.
HEADS = 20
PADDINGS = {
    "at the end": lambda keep: keep,
    "of all heads": lambda keep: keep.expand(-1, HEADS, -1, -1),
    "of one head": lambda keep: torch.cat([keep.expand(-1, 17, -1, -1), keep | True, keep, keep], 1),
    "at both ends": lambda keep: keep & (torch.arange(keep.shape[-1], device=keep.device) >= 37),
    "within": lambda keep: keep & (torch.arange(keep.shape[-1], device=keep.device) != 131),
    "everywhere": lambda keep: keep & (torch.arange(keep.shape[0], device=keep.device) != 1)[:, None, None, None],
}


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("d", "sk", "dropout_p", "sink"),
    [(64, 610, 0.0, False), *for_gpus([(128, 610, 0.2, False), (64, 200, 0.0, False), (64, 610, 0.0, True)])],
)
def test_padding_is_what_a_mask_hides(d, sk, dropout_p, sink, padding, dtype, backend):
    """0 and -inf in the bias, beside a boolean mask of the same keys."""
    case = Case(sq=130, sk=sk, d=d, batch=3, heads=HEADS, mask="b11k", dropout_p=dropout_p, sink=sink, dlse=True)
    masked = make_inputs(case, dtype, backend.device)
    lengths = torch.tensor([sk, sk - 100, sk - 20], device=backend.device)
    keep = PADDINGS[padding](torch.arange(sk, device=backend.device) < lengths[:, None, None, None])
    masked = masked.replace(mask=keep)
    bias = torch.zeros(keep.shape, dtype=dtype, device=backend.device).masked_fill(~keep, -math.inf)
    expected = run_ours(masked, backend)
    for name, tensor in run_ours(without_dbias(masked.replace(mask=None, bias=bias)), backend).items():
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=2e-2, atol=2e-2, msg=name)


@over_dtypes((torch.bfloat16,))
@over_cases(for_gpus([case for case in EDGES if case.sq == 640]))
def test_repeats(case, dtype, backend):
    assert_repeats(without_dbias(make_inputs(case, dtype, backend.device)), backend, RUNS)
