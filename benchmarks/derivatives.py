"""Times double backward and forward mode beside PyTorch's MATH backend, the only one that has them.

    python benchmarks/derivatives.py                     # on a GPU: S 1024, 4096 and 16384, in 16 bits and float32
    python benchmarks/derivatives.py --device cpu        # smaller ones, in float32

A row is one problem: milliseconds of ours and of MATH (median, minimum and quartiles), how many times as fast as MATH
ours is, and the peak of memory that each took beyond its inputs. "~" before a ratio says that it does not differ
significantly from 1. "out of memory" stands where MATH cannot run. Goals: double backward no slower than MATH at S
1024, forward mode at least twice as fast at S 4096.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from flash_attn_ext.cli.bench.spread import differ, spread_of
from flash_attn_ext.cli.machine import commit, machine, versions

ROUNDS = 11


@dataclass(frozen=True)
class Problem:
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: torch.dtype


def attention_of_math(*tensors, is_causal: bool):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)


CONTESTANTS = {"ours": flash_attn_ext.scaled_dot_product_attention, "math": attention_of_math}


def inputs(problem: Problem, device: str) -> list[torch.Tensor]:
    """q, k, v, and a direction for each."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (problem.batch, problem.heads, problem.seqlen, problem.head_dim)
    return [torch.randn(shape, generator=generator, device=device, dtype=problem.dtype) for _ in range(6)]


def double_backward(attend: Callable, problem: Problem, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """A call of the backward pass of the backward pass only. The first two passes run here."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    out = attend(*leaves, is_causal=problem.causal)
    dout = torch.ones_like(out).requires_grad_()
    gradients = torch.autograd.grad(out, leaves, dout, create_graph=True)
    return lambda: torch.autograd.grad(gradients, [*leaves, dout], tensors[3:], retain_graph=True)


def penalty_step(attend: Callable, problem: Problem, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """A call of all three passes."""
    return lambda: double_backward(attend, problem, tensors)()


def forward_mode(attend: Callable, problem: Problem, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """A call that computes out and its tangent."""
    call = functools.partial(attend, is_causal=problem.causal)
    return lambda: torch.func.jvp(call, tuple(tensors[:3]), tuple(tensors[3:]))


@dataclass(frozen=True)
class Measured:
    """Times in ms, and the peak of memory in MiB."""

    median: float
    spread: dict[str, float]
    peak: float

    def __str__(self) -> str:
        return f"{self.median:9.2f}" + "".join(f"{self.spread[name]:8.2f}" for name in ("min", "q1", "q3"))


def measure(make_call: Callable, problem: Problem, device: str) -> Measured | None:
    """Measures a call; None if memory does not suffice."""
    try:
        tensors = inputs(problem, device)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        call = make_call(problem, tensors)
        call()
        times = [1e3 * _seconds(call, device) for _ in range(ROUNDS)]
    except torch.OutOfMemoryError:
        return None
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else float("nan")
    return Measured(statistics.median(times), spread_of(times, digits=4), peak / 2**20)


def _seconds(call: Callable, device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rows(device: str) -> list[tuple[str, Callable, Problem]]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if device == "cuda" else (torch.float32,)
    short, middle, long = (1024, 4096, 16384) if device == "cuda" else (256, 512, 1024)
    heads = 16 if device == "cuda" else 2
    found = []
    for dtype, head_dim, causal in itertools.product(dtypes, (64, 128), (False, True)):
        for name, task, batch, seqlen in (
            ("double backward", double_backward, 4, short),
            ("all three passes", penalty_step, 4, short),
            ("jvp", forward_mode, 1, middle),
            ("double backward", double_backward, 1, long),
        ):
            found.append((name, task, Problem(batch, heads, seqlen, head_dim, causal, dtype)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    facts = machine()
    print("machine: " + ", ".join(filter(None, [facts["gpu"], f"{facts['cores']} cores of {facts['cpu']}"])))
    print("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"commit: {commit()}, date: {datetime.date.today().isoformat()}")
    print(f"method: medians, minima and quartiles of {ROUNDS} wall-clock times, first all of ours, then all of MATH\n")
    spread = f"{'min':>8}{'q1':>8}{'q3':>8}"
    print(
        f"{'ms and MiB':17} {'dtype':9} {'S':>6} {'D':>4} {'':6} {'ours':>9}{spread} {'math':>9}{spread}  x math"
        "  ours MiB  math MiB"
    )
    for name, task, problem in rows(device):
        ours, math = (measure(functools.partial(task, attend), problem, device) for attend in CONTESTANTS.values())
        dtype, causal = str(problem.dtype).removeprefix("torch."), "causal" if problem.causal else "full"
        row = f"{name:17} {dtype:9} {problem.seqlen:6} {problem.head_dim:4} {causal:6} {ours}"
        if math is None:
            row += f" {'out of memory':>33} {'':7} {ours.peak:9.0f}"
        else:
            told_apart = differ((ours.median, math.median), (ours.spread, math.spread), ROUNDS)
            ratio = f"{'' if told_apart else '~'}{math.median / ours.median:.2f}"
            row += f" {math} {ratio:>7} {ours.peak:9.0f} {math.peak:9.0f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
