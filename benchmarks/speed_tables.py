"""The tables of speed in README and docs/performance.md, in Markdown, from benchmarks/results/ and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gpu_tables
from readme_figures import machine, rows, times_as_fast

from flash_attn_ext.cli.bench.rows import geometric_mean

PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Workload:
    """Points of a suite, compared with one peer or with the fastest of those that ran. A suite has a line in a table
    as soon as the report has it."""

    title: str
    suite: str
    peer: str | None = None
    report: str = "cuda_h200"
    keep: Callable[[dict], bool] = lambda row: True

    @property
    def is_measured(self) -> bool:
        return any(row["suite"] == self.suite for row in rows(self.report))

    @property
    def line(self) -> str:
        return self.title + on_another_gpu(self.report)

    def cell(self, pass_: str) -> str:
        """ "mean (worst)", or a single ratio; "none" for a pass that the suite does not have."""
        found = [row for row in rows(self.report, suite=self.suite) if row["pass"] == pass_ and self.keep(row)]
        ratios = [times_as_fast([row], self.peer) for row in found if has_peer(row, self.peer)]
        if not ratios:
            return "none"
        return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if len(ratios) > 1 else f"{ratios[0]:.2f}"


def on_another_gpu(report: str) -> str:
    """What names the GPU of a report that comes from another one than most lines."""
    gpu = machine(report).get("gpu", "")
    return " (H100)" if "H100" in gpu else ""


def has_peer(row: dict, peer: str | None = None) -> bool:
    """Whether this peer ran, or any of them."""
    times = row["peer_us" if "peer_us" in row else "peer_ms"]
    return any(time is not None for time in (times.values() if peer is None else [times.get(peer)]))


def is_decode_step(row: dict) -> bool:
    return row["seqlen_q"] == 1 and row["dtype"] == "bfloat16"


def may_count(row: dict) -> bool:
    """FlexAttention adds up gradients of slopes so slowly that such rows would decide a mean."""
    return row["case"] not in ("MPT, slopes", "slopes with grad")


WORKLOADS = (
    Workload("workloads as models have them", "workloads", report="cuda_h200_workloads", keep=may_count),
    Workload("workloads as models have them", "workloads", report="cuda_h100_workloads", keep=may_count),
    Workload("one sequence of 16384 to 131072 tokens, beside PyTorch's kernels", "long", report="cuda_h100_long"),
    Workload("encoders: 128 to 256 tokens, padding, cross-attention", "encoders"),
    Workload("short sequences back to back, 64 to 1000 tokens", "in_a_row"),
    Workload("single short calls, 64 to 1000 tokens", "short"),
    Workload("grouped heads, causal, up to 32768 tokens", "gqa"),
    Workload("packed sequences, causal", "varlen"),
    Workload("masks and biases", "mask"),
    Workload("documents, images, prefixes and chunks, as intervals of keys", "masks", report="cuda_h200_masks"),
    Workload("dropout", "dropout"),
    Workload("softcap, 2048 and 8192 tokens", "softcap"),
    Workload("lists of blocks, 32768 tokens", "blocks", report="cuda_h100_blocks"),
    Workload("bias tables of T5-XL and Swin", "bias_table", report="cuda_h100_blocks"),
    Workload("ALiBi, 2048 tokens, and 8192 at head dim 64", "alibi", report="cuda_h100_alibi", keep=may_count),
    Workload("attention sinks", "sinks"),
    Workload("head dims from 40 to 512", "head_dims"),
    Workload("few queries, many keys", "few_queries"),
    Workload("one new token, long caches", "decode", report="cuda_h200_decode", keep=is_decode_step),
    Workload("full and causal, 512 to 16384 tokens", "grid"),
    Workload("the same, beside cuDNN", "grid", "cudnn"),
    Workload("the same, beside FlashAttention-4", "grid", "fa4"),
    Workload("the same, beside FlashAttention-3", "grid", "fa3"),
    Workload("the same, beside FlashAttention-2", "grid", "flash"),
)
ONLY_IN_THE_GUIDE = (
    "encoders",
    "masks",
    "dropout",
    "few_queries",
    "in_a_row",
    "softcap",
    "alibi",
    "sinks",
    "long",
    "varlen",
    "blocks",
    "bias_table",
)
IN_README = tuple(work for work in WORKLOADS if work.suite not in ONLY_IN_THE_GUIDE and work.peer != "flash")


# Reports in which a slow point counts. Those of text generation time whole models.
WITH_SLOW_POINTS = (
    "cuda_h200",
    "cuda_h200_decode",
    "cuda_h200_workloads",
    "cuda_h100_workloads",
    "cuda_h100_long",
    "cuda_h200_masks",
    "cuda_h100_alibi",
    "cuda_h100_blocks",
)


def slow_points_table() -> str:
    """Every point at which another kernel was faster, slowest first."""
    found = []
    for report in WITH_SLOW_POINTS:
        for row in filter(has_peer, rows(report)):
            ratio = times_as_fast([row])
            if round(ratio, 2) < 1:
                found.append((f"{ratio:.2f}", f"{row['pass']}, {gpu_tables.problem(row)}{on_another_gpu(report)}"))
    lines = ["| times as fast | problem |", "| --- | --- |"]
    lines += [f"| {ratio} | {problem} |" for ratio, problem in sorted(found)]
    return "\n".join(lines)


def times_as_fast_table(workloads: tuple[Workload, ...]) -> str:
    lines = ["| workload | forward | backward |", "| --- | --- | --- |"]
    measured = (work for work in workloads if work.is_measured)
    lines += [f"| {work.line} | {' | '.join(work.cell(pass_) for pass_ in PASSES)} |" for work in measured]
    return "\n".join(lines)
