"""Plain attention around every tile edge: lengths, head dims, batch and heads."""

import pytest
import torch

from support.cases import Case, make_inputs
from support.checks import check_case
from support.errors import rounding_of_a_copy
from support.params import computes_in, for_gpus, over_cases, over_dtypes
from support.runners import run_ours

# One side takes the edges of the 32-wide rounding, of 64-, 128- and 256-wide tiles; the other is asymmetric to it.
EDGES = (2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 300)
QUERY_EDGES = [Case(sq=n, sk=m, d=32) for n, m in zip(EDGES, reversed(EDGES), strict=True)]
KEY_EDGES = [Case(sq=200, sk=n, d=16, batch=1) for n in EDGES] + [Case(sq=n, sk=200, d=16, batch=1) for n in EDGES]
SQUARE = [Case(sq=n, sk=n, d=64, batch=1) for n in (64, 128, 256, 257)]
HEAD_DIMS = [Case(sq=70, sk=90, d=d, batch=1) for d in (1, 2, 3, 8, 40, 64, 72, 80, 96, 128, 160, 192, 256)]
VALUE_DIMS = [
    Case(sq=70, sk=90, d=d, dv=dv, batch=1) for d, dv in ((64, 1), (1, 64), (40, 72), (192, 128), (128, 192), (3, 5))
]
# Past 256 each backend takes of these what support/backends.py says; 16-bit types go up to 576.
WIDE_HEAD_DIMS = [
    Case(sq=sq, sk=sk, d=d, dv=dv, batch=1, **features)
    for sq, sk, d, dv, features in (
        (40, 50, 257, 257, {}),
        (70, 90, 320, 64, dict(causal="top_left")),
        (33, 129, 72, 400, {}),
        (65, 130, 384, 384, dict(heads=4, kv_heads=2, window=(20, 9))),
        (70, 90, 512, 512, {}),
        (64, 64, 512, 1, dict(mask="bhqk")),
        (2, 300, 3, 512, dict(bias="1hqk")),
        (70, 90, 576, 512, {}),
        (33, 65, 520, 512, dict(causal="bottom_right", dlse=True)),
        (65, 31, 576, 64, dict(heads=16, kv_heads=1, causal="top_left")),
        (31, 33, 513, 576, dict(window=(9, 4))),
        (50, 33, 576, 512, dict(heads=4, kv_heads=1, mask="bhqk", sink=True)),
        (34, 66, 560, 500, dict(bias="1hqk", alibi="h", softcap=9.0, dropout_p=0.2, dlse=True)),
        (50, 70, 449, 511, dict(bias="b11k", alibi="h", sink=True, softcap=9.0, dropout_p=0.2, dlse=True)),
    )
]
WIDER_THAN_ANY_GPU_TAKES = [Case(sq=40, sk=50, d=577, dv=300, batch=1)]
# Past the lengths up to which short sequences have kernels of their own (512 queries; 256 in the backward pass).
LONG = [
    Case(sq=513, sk=640, d=64, batch=1),
    Case(sq=640, sk=513, d=64, batch=1, heads=4, kv_heads=2, causal="bottom_right", dlse=True),
    Case(sq=577, sk=577, d=64, batch=1, window=(100, 20), sink=True),
    Case(sq=769, sk=129, d=40, batch=1, causal="top_left"),
    Case(sq=520, sk=700, d=64, batch=1, bias="11qk", mask="b11k"),
    Case(sq=520, sk=520, d=128, batch=1, causal="top_left", dropout_p=0.1),
]
# Between the two, where causal: a GPU kernel with tiles of 128 queries and 64 keys, more of them than run at a time and
# fewer.
SMALL_TILES = [
    Case(sq=sq, sk=sk, d=64, batch=1, **features)
    for sq, sk, features in (
        (257, 1, {}),
        (257, 1, dict(causal="bottom_right")),
        (300, 63, dict(causal="top_left")),
        (384, 64, dict(causal="top_left", dlse=True)),
        (385, 65, dict(causal="bottom_right")),
        (640, 127, dict(heads=4, kv_heads=2, causal="top_left")),
        (320, 129, dict(window=(30, 5))),
        (260, 320, dict(causal="bottom_right", sink=True)),
        (321, 191, dict(causal="top_left", window=(64, None), dlse=True)),
    )
] + for_gpus([Case(sq=400, sk=350, d=40, batch=9, heads=10, causal="top_left")])
# Up to 128 queries and keys that all see each other: more heads than blocks run at a time, and fewer.
WHOLE_HEADS = [
    Case(sq=65, sk=127, d=64, batch=2),
    *for_gpus(
        [
            Case(sq=90, sk=110, d=64, batch=150, heads=4),
            Case(sq=128, sk=128, d=64, batch=70, heads=4, sink=True),
            Case(sq=97, sk=81, d=64, batch=50, heads=6, kv_heads=2, dlse=True),
        ]
    ),
]
MANY = [Case(sq=5, sk=7, d=8, batch=7, heads=5), Case(sq=197, sk=197, d=24, batch=3, heads=3)]


@over_dtypes()
@over_cases(QUERY_EDGES + SQUARE + HEAD_DIMS + VALUE_DIMS + WHOLE_HEADS + MANY)
def test_matches_float64(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes()
@over_cases(SMALL_TILES + LONG)
def test_long_sequences(case, dtype, backend):
    check_case(case, dtype, backend)


@computes_in(torch.float64)
@over_cases(KEY_EDGES)
def test_every_edge_in_float64(case, backend):
    check_case(case, torch.float64, backend)


@over_dtypes()
@over_cases(WIDE_HEAD_DIMS + WIDER_THAN_ANY_GPU_TAKES)
def test_head_dims_past_256(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes()
def test_one_query_one_key(dtype, backend):
    """The weight is exactly 1: out is v, dv is dout, and no gradient reaches q and k beyond rounding."""
    case = Case(sq=1, sk=1, d=40)
    inputs = make_inputs(case, dtype, backend.device)
    result = run_ours(inputs, backend)
    rtol = rounding_of_a_copy(dtype, backend)
    torch.testing.assert_close(result["out"], inputs.v, rtol=rtol, atol=0)
    # The backward pass computes the score again, as K Q^T, and P is e to the difference of the two: each product of
    # the sum is rounded as a copy is, in both scores.
    sizes_of_scores = (inputs.q * inputs.k).abs().sum(-1) / case.d**0.5
    torch.testing.assert_close(result["dv"], inputs.dout, rtol=rtol * (1 + 2 * float(sizes_of_scores.max())), atol=0)
    # dP - delta cancels two sums over 40 products, each rounded in the accumulate dtype.
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for name in ("dq", "dk"):
        assert float(result[name].abs().max()) <= tolerance


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("length", [33, 128, 257, 2000])
def test_one_query(length, dtype, backend):
    check_case(Case(sq=1, sk=length, d=64, heads=3), dtype, backend)
