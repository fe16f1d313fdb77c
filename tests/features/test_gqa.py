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
@over_cases(CASES + MANY + [EVERYTHING])
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
