"""Whole training steps of a GPT of 92M parameters at a context of 8192: tokens/s with our attention and with
PyTorch's default.

Both models are in one process and alternate step by step, on the same windows of text, so that they see the same
machine. A step is forward pass, backward pass, clipping and optimiser; its batch is on the device beforehand.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPTConfig
from progress import Reporter
from stdlib_text import Corpus, random_windows
from torch import Tensor
from training import MAX_RELATIVE_GAP, Schedule, Trainee, relative_gap

from flash_attn_ext import scaled_dot_product_attention
from flash_attn_ext.cli.bench.report import Report
from flash_attn_ext.cli.bench.spread import spread_of
from flash_attn_ext.cli.machine import explain_on

OURS, PYTORCHS = "flash_attn_ext", "torch"
ATTENTIONS = {OURS: scaled_dot_product_attention, PYTORCHS: F.scaled_dot_product_attention}
GIB = 2**30


@dataclass(frozen=True)
class Size:
    model: GPTConfig
    schedule: Schedule
    untimed_steps: int = 5
    last_steps: int = 10  # whose mean loss is compared

    @property
    def tokens(self) -> int:
        return self.schedule.batch * self.model.context


# For a GPU of 80 GB.
LARGE = Size(
    GPTConfig(context=8192, num_layers=12, num_heads=12, width=768),
    Schedule(steps=40, batch=8, learning_rate=6e-4, warmup_steps=10),
)


@dataclass
class Run:
    """What one of the two models leaves behind."""

    losses: list[float] = field(default_factory=list)  # of every step, nats per byte
    seconds: list[float] = field(default_factory=list)  # of every step
    peak_bytes: int | None = None  # of a step, above weights and optimiser state; not known on the CPU


def compare(size: Size, corpus: Corpus, device: torch.device, compiled: bool) -> dict[str, Run]:
    """Steps of both alternate; which goes first changes with every step."""
    trainees = {name: Trainee(size.model, ATTENTIONS[name], size.schedule, device, compiled) for name in ATTENTIONS}
    runs = {name: Run() for name in trainees}
    batches = torch.Generator().manual_seed(size.schedule.seed)
    reporter = Reporter("both alternate")
    with _no_garbage_collection():
        for step in reporter.track(range(size.schedule.steps)):
            windows = random_windows(corpus.train, size.schedule.batch, size.model.context + 1, batches).to(device)
            for name in (OURS, PYTORCHS) if step % 2 == 0 else (PYTORCHS, OURS):
                _measured_step(trainees[name], runs[name], step, windows)
            reporter.update("  ".join(f"{name} {run.losses[-1]:.4f}" for name, run in runs.items()))
    return runs


def _measured_step(trainee: Trainee, run: Run, step: int, windows: Tensor) -> None:
    on_gpu = windows.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    run.losses.append(trainee.step(step, windows))
    run.seconds.append(time.perf_counter() - start)
    if on_gpu and step > 0:  # the first step makes the optimiser's state
        run.peak_bytes = max(run.peak_bytes or 0, torch.cuda.max_memory_allocated() - before)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def row_of(runs: dict[str, Run], size: Size, device: torch.device, compiled: bool) -> dict:
    """A row as `python -m flash_attn_ext bench` writes them, and besides: the model, losses and memory."""
    timed = {name: run.seconds[size.untimed_steps :] for name, run in runs.items()}
    ms = {name: round(1e3 * statistics.median(seconds), 3) for name, seconds in timed.items()}
    rates = {name: round(1e3 * size.tokens / time_ms) for name, time_ms in ms.items()}
    final = {name: statistics.fmean(run.losses[-size.last_steps :]) for name, run in runs.items()}
    gaps = [relative_gap(*pair) for pair in zip(runs[OURS].losses, runs[PYTORCHS].losses, strict=True)]
    model = size.model
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {
        "suite": "training",
        "case": "GPT, compiled" if compiled else "GPT",
        "pass": "step",
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": model.width // model.num_heads,
        "causal": True,
        "batch": size.schedule.batch,
        "num_heads": model.num_heads,
        "seqlen_q": model.context,
        "seqlen_k": model.context,
        "backend": explain_on(device.type, dtype).backend,
        "model": asdict(model) | {"parameters": model.num_parameters},
        "schedule": asdict(size.schedule),
        "ours_tokens_per_s": rates[OURS],
        "peer_tokens_per_s": {"torch sdpa": rates[PYTORCHS]},
        "ours_ms": ms[OURS],
        "peer_ms": {"torch sdpa": ms[PYTORCHS]},
        "spread_ms": {
            label: spread_of([1e3 * second for second in timed[name]], digits=3)
            for label, name in (("ours", OURS), ("torch sdpa", PYTORCHS))
        },
        "against": "torch sdpa",
        "ratio": round(ms[PYTORCHS] / ms[OURS], 4),
        "rounds": len(timed[OURS]),
        "peak_bytes": {name: run.peak_bytes for name, run in runs.items()},
        "final_loss": final,
        "final_gap": relative_gap(final[OURS], final[PYTORCHS]),
        "largest_gap": max(gaps),
        "losses": {name: run.losses for name, run in runs.items()},
    }


def verdict(row: dict) -> list[str]:
    """What is wrong with the losses; empty when all is well."""
    problems = []
    if not row["final_gap"] <= MAX_RELATIVE_GAP:
        problems.append(f"the last losses differ by {row['final_gap']:.2%}, allowed are {MAX_RELATIVE_GAP:.0%}")
    for name, losses in row["losses"].items():
        if not losses[-1] < losses[0]:
            problems.append(f"{name}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}: nothing was learnt")
    return problems


def describe(row: dict) -> str:
    lines = []
    rates = {OURS: row["ours_tokens_per_s"], PYTORCHS: row["peer_tokens_per_s"]["torch sdpa"]}
    times = {OURS: row["ours_ms"], PYTORCHS: row["peer_ms"]["torch sdpa"]}
    for name, rate in rates.items():
        peak = row["peak_bytes"][name]
        memory = "" if peak is None else f", at most {peak / GIB:.1f} GiB above weights and optimiser state"
        lines.append(
            f"{name:15}{rate:10,.0f} tokens/s, {times[name]:.1f} ms a step{memory}, last losses "
            f"{row['final_loss'][name]:.4f} nats per byte"
        )
    lines.append(f"{row['ratio']:.3f} times as many tokens/s as torch; medians of {row['rounds']} steps each.")
    lines.append(f"The losses differ by {row['final_gap']:.3%} at the end and {row['largest_gap']:.3%} at most.")
    return "\n".join(lines)


def train_large(size: Size, corpus: Corpus, device: torch.device, compiled: bool, path: Path) -> list[str]:
    """Prints the comparison and writes it to `path`, a JSON file; returns what is wrong with it."""
    model = size.model
    print(
        f"GPT of {model.num_parameters / 1e6:.1f}M parameters: {model.num_layers} layers of width {model.width}, "
        f"{model.num_heads} heads. Batch {size.schedule.batch}, context {model.context}: {size.tokens:,} tokens a step."
    )
    command = "python examples/train_gpt.py --large" + (" --compile" if compiled else "")
    method = "medians of wall-clock times of whole steps, both alternate, with minimum and quartiles"
    report = Report(path, device.type, command + f" --steps {size.schedule.steps}", method)
    row = row_of(compare(size, corpus, device, compiled), size, device, compiled)
    report.add(row)
    print(f"\n{describe(row)}\nNumbers: {path}")
    return verdict(row)
