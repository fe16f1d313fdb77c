"""Grouped and multi-query attention: query head h reads key head h // (Hq / Hkv)."""

import torch

from support.cases import Case, make_inputs
from support.checks import check_case
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours

CASES = [
    Case(sq=140, sk=270, d=16, heads=heads, kv_heads=kv_heads, causal=causal)
    for heads, kv_heads in ((4, 2), (3, 1), (6, 3))
    for causal in (None, "bottom_right")
] + [Case(sq=70, sk=90, d=40, batch=3, heads=6, kv_heads=2, causal="bottom_right", dlse=True)]
# So many key heads that a kernel may give each a CTA, which then loops over all heads of the group.
MANY = for_gpus(
    Case(sq=70, sk=sk, d=40, batch=64, heads=6, kv_heads=2, causal=causal, dlse=True)
    for sk, causal in ((50, None), (90, "bottom_right"), (200, None))
)
# So few queries that Hopper's kernels pack query heads as rows of a tile, with split keys and, of many heads, without.
FEW_QUERIES = for_gpus(
    Case(**(dict(sq=40, sk=1100, d=64, heads=8, kv_heads=2, causal="bottom_right") | features))
    for features in (
        dict(batch=1),
        dict(batch=40),
        dict(sq=100, d=128, heads=4, kv_heads=1, layout="bshd"),
        dict(sq=100, d=128, batch=40, causal=None, dlse=True),
        dict(sq=33, d=128, batch=40, window=(70, 0), sink=True),
        dict(sq=60, batch=20, heads=12, kv_heads=2, causal="top_left", sink=True),
        dict(sq=17, sk=2050, d=72, dv=40, heads=32, kv_heads=4),
        dict(sq=40, d=96, dv=60),
    )
)
EVERYTHING = Case(
    sq=140,
    sk=270,
    d=16,
    dv=24,
    heads=6,
    kv_heads=2,
    bias="1hqk",
    mask="bh1k",
    alibi="bh",
    sink=True,
    softcap=8.0,
    dlse=True,
)


@over_dtypes()
@over_cases(CASES + MANY + FEW_QUERIES + [EVERYTHING])
def test_matches_float64(case, dtype, backend):
    check_case(case, dtype, backend)


def test_equals_repeated_key_heads(backend):
    """Repeating K and V for each query head gives the same output, and gradients that sum to the grouped ones."""
    grouped = make_inputs(Case(sq=70, sk=90, heads=6, kv_heads=2), torch.float64, backend.device)
    k, v = (t.repeat_interleave(3, dim=1) for t in (grouped.k, grouped.v))
    repeated = grouped.replace(case=Case(sq=70, sk=90, heads=6), k=k, v=v)
    ours, expected = run_ours(grouped, backend), run_ours(repeated, backend)
    torch.testing.assert_close(ours["out"], expected["out"])
    torch.testing.assert_close(ours["dq"], expected["dq"])
    for name in ("dk", "dv"):
        torch.testing.assert_close(ours[name], expected[name].unflatten(1, (2, 3)).sum(2))
