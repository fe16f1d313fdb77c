"""``python -m flash_attn_ext verify``: the accuracy matrix."""

from __future__ import annotations

import argparse

import torch

from flash_attn_ext.cli.accuracy import compare
from flash_attn_ext.cli.cases import CASES
from flash_attn_ext.cli.error_rule import MAX_ERROR_RATIO, MEAN_ERROR_RATIO, Comparison, ratio, slack_share
from flash_attn_ext.cli.machine import choose_device, explain_on
from flash_attn_ext.cli.progress import Progress

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
QUICK_DTYPES = (torch.bfloat16,)
COLUMNS = "{:<22} {:<9} {:<14} {:>9} {:>8} {:>9} {:>8} {:>8}  {}"


def run(options: argparse.Namespace) -> int:
    """Returns 0 if every case on the device keeps the error rule, 1 if one does not, and 2 if the device cannot run."""
    device, reason = choose_device(options.device)
    if reason is not None:
        print(reason)
        return 2
    print(_legend(device))
    print(COLUMNS.format("case", "dtype", "worst result", "max", "x torch", "mean", "x torch", "of limit", "verdict"))
    wanted = QUICK_DTYPES if options.quick else DTYPES
    dtypes = [dtype for dtype in wanted if explain_on(device, dtype).backend is not None]
    broken, total = 0, len(CASES) * len(dtypes)
    progress = Progress("verify", total)
    for case in CASES:
        for dtype in dtypes:
            with progress.step(f"{case.name}, {_short(dtype)}"):
                results = compare(case, dtype, device)
            worst = max(results, key=lambda name: results[name].share_of_allowed())
            broken += not results[worst].keeps_rule()
            print(_row(case.name, dtype, worst, results[worst]), flush=True)
    print(f"\n{total - broken} of {total} keep the rule" + (f", {broken} BREAK it" if broken else ""))
    for dtype in wanted:
        if dtype not in dtypes:
            print(f"not run, because no backend takes it on {device}: {dtype}")
    return 1 if broken else 0


def _legend(device: str) -> str:
    """What the columns mean, a line each."""
    slacks = ", ".join(
        f"{_short(dtype)} {slack_share(torch.empty(0, dtype=dtype, device=device)):.2g}" for dtype in DTYPES
    )
    return f"""Accuracy on {device}, against the same problem in float64.
worst result  out, lse or the gradient that is closest to its limit; the other columns are about it
max, mean     its largest and its mean error
x torch       that error divided by the one of PyTorch's own attention in the same dtype
of limit      the error as a share of the allowed one, which is {MAX_ERROR_RATIO} x PyTorch's largest error
              and {MEAN_ERROR_RATIO} x its mean error, each plus a share of the result's scale ({slacks})
verdict       ok, or BROKEN where an error exceeds its limit
"""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row(name: str, dtype: torch.dtype, worst: str, comparison: Comparison) -> str:
    ours, theirs = comparison.ours, comparison.theirs
    return COLUMNS.format(
        name,
        _short(dtype),
        worst,
        f"{ours.largest:.2e}",
        f"{ratio(ours.largest, theirs.largest):.2f}",
        f"{ours.mean:.2e}",
        f"{ratio(ours.mean, theirs.mean):.2f}",
        f"{comparison.share_of_allowed():.0%}",
        "ok" if comparison.keeps_rule() else "BROKEN",
    )
