"""The command chooses suites, times every row, prints, writes and draws."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flash_attn_ext import _C
from flash_attn_ext.cli.bench import contestants, decode, peers, plot, suites, table
from flash_attn_ext.cli.bench.contestant import OURS
from flash_attn_ext.cli.bench.decode_suites import DecodeWorkload
from flash_attn_ext.cli.bench.flex import FLEX, ON_THE_CPU
from flash_attn_ext.cli.bench.report import Report
from flash_attn_ext.cli.bench.rows import failed, make_row
from flash_attn_ext.cli.bench.summary import summary
from flash_attn_ext.cli.bench.timing import EFFORTS, DeviceLost, Effort, Measurement, copy_bandwidth, measure
from flash_attn_ext.cli.bench.workload import Workload
from flash_attn_ext.cli.machine import COMMIT_VARIABLE, choose_device
from flash_attn_ext.cli.progress import Progress

METHOD = {
    "cuda": "medians of CUDA-event times in random order, each with L2 full of other data, backward passes without "
    "the forward pass; in suites of host time and of generated text, of wall-clock times; with minimum and quartiles",
    "cpu": "medians of wall-clock times in random order, with minimum and quartiles",
}
# The module of each kind of workload, with its functions prepare, explain_ours, contestants and stopwatch.
KINDS: Mapping[type, Any] = {Workload: contestants, DecodeWorkload: decode}


@dataclass(frozen=True)
class Bench:
    """What is timed, and what is said about it. benchmarks/bench.py of the repository has more than the package."""

    program: str = "python -m flash_attn_ext bench"
    suites: Mapping[str, Mapping[str, tuple[Workload, ...]]] = field(default_factory=lambda: suites.SUITES)  # by device
    about: Mapping[str, str] = field(default_factory=lambda: suites.ABOUT)  # a line for each suite
    only_when_named: tuple[str, ...] = ()
    kinds: Mapping[type, Any] = field(default_factory=lambda: KINDS)
    summary: Callable[[str, list[dict]], list[str]] = summary  # the lines behind a suite's rows


@dataclass(frozen=True)
class Settings:
    bench: Bench
    device: str
    backend: str | None
    effort: Effort
    progress: Progress


def run(options: argparse.Namespace, bench: Bench | None = None) -> int:
    """Returns 0, or 1 if one of our own calls failed or was wrong, or 2 if nothing could be started."""
    bench = bench or Bench()
    if options.draw is not None:
        return draw_reports(options.draw)
    device, reason = choose_device(options.device)
    if reason is None:
        reason = _unknown(bench, options, device)
    if reason is not None:
        print(reason)
        return 2
    print(f"{device}, random-normal data, calls alternate; {METHOD[device]}.")
    print("x NAME: times as fast as that peer. x own NAME: times as fast as our own call without the option, or with")
    print(
        "packed sequences or causality instead of a mask. not distinguishable from 1: at the 5 % level, by quartiles."
    )
    chosen = _chosen_suites(bench, options, device)
    progress = Progress("bench", sum(len(load.passes) for loads in chosen.values() for load in loads))
    settings = Settings(bench, device, options.backend, EFFORTS[device, options.quick], progress)
    try:
        command = _command(bench.program, device, options)
        report = Report(Path(options.output) / f"{_stem(device, options)}.json", device, command, METHOD[device])
    except OSError as error:
        print(f"--output {options.output}: {error}; allowed is a folder to write to, which is made where there is none")
        return 2
    named = report.contents["commit"]
    print(f"commit: {named or f'unknown, since this is no git checkout; {COMMIT_VARIABLE} names it for the report'}")
    report.contents["versions"] |= peers.package_versions(load for loads in chosen.values() for load in loads)
    lost = None
    try:
        for name, workloads in chosen.items():
            run_suite(name, workloads, settings, report)
    except DeviceLost as error:
        lost = error
    print(f"\nrows: {report.path}")
    if lost is not None:
        print(f"STOPPED: the GPU runs nothing any more since {lost}")
        return 1
    if not options.no_plot:
        print("\n".join(plot.draw(report.contents, report.path.with_suffix(".png"))))
    return 1 if any(map(failed, report.rows)) else 0


def draw_reports(paths: list[str]) -> int:
    """Draws reports that were measured before, here or elsewhere."""
    for path in map(Path, paths):
        try:
            report = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            print(f"--draw {path}: {error}")
            return 2
        if not (isinstance(report, dict) and {"rows", "machine", "versions"} <= report.keys()):
            print(f"--draw {path}: it is no report; allowed is a JSON file that bench wrote")
            return 2
        print("\n".join(plot.draw(report, path.with_suffix(".png"))))
    return 0


def run_suite(name: str, workloads: tuple[Workload, ...], settings: Settings, report: Report) -> None:
    start = time.perf_counter()
    rows = []
    print(table.heading(name, settings.bench.about.get(name), workloads), flush=True)
    bandwidth = {}
    if any("tbs" in workload.amounts("forward") for workload in workloads):
        bandwidth["copy_tbs"] = round(copy_bandwidth(settings.device), 4)
    for workload in workloads:
        for pass_ in workload.passes:
            with settings.progress.step(f"{name}, {workload.case}, {pass_}"):
                row = _row(workload, pass_, settings) | bandwidth
            rows.append(row)
            report.add(row)
            print("\n".join([table.line(row, workloads), *table.complaints(row)]), flush=True)
    print("\n".join(settings.bench.summary(name, rows)))
    print(f"  {len(rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)


def _row(workload: Workload, pass_: str, settings: Settings) -> dict:
    """The row of a pass. A failure before anything can be timed gives a row, too."""
    kind = settings.bench.kinds[type(workload)]
    entered = peers.of_pass(workload, pass_, settings.device)
    backend = None
    try:
        inputs = kind.prepare(workload, pass_, settings.device)
        backend = kind.explain_ours(workload, inputs, settings.backend).backend
        entrants = kind.contestants(entered, inputs, settings.backend)
        stopwatch = kind.stopwatch(workload, inputs)
        measured = measure(entrants, pass_, inputs.dout, settings.effort, stopwatch)
    except DeviceLost:
        raise
    except Exception as error:
        measured = Measurement(errors={OURS: f"{type(error).__name__}: {error}"})
    return make_row(entered, pass_, backend, measured)


def _chosen_suites(bench: Bench, options: argparse.Namespace, device: str) -> dict[str, tuple[Workload, ...]]:
    """The suites without the peers that cannot be imported. Each of those is reported once."""
    default = (name for name in bench.suites[device] if name not in bench.only_when_named)
    chosen = {name: bench.suites[device][name] for name in options.suite or default}
    loads = [workload for workloads in chosen.values() for workload in workloads]
    missing = peers.missing_packages(loads, device)
    for line in peers.absences(missing):
        print(line)
    if device == "cpu" and any(FLEX in workload.peers for workload in loads):
        print(ON_THE_CPU)
    for name, workloads in chosen.items():
        kept = suites.quick(workloads) if options.quick else workloads
        chosen[name] = tuple(peers.without(workload, missing) for workload in kept)
    return chosen


def _unknown(bench: Bench, options: argparse.Namespace, device: str) -> str | None:
    wanted = [name for name in options.suite or () if name not in bench.suites[device]]
    if wanted:
        return f"--suite {' '.join(wanted)}: on {device} there are {', '.join(bench.suites[device])}"
    built = _C.build_info()["backends"]
    if options.backend is not None and options.backend not in built:
        return f"--backend {options.backend}: this build has {', '.join(built)}"
    return None


def _command(program: str, device: str, options: argparse.Namespace) -> str:
    """The command with the options that decide the rows, and without this machine's interpreter and paths."""
    words = [*program.split(), "--device", device]
    if options.suite:
        words += ["--suite", *options.suite]
    if options.backend:
        words += ["--backend", options.backend]
    if options.quick:
        words.append("--quick")
    return shlex.join(words)


def _stem(device: str, options: argparse.Namespace) -> str:
    """The name of the report, such as cuda for all suites and cuda_grid_sm80 for one on a forced backend. The name of a
    part differs, so that it does not overwrite the whole."""
    return "_".join([device, *dict.fromkeys(options.suite or ()), *([options.backend] if options.backend else [])])
