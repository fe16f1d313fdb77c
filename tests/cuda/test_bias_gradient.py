"""The gradient of a full bias where the materialised scores of all heads do not fit the workspace."""

import pytest
import torch

import flash_attn_ext
from support.params import computes_in
from support.runners import poisoned_memory

pytestmark = computes_in(torch.bfloat16)

LENGTH, HEAD_DIM, BATCH = 2048, 256, 2
PATTERNS = ("1hqk", "bhqk", "11qk", "b1qk")


def num_heads() -> int:
    """A few more than fit (max_materialised_bytes in csrc/host/library/limits.cpp), P and dS of each."""
    limit = min(2 * 2**30, torch.cuda.get_device_properties(0).total_memory // 40)
    return limit // (2 * LENGTH * LENGTH * 2) // BATCH + 2


@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_is_the_sum_of_what_heads_give_alone(causal, gpu):
    """Summed by one launch or several, each head's dS is what it is when the head is alone."""
    heads = num_heads()
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (BATCH, heads, LENGTH, HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4))
    bias = torch.randn(1, 1, LENGTH, LENGTH, generator=generator, device="cuda")

    def dbias(shape: tuple[int, ...], part: tuple[slice, slice]) -> torch.Tensor:
        leaves = [t[part].detach().requires_grad_() for t in (q, k, v)]
        leaf = bias.expand(shape).contiguous().requires_grad_()
        with poisoned_memory():
            out = flash_attn_ext.attention(*leaves, bias=leaf, causal=causal, backend=gpu.name)
            return torch.autograd.grad(out, [*leaves, leaf], dout[part])[-1]

    expected = {p: torch.zeros(shape_of(p, heads), dtype=torch.float64, device="cuda") for p in PATTERNS[::2]}
    results = {p: dbias(shape_of(p, heads), (slice(None), slice(None))) for p in PATTERNS}
    for b in range(BATCH):
        of_entry = torch.zeros(LENGTH, LENGTH, dtype=torch.float64, device="cuda")
        for h in range(heads):
            alone = dbias((1, 1, LENGTH, LENGTH), (slice(b, b + 1), slice(h, h + 1)))[0, 0]
            assert torch.equal(results["bhqk"][b, h], alone)
            expected["1hqk"][0, h] += alone
            of_entry += alone
        expected["11qk"][0, 0] += of_entry
        assert_close(results["b1qk"][b, 0], of_entry)
    for pattern, sums in expected.items():
        assert_close(results[pattern], sums)


def shape_of(pattern: str, heads: int) -> tuple[int, ...]:
    full = {"b": BATCH, "h": heads, "q": LENGTH, "k": LENGTH, "1": 1}
    return tuple(full[letter] for letter in pattern)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what a float32 sum may be off."""
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
