"""Sequences of 65536 to 1048576 tokens: values at some queries and keys, linearity of the gradients, and memory.

Tests of kernels at fewer tokens cover every other option. Here sums are longest, dQ leaves L2, and a backward pass has
many query chunks and key chunks.
"""

import pytest
import torch

from flash_attn_ext import attention, explain
from support.cases import Case
from support.device_memory import extra_memory
from support.packed import PackedCase
from support.params import computes_in, over_dtypes
from support.sampled import check_linear, check_sampled

MIB = 2**20
LENGTHS = (65536, 131072, 262144)


def forms(tokens: int, d: int) -> list[Case | PackedCase]:
    """Lengths of sequences end inside a tile."""
    heads = dict(batch=1, heads=2, d=d)
    whole = dict(sq=tokens, sk=tokens, **heads)
    lengths = (tokens * 5 // 8 - 37, tokens // 4 + 1, 36, tokens - tokens * 5 // 8 - tokens // 4)
    return [
        Case(**whole),
        Case(**whole | dict(sq=tokens - 37, sk=tokens - 37), kv_heads=1, causal="top_left"),
        Case(**whole, window=(4095, 0)),
        PackedCase(lengths, lengths, Case(**heads, causal="top_left")),
    ]


PROBLEMS = [form for tokens in LENGTHS for d in (64, 128, 256) for form in forms(tokens, d)]
over_problems = pytest.mark.parametrize("case", PROBLEMS, ids=str)


@over_dtypes((torch.bfloat16,))
@over_problems
def test_sampled_rows(case, dtype, gpu):
    check_sampled(case, dtype, gpu)


@over_dtypes((torch.bfloat16,))
@over_problems
def test_gradients_are_linear(case, dtype, gpu):
    check_linear(case, dtype, gpu)


MILLION = 2**20
SEEN = {"window": dict(window=(4095, 0)), "causal": dict(causal="bottom_right")}
ROUNDING = 16 * MIB  # the allocator's, over out, the LSE, three gradients and the workspace


@computes_in(torch.bfloat16)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seen", SEEN)
def test_peak_at_a_million_tokens(seen, head_dim, gpu):
    """Forward and backward pass of one head hold out, the LSE and the gradients, and the workspace that the plan names.
    That is at most seven times as large as q. A matrix of scores would take 2 TiB."""
    shape, options = (1, 1, MILLION, head_dim), SEEN[seen] | dict(backend=gpu.name)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    plan = explain(*leaves, **options)
    workspace = max(plan.forward.workspace_bytes, plan.backward.workspace_bytes)
    of_q = q.numel() * q.element_size()
    assert workspace <= 7 * of_q

    def train() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(*leaves, **options), leaves, dout)

    assert all(bool(gradient.isfinite().all()) for gradient in train())
    extra = extra_memory(train)
    allowed = 4 * of_q + 4 * MILLION + workspace + ROUNDING
    assert extra <= allowed, f"{extra / MIB:.0f} MiB, allowed {allowed / MIB:.0f}"
