"""Hopper's key-stationary backward kernel where masks leave few iterations: L2 head groups have more heads where key
tiles wait for each other, and key tiles that more queries see than others are divided into parts."""

from collections.abc import Callable

import pytest
import torch

from support.cases import Case, Inputs, make_inputs, without_dbias
from support.checks import answers_to, check_draws_on_sm_counts, check_on_sm_counts, check_packed_drawn
from support.disturbance import assert_repeats
from support.packed import PackedCase, make_packed
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SM_COUNTS = (1, 2, 7, 20, 132)
RUNS = 50
pytestmark = pytest.mark.usefixtures("on_hopper")

# On few SMs an L2 head group has two pairs, and four or eight where lists are sparse.
SHAPE = dict(sq=1100, sk=1300, batch=1, blocks="1h", block_keep=0.1)
LISTS = [
    Case(**SHAPE, d=d, heads=heads, kv_heads=kv_heads, block_sizes=sizes, **more)
    for d, heads, kv_heads, sizes, more in (
        (64, 20, 20, (128, 128), {}),
        (96, 9, 9, (128, 128), dict(dlse=True)),
        (128, 11, 11, (64, 64), {}),
        (64, 16, 4, (64, 128), dict(causal="bottom_right")),
        (128, 16, 2, (128, 64), dict(intervals="1h", num_intervals=2, interval_rows=100)),
        (128, 6, 6, (128, 128), dict(window=(500, 300))),
    )
]


@over_dtypes((torch.bfloat16,))
@over_cases(LISTS)
def test_lists_of_few_blocks(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16,))
@over_cases(LISTS)
def test_lists_repeat(case, dtype, gpu):
    assert_repeats(make_inputs(case, dtype, "cuda", draw_on="cuda"), gpu, RUNS)


# 64 query tiles and more: the least for which key tiles may be divided. The first one is divided on 20 and on 132 SMs.
# Where the first queries see every key, the L2 head group of the last one has ten pairs instead of two on 20 SMs.
TOKENS = 4200
GLOBAL = [
    Case(sq=TOKENS, sk=TOKENS, batch=batch, d=d, heads=heads, kv_heads=kv_heads, **more)
    for d, batch, heads, kv_heads, more in (
        (64, 1, 2, 2, {}),
        (64, 2, 4, 1, dict(causal="bottom_right", dlse=True)),
        (96, 1, 1, 1, dict(causal="top_left")),
        (128, 1, 2, 2, {}),
        (128, 2, 4, 2, dict(causal="bottom_right")),
        (128, 1, 8, 1, dict(dv=72)),
        (64, 1, 9, 9, {}),
        (64, 1, 2, 2, dict(bias="11qk")),
        (128, 1, 2, 1, dict(bias="1hqk", causal="bottom_right")),
    )
]


def window_and_first(tokens: int, num_global: int, window: int, sees_all: int = 0) -> torch.Tensor:
    """Intervals of a window on each side and of the first keys; the first `sees_all` queries see every key."""
    at = torch.arange(tokens, device="cuda")
    begin, end = (at - window).clamp(min=0), (at + window + 1).clamp(max=tokens)
    begin, end = begin.masked_fill(at < sees_all, 0), end.masked_fill(at < sees_all, tokens)
    bounds = torch.zeros_like(at), torch.full_like(at, num_global), begin, end
    return torch.stack(bounds, -1).int()[None, None]


def last_and_first(tokens: int) -> torch.Tensor:
    """A window, and the first and the last keys."""
    windows = window_and_first(tokens, 64, 100)
    last = torch.tensor([tokens - 70, tokens], dtype=torch.int32, device="cuda")
    return torch.cat([windows, last.expand(1, 1, tokens, 2)], -1)


PATTERNS: dict[str, Callable[[int], torch.Tensor]] = {
    "first keys": lambda tokens: window_and_first(tokens, 64, 100),
    "first keys and queries": lambda tokens: window_and_first(tokens, 200, 60, sees_all=64),
    "first and last keys": last_and_first,
}


