"""Dense tensors of more than 2^31 elements, and more heads and batch entries than a grid has rows.

Strides past 2^31 alone are in features/test_large_sizes.py.
"""

import math

import pytest
import torch

import flash_attn_ext
from support.cases import Case
from support.checks import check_case
from support.params import computes_in, over_cases, over_dtypes

pytestmark = computes_in(torch.bfloat16)

HEAD_DIM = 128
ROWS = 2**31 // HEAD_DIM  # rows of HEAD_DIM that hold 2^31 elements
CHUNK = 2**17
NEEDED = 60 * 2**30


@pytest.fixture
def roomy_gpu(gpu):
    free, _ = torch.cuda.mem_get_info()
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of GPU memory, {free / 2**30:.0f} GiB are free")
    return gpu


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)


def assert_near(result: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """To the rounding of bfloat16 weights and results: this is about addresses, which are wrong by everything."""
    scale = float(exact.abs().max())
    torch.testing.assert_close(result.double(), exact, rtol=2e-2, atol=1e-2 * scale, msg=lambda m: f"{what}: {m}")


def check_rows_of_queries(q, k, v, dout, results) -> None:
    """out and dq at the ends of the tensor and around 2^31 elements; dk and dv as sums over all rows."""
    out, dq, dk, dv = results
    heads, length = q.shape[1:3]
    sums = [torch.zeros(heads, *t.shape[2:], dtype=torch.float64, device="cuda") for t in (k, v)]
    keys, values = k[0].double(), v[0].double()
    scale = HEAD_DIM**-0.5
    for first in range(0, length, CHUNK):
        rows = slice(first, min(first + CHUNK, length))
        for head in range(heads):
            queries, douts = q[0, head, rows].double(), dout[0, head, rows].double()
            weights = (scale * queries @ keys[head].T).softmax(-1)
            exact_out = weights @ values[head]
            dweights = douts @ values[head].T
            dscores = weights * (dweights - (douts * exact_out).sum(-1, keepdim=True))
            sums[0][head] += scale * dscores.T @ queries
            sums[1][head] += weights.T @ douts
            assert_near(out[0, head, rows], exact_out, f"out, head {head}, {rows}")
            assert_near(dq[0, head, rows], scale * dscores @ keys[head], f"dq, head {head}, {rows}")
    assert_near(dk[0], sums[0], "dk")
    assert_near(dv[0], sums[1], "dv")


def test_queries_of_more_than_2_to_the_31_elements(roomy_gpu):
    heads, length = 2, ROWS // 2 + 77
    q, dout = (normal(1, heads, length, HEAD_DIM, seed=seed) for seed in (1, 2))
    k, v = (normal(1, heads, 200, HEAD_DIM, seed=seed) for seed in (3, 4))
    assert q.numel() > 2**31
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flash_attn_ext.attention(*leaves, backend=roomy_gpu.name)
    results = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    check_rows_of_queries(*(t.detach() for t in (q, k, v)), dout, results)


def test_keys_of_more_than_2_to_the_31_elements(roomy_gpu):
    """Few queries over 2^24 keys: out and LSE of parts merge, and each key's gradients follow from them."""
    length = ROWS + 77
    q, dout = (normal(1, 1, 64, HEAD_DIM, seed=seed) for seed in (1, 2))
    q = q * 0.1  # scores of one size, so that no key dominates and none vanishes
    k, v = (normal(1, 1, length, HEAD_DIM, seed=seed) for seed in (3, 4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = flash_attn_ext.attention(*leaves, return_lse=True, backend=roomy_gpu.name)
    _, dk, dv = torch.autograd.grad(out, leaves, dout)
    queries, douts = q.detach()[0, 0].double(), dout[0, 0].double()
    scale = HEAD_DIM**-0.5
    exact_lse = torch.full((64,), -math.inf, dtype=torch.float64, device="cuda")
    exact_out = torch.zeros(64, HEAD_DIM, dtype=torch.float64, device="cuda")
    for first in range(0, length, CHUNK):
        keys, values = (t.detach()[0, 0, first : first + CHUNK].double() for t in (k, v))
        scores = scale * queries @ keys.T
        part = scores.logsumexp(-1)
        total = torch.logaddexp(exact_lse, part)
        exact_out = exact_out * (exact_lse - total).exp()[:, None] + (scores - total[:, None]).exp() @ values
        exact_lse = total
    torch.testing.assert_close(lse[0, 0].double(), exact_lse, rtol=1e-5, atol=1e-4)
    # An average over 16 million values, of which some 2e-4 is left.
    torch.testing.assert_close(out[0, 0].double(), exact_out, rtol=5e-2, atol=1e-5)
    delta = (douts * out.detach()[0, 0].double()).sum(-1)
    for first in (0, length // 2, ROWS - 100, length - 200):
        rows = slice(first, first + 200)
        keys, values = (t.detach()[0, 0, rows].double() for t in (k, v))
        weights = (scale * queries @ keys.T - exact_lse[:, None]).exp()
        dscores = weights * (douts @ values.T - delta[:, None])
        assert_near(dv[0, 0, rows], weights.T @ douts, f"dv from {first}")
        assert_near(dk[0, 0, rows], scale * dscores.T @ queries, f"dk from {first}")


MANY = dict(sq=3, sk=5, d=8)


@over_dtypes()
@over_cases(
    [
        Case(**MANY, batch=70000, heads=1, bias="b1qk", causal="bottom_right"),
        Case(**MANY, batch=1, heads=70000, bias="1hqk", mask="1h1k", alibi="h", sink=True, dlse=True),
        Case(**MANY, batch=300, heads=400, kv_heads=200, mask="b1qk", window=(1, 1)),
        Case(sq=70, sk=3, d=8, batch=2, heads=33000, bias="11q1", dlse=True),
    ]
)
def test_more_than_65535_heads_and_batch_entries(case, dtype, gpu):
    check_case(case, dtype, gpu)


def test_more_than_65535_tiles_of_queries(gpu):
    """A sequence so long that its tiles alone exceed 16 bits: one key for each query, so out is v."""
    length = 65536 * 64 + 5
    q, v = (torch.randn(1, 1, length, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = flash_attn_ext.attention(q, q, v, window=(0, 0), backend=gpu.name)
    assert torch.equal(out, v)
