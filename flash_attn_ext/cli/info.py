"""``python -m flash_attn_ext info``: what is installed, what it can run, and whether it computes."""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from flash_attn_ext import _C
from flash_attn_ext._load import minor_version
from flash_attn_ext.cli.accuracy import compare
from flash_attn_ext.cli.cases import CASES
from flash_attn_ext.cli.machine import choose_device, explain_on, gpu_verdict, installation, machine, versions
from flash_attn_ext.cli.portable import HOPPER, passes_on_portable_kernels
from flash_attn_ext.functional import explain

SELF_TEST_SECONDS = 2.0
# Styles of rich, for a terminal.
GOOD, WARNING, BAD = "green", "yellow", "bold red"
Row = tuple[str, str, str]  # name, text, style
SELF_TEST_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16, torch.float32)}


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 when the self-test fails."""
    facts = collect()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    return 0 if facts["self_test"]["passed"] else 1


def collect() -> dict:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {
        "versions": versions(),
        "machine": machine(),
        "build": _C.build_info(),
        "installation": installation(),
        "runs_on": {device: explain_on(device).backend for device in devices},
        "gpu": gpu_verdict(),
        "portable": portable_calls(),
        "self_test": self_test(choose_device(None)[0]),
    }


def portable_calls() -> dict[str, list[str]] | None:
    """What takes the portable kernels on this GPU; None where there is no GPU, or one that nothing runs on."""
    if not torch.cuda.is_available() or explain_on("cuda").backend is None:
        return None
    return passes_on_portable_kernels(lambda call: explain(**call.arguments("cuda")))


def self_test(device: str) -> dict:
    """Runs as many cases of ``verify``, forward and backward, as the time allows; first the one with all features."""
    start = time.perf_counter()
    failures, num_cases = [], 0
    dtypes = [dtype for dtype in SELF_TEST_DTYPES[device] if explain_on(device, dtype).backend is not None]
    for case in reversed(CASES):
        for dtype in dtypes:
            if time.perf_counter() - start > SELF_TEST_SECONDS:
                break
            num_cases += 1
            for name, comparison in compare(case, dtype, device).items():
                if not comparison.keeps_rule():
                    failures.append(f"{case.name}, {dtype}: {name} off by {comparison.ours.largest:.2e}")
    seconds = time.perf_counter() - start
    return {
        "passed": not failures,
        "device": device,
        "cases": num_cases,
        "seconds": round(seconds, 2),
        "failures": failures,
    }


def _show(facts: dict) -> None:
    rows = _rows(facts)
    if sys.stdout.isatty() and _show_in_colour(rows):
        return
    print("\n".join(f"{name:<13} {text}" for name, text, _ in rows))


def _show_in_colour(rows: list[Row]) -> bool:
    """Returns False without rich, which is optional."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table.grid(padding=(0, 2))
    for name, text, style in rows:
        table.add_row(Text(name, "bold cyan"), Text(text, style))
    Console().print(table)
    return True


def _rows(facts: dict) -> list[Row]:
    build, test = facts["build"], facts["self_test"]
    files = facts["installation"]
    runs_on = ", ".join(f"{device}: {backend or 'nothing'}" for device, backend in facts["runs_on"].items())
    verdict = ("passed", GOOD) if test["passed"] else ("FAILED", BAD)
    return [
        ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version), ""),
        (
            "machine",
            "{cpu} ({cpu_capability}), {cores} cores, {torch_threads} torch threads".format(**facts["machine"]),
            "",
        ),
        ("library", f"{build['version']}, {build['compiler']}, {files['library']}", ""),
        *_cuda_rows(build),
        ("extension", f"for torch {build['torch_version']}, {files['extension']}", ""),
        *_other_extensions(facts),
        *(("other copy", copy, WARNING) for copy in files["other_copies"]),
        ("backends", ", ".join(build["backends"]), ""),
        ("runs on", runs_on, WARNING if None in facts["runs_on"].values() else GOOD),
        ("GPU", facts["gpu"], ""),
        *_portable_rows(facts),
        ("self-test", f"{verdict[0]}: {test['cases']} cases, {test['seconds']} s", verdict[1]),
        *(("", failure, BAD) for failure in test["failures"]),
    ]


def _other_extensions(facts: dict) -> list[Row]:
    """Which other versions of torch this installation can run with."""
    own = minor_version(facts["build"]["torch_version"])
    others = [version for version in facts["installation"]["torch_versions"] if version != own]
    return [("", f"others here for torch {' and '.join(others)}", "")] if others else []


# Of GPUs that the library may meet, from Ampere on.
CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))


def _cuda_rows(build: dict) -> list[Row]:
    """Whether there are kernels for GPUs; for which of them there is machine code, and for which PTX."""
    if build["cuda_not_built"]:
        return [("CUDA sources", f"not built: {build['cuda_not_built']}", WARNING)]
    code: dict[str | None, list[str]] = {"machine code": [], "PTX": [], None: []}
    for major, minor in CAPABILITIES:
        code[_C.gpu_code((major, minor), build["cuda_archs"])].append(f"{major}.{minor}")
    texts = [f"{name} for {', '.join(gpus)}" for name, gpus in code.items() if name and gpus]
    fast = [("", f"a fast build: {build['fast_build']} only", WARNING)] if build["fast_build"] else []
    return [
        ("CUDA sources", f"for CUDA {build['cuda_version']}, {build['cuda_archs']}", ""),
        *fast,
        ("GPU code", "; ".join(texts), ""),
    ]


def _portable_rows(facts: dict) -> list[Row]:
    """What takes the portable kernels, a row for each kind of answer."""
    if facts["portable"] is None:
        texts = ["unknown: there is no GPU here that runs this library"]
    elif facts["runs_on"]["cuda"] != HOPPER:
        texts = ["all calls: Hopper's kernels need compute capability 9.x"]
    else:
        texts = [f"{passes} of {'; '.join(names)}" for passes, names in facts["portable"].items() if names]
    return [("portable" if index == 0 else "", text, "") for index, text in enumerate(texts)]
