"""``python -m flash_attn_ext bench``: how long a call takes, next to PyTorch's own attention in the same run."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_ext.cli.machine import choose_device, explain_on, machine, versions
from flash_attn_ext.functional import attention

WINDOW = 256
CASES = ("full", "causal", f"window {WINDOW}", "bool mask", "float bias")
PEER = "torch sdpa"


@dataclass(frozen=True)
class Workload:
    case: str
    is_backward: bool
    dtype: torch.dtype
    head_dim: int
    batch: int
    num_heads: int
    seqlen: int

    @property
    def suite(self) -> str:
        return self.case.split(" ")[0]


@dataclass(frozen=True)
class Plan:
    """What to time and for how long."""

    batch: int
    num_heads: int
    seqlen: int
    head_dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    seconds: float  # for each workload, ours and the peer together
    min_rounds: int

    def workloads(self) -> Iterator[Workload]:
        for dtype in self.dtypes:
            for head_dim in self.head_dims:
                for is_backward in (False, True):
                    for case in CASES:
                        yield Workload(case, is_backward, dtype, head_dim, self.batch, self.num_heads, self.seqlen)


PLANS = {
    ("cpu", False): Plan(1, 8, 2048, (64, 128), (torch.float32, torch.bfloat16), 2.8, 3),
    ("cpu", True): Plan(1, 8, 2048, (64,), (torch.float32, torch.bfloat16), 0.7, 1),
    ("cuda", False): Plan(4, 16, 4096, (64, 128), (torch.bfloat16, torch.float16), 1.0, 15),
    ("cuda", True): Plan(4, 16, 4096, (128,), (torch.bfloat16,), 0.3, 5),
}


def run(options: argparse.Namespace) -> int:
    device, reason = choose_device(options.device)
    if reason is not None:
        print(reason)
        return 2
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    plan = PLANS[device, options.quick]
    print(f"{device}, B{plan.batch} H{plan.num_heads} S{plan.seqlen}, random-normal data, medians in ms of calls that")
    print(f"take turns. {PEER}: F.scaled_dot_product_attention, which gets the window as a boolean mask.")
    print("ours / full: 1 is our own time of the full case, which takes turns with these.\n")
    rows = list(_rows(plan, device))
    report = {"command": shlex.join(sys.orig_argv), "machine": machine(), "versions": versions(), "rows": rows}
    path = folder / f"{device}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nrows: {path}")
    if not options.no_plot:
        print(_plot(rows, report, folder / f"{device}.png"))
    return 0


def _rows(plan: Plan, device: str) -> Iterator[dict]:
    columns = "{:<9} {:>4} {:<18} {:<11} {:>9} {:>9} {:>13} {:>12}"
    print(columns.format("dtype", "D", "pass", "case", "ours", PEER, "ours / torch", "ours / full"))
    backend = explain_on(device).backend
    for workload in plan.workloads():
        milliseconds = measure(workload, plan, device)
        ours, peer, full = (milliseconds.get(name) for name in ("ours", PEER, "ours full"))
        row = {
            "suite": workload.suite,
            "pass": "forward+backward" if workload.is_backward else "forward",
            "dtype": str(workload.dtype).removeprefix("torch."),
            "head_dim": workload.head_dim,
            "causal": workload.case == "causal",
            "seqlen_q": workload.seqlen,
            "seqlen_k": workload.seqlen,
            "backend": backend,
            "ours_ms": ours,
            "peer_ms": {PEER: peer},
            "ours_full_ms": full,
        }
        of_full = "" if full is None else f"{ours / full:.2f}"
        texts = (f"{ours:.2f}", f"{peer:.2f}", f"{ours / peer:.2f}", of_full)
        print(columns.format(row["dtype"], row["head_dim"], row["pass"], workload.case, *texts), flush=True)
        yield row


def measure(workload: Workload, plan: Plan, device: str) -> dict[str, float]:
    """Median times in ms of "ours", of PyTorch and, where keys are skipped, of "ours full".

    The calls take turns, so that all see the same machine.
    """
    calls = make_calls(workload, device)
    for call in calls.values():  # warm up
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + plan.seconds
    while len(times["ours"]) < plan.min_rounds or time.perf_counter() < end:
        for name, call in calls.items():
            times[name].append(_time_once(call, device))
    return {name: round(statistics.median(measured), 4) for name, measured in times.items()}


def make_calls(workload: Workload, device: str) -> dict[str, Callable[[], None]]:
    """The same work for each contestant, as calls without arguments."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (workload.batch, workload.num_heads, workload.seqlen, workload.head_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(workload.dtype)

    q, k, v, dout = (normal(*shape) for _ in range(4))
    inputs = [tensor.requires_grad_(workload.is_backward) for tensor in (q, k, v)]
    square = (workload.seqlen, workload.seqlen)
    ours: dict = {}
    theirs: dict = {}
    if workload.case == "causal":
        ours, theirs = dict(causal="top_left"), dict(is_causal=True)
    elif workload.case.startswith("window"):
        offset = torch.arange(workload.seqlen, device=device)
        distance = offset - offset[:, None]
        ours = dict(window=WINDOW)
        theirs = dict(attn_mask=distance.abs() <= WINDOW)
    elif workload.case == "bool mask":
        mask = torch.rand(square, generator=generator, device=device) < 0.7
        ours, theirs = dict(mask=mask), dict(attn_mask=mask)
    elif workload.case == "float bias":
        bias = normal(*square)
        ours, theirs = dict(bias=bias), dict(attn_mask=bias)

    def call(function: Callable[..., Tensor], arguments: dict) -> None:
        out = function(*inputs, **arguments)
        if workload.is_backward:
            torch.autograd.grad(out, inputs, dout)

    calls = {
        "ours": lambda: call(attention, ours),
        PEER: lambda: call(F.scaled_dot_product_attention, theirs),
    }
    if workload.case == "causal" or workload.case.startswith("window"):
        calls["ours full"] = lambda: call(attention, {})
    return calls


def _time_once(call: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _plot(rows: list[dict], report: dict, path: Path) -> str:
    """Bars of ours / PyTorch for each case; returns what to tell."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib, or the extra flash_attn_ext[bench])"
    groups = sorted({(row["dtype"], row["head_dim"], row["pass"]) for row in rows})
    figure = Figure(figsize=(11, 1.2 + 0.55 * len(groups)), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(CASES)
    for index, case in enumerate(CASES):
        suite = case.split(" ")[0]
        of_case = {(row["dtype"], row["head_dim"], row["pass"]): row for row in rows if row["suite"] == suite}
        ratios = [of_case[group]["ours_ms"] / of_case[group]["peer_ms"][PEER] for group in groups]
        places = [place + (index - (len(CASES) - 1) / 2) * width for place in range(len(groups))]
        axes.barh(places, ratios, height=width * 0.9, label=case)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(groups)), [f"{dtype} D{head_dim} {passes}" for dtype, head_dim, passes in groups])
    axes.invert_yaxis()
    axes.set_xlabel(f"our time / {PEER} (below 1: ours is faster)")
    where = report["machine"]["gpu"] or report["machine"]["cpu"]
    axes.set_title(
        f"flash_attn_ext {report['versions']['flash_attn_ext']}, torch {report['versions']['torch']}, {where}"
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    return f"plot: {path}"