def draw(case: Case, pattern: str, dtype: torch.dtype, seed: int = 0) -> Inputs:
    inputs = without_dbias(make_inputs(case, dtype, "cuda", seed, draw_on="cuda"))
    return inputs.replace(intervals=PATTERNS[pattern](case.sk))


@over_dtypes((torch.bfloat16, torch.float16))
@pytest.mark.parametrize("pattern", PATTERNS)
@over_cases(GLOBAL)
def test_global_tokens(case, pattern, dtype, gpu, monkeypatch):
    check_draws_on_sm_counts(
        (20, 132),
        lambda seed: draw(case, pattern, dtype, seed),
        gpu,
        monkeypatch,
        run=lambda inputs: run_ours(inputs, gpu),
        answers=lambda inputs: answers_to(inputs, gpu),
    )


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("pattern", PATTERNS)
@over_cases(GLOBAL)
def test_global_tokens_repeat(case, pattern, dtype, gpu):
    assert_repeats(draw(case, pattern, dtype), gpu, RUNS)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("wanted", [("q", "k"), ("q", "v")], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_dk_or_dv_alone(d, wanted, dtype, gpu):
    """The bits of both together."""
    case = Case(sq=TOKENS, sk=TOKENS, batch=1, heads=4, kv_heads=2, d=d)
    inputs = draw(case, "first keys", dtype)
    both = run_ours(inputs, gpu)
    alone = run_ours(inputs.replace(differentiable=wanted), gpu)
    for name in wanted:
        assert torch.equal(alone[f"d{name}"], both[f"d{name}"]), name


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("mib", [1, 2, 3])
def test_little_room_for_parts(mib, dtype, gpu, monkeypatch):
    """Parts become longer until their partial sums have room: none at 1 MiB, fewer than without a bound at 2 and 3. dQ
    keeps its bits."""
    case = Case(sq=TOKENS, sk=TOKENS, batch=1, heads=8, kv_heads=8, d=128)
    inputs = draw(case, "first keys", dtype)
    unbounded = run_ours(inputs, gpu)
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", str(mib))
    result = run_ours(inputs, gpu)
    assert torch.equal(result["dq"], unbounded["dq"])
    for name in ("dk", "dv"):
        torch.testing.assert_close(result[name].float(), unbounded[name].float(), rtol=2e-2, atol=2e-2)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("d", [64, 128])
def test_lists_and_intervals(d, dtype, gpu, monkeypatch):
    """The last block of keys is in each list."""
    shape = dict(sq=TOKENS, sk=TOKENS, batch=1, heads=4, kv_heads=2, d=d)
    case = Case(**shape, blocks="1h", block_keep=0.3, block_sizes=(128, 128))
    check_draws_on_sm_counts(
        (7, 132),
        lambda seed: draw(case, "first and last keys", dtype, seed),
        gpu,
        monkeypatch,
        run=lambda inputs: run_ours(inputs, gpu),
        answers=lambda inputs: answers_to(inputs, gpu),
    )


PACKED = [
    PackedCase(
        (4200, 0, 300, 4100), (4200, 40, 300, 4100), Case(d=d, heads=4, kv_heads=kv_heads, causal="bottom_right")
    )
    for d, kv_heads in ((64, 4), (128, 2))
]


@over_dtypes((torch.bfloat16,))
@over_cases(PACKED)
def test_packed(case, dtype, gpu):
    """Intervals of packed sequences count from each one's first key."""

    def make(seed: int) -> Inputs:
        inputs = make_packed(case, dtype, "cuda", seed, draw_on="cuda")
        each = [window_and_first(length, 64, 100)[0] for length in case.lengths_q]
        return inputs.replace(intervals=torch.cat(each, 1))

    check_packed_drawn(case, make, gpu)
