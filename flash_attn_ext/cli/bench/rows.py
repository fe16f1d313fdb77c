"""One measured pass of one workload as a JSON row, and figures that follow from rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

from flash_attn_ext.cli.bench.contestant import OURS
from flash_attn_ext.cli.bench.spread import differ, spread_of
from flash_attn_ext.cli.bench.structures import visible_pairs
from flash_attn_ext.cli.bench.timing import Measurement
from flash_attn_ext.cli.bench.workload import OWN_CAUSAL, OWN_DENSE, Workload

# Results further apart than this are not two roundings of one answer.
MAX_DIFFERENCE = {torch.float32: 2e-3}
MAX_DIFFERENCE_16_BIT = 2e-2


def make_row(workload: Workload, pass_: str, backend: str | None, measured: Measurement) -> dict:
    """TFLOP/s and ms of ours, the peers and our own other call, or microseconds and rates, as the workload says."""
    row: dict[str, Any] = {
        "suite": workload.suite,
        "case": workload.case,
        "pass": pass_,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "head_dim": workload.head_dim,
        "head_dim_v": workload.dim_v,
        "causal": workload.causal,
        "window": workload.window,
        "batch": workload.batch,
        "num_heads": workload.num_heads,
        "num_key_heads": workload.key_heads,
        "seqlen_q": workload.seqlen,
        "seqlen_k": workload.num_keys,
        "backend": backend,
    }
    if workload.lengths:
        row["lengths"] = workload.lengths
    if workload.calls > 1:
        row["calls"] = workload.calls
    if workload.non_causal_peers:
        row["non_causal_peers"] = workload.non_causal_peers
    milliseconds = measured.milliseconds
    for unit, amount in workload.amounts(pass_).items():
        rates = {name: _short(amount / time * 1e3) for name, time in milliseconds.items()}
        row |= _figures(unit, rates, workload)
    if workload.in_microseconds:
        row |= _figures("us", {name: round(time * 1e3, 2) for name, time in milliseconds.items()}, workload)
        in_us = {name: [time * 1e3 for time in times] for name, times in measured.times.items()}
        row["spread_us"] = {name: spread_of(times, digits=2) for name, times in in_us.items()}
    else:
        rates = {name: _short(_flops(name, workload, pass_) / time * 1e-9) for name, time in milliseconds.items()}
        row |= _figures("tflops", rates, workload)
        row |= _figures("ms", {name: round(time, 4) for name, time in milliseconds.items()}, workload)
        row["spread_ms"] = {name: spread_of(times, digits=4) for name, times in measured.times.items()}
    if workload.structure is not None:
        row["visible"] = _short(visible_pairs(workload.structure, workload.seqlen) / workload.seqlen**2)
        row["share_of_causal"] = _share(row["ours_tflops"], row.get("own_tflops", {}).get(OWN_CAUSAL))
    if workload.blocks is not None:
        row["visible"] = workload.blocks.share
        row["share_of_dense"] = _share(row["ours_tflops"], row.get("own_tflops", {}).get(OWN_DENSE))
    row["against"] = workload.against
    row["ratio"] = ratio_to(row, workload.against)
    row["in_goal"] = workload.in_goal
    row["rounds"] = measured.rounds
    if measured.difference is not None:
        row["difference"] = _short(measured.difference) if math.isfinite(measured.difference) else None
        if not measured.difference <= MAX_DIFFERENCE.get(workload.dtype, MAX_DIFFERENCE_16_BIT):
            measured.errors[OURS] = f"the result differs from the first peer's by {measured.difference:.3g}"
    if measured.errors:
        row["errors"] = measured.errors
    return row


def times_as_fast(row: dict) -> dict[str, float]:
    """For each peer that ran, its time divided by ours."""
    unit = _time_unit(row)
    ours = row[f"ours_{unit}"]
    return {name: time / ours for name, time in row[f"peer_{unit}"].items() if time and ours}


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def ratio_to(row: dict, against: str) -> float | None:
    """How many times as fast as a peer we are, as the best of those that ran, or as our own other call. None where
    either did not run."""
    if _is_own(row, against):
        own = times_as_fast_as_own(row)
        return None if own is None else own[1]
    ratios = times_as_fast(row)
    found = min(ratios.values(), default=None) if against == "best" else ratios.get(against)
    return None if found is None else round(found, 4)


def compared_with(row: dict) -> str | None:
    """The name of the peer that the ratio compares with. For "best" it is the fastest that ran; None if none ran."""
    if row["against"] != "best":
        return row["against"]
    ratios = times_as_fast(row)
    return min(ratios, key=ratios.__getitem__, default=None)


def is_distinct(row: dict) -> bool | None:
    """Whether the row's ratio can be told from 1 by its quartiles; None where it has no ratio, too few rounds, or no
    quartiles since an earlier bench measured it."""
    unit = _time_unit(row)
    if row["ratio"] is None or f"spread_{unit}" not in row:
        return None
    names = (OURS, compared_with(row))
    medians = {OURS: row[f"ours_{unit}"]} | row[f"peer_{unit}"] | row.get(f"own_{unit}", {})
    of_both = tuple(medians[name] for name in names)
    return differ(of_both, tuple(row[f"spread_{unit}"][name] for name in names), row["rounds"])


def is_against_own(row: dict) -> bool:
    """Whether the row's ratio compares with our own other call."""
    return _is_own(row, row["against"])


def ratio_unit(row: dict, against: str | None = None) -> str:
    against = against or row["against"]
    return f"x own {against}" if _is_own(row, against) else f"x {against}"


def failed(row: dict) -> bool:
    """Whether our call did not run, or gave another answer than the peer."""
    return OURS in row.get("errors", {})


def place(row: dict) -> str:
    """The fields that tell this row from the others of its suite, in readable form."""
    dims = f"D{row['head_dim']}"
    if row.get("head_dim_v", row["head_dim"]) != row["head_dim"]:
        dims = f"D({row['head_dim']},{row['head_dim_v']})"
    return f"{row.get('case', row['suite'])} {row['dtype']} {dims} S{row['seqlen_q']}"


def unit_of(row: dict) -> str:
    """The unit in which its figures read best. On a CPU, times say more than fractions of a TFLOP/s."""
    if row["suite"] == "cpu":
        return "ms"
    return next(unit for unit in ("tokens_per_s", "us", "tflops") if f"ours_{unit}" in row)


def times_as_fast_as_own(row: dict) -> tuple[str, float] | None:
    """(name, the time of our own other call divided by ours), if both were measured."""
    unit = _time_unit(row)
    for name, own in row.get(f"own_{unit}", {}).items():
        if own and row[f"ours_{unit}"]:
            return name, round(own / row[f"ours_{unit}"], 4)
    return None


def _time_unit(row: dict) -> str:
    return "us" if "ours_us" in row else "ms"


def _is_own(row: dict, name: str) -> bool:
    return name in row.get(f"own_{_time_unit(row)}", {})


def _flops(name: str, workload: Workload, pass_: str) -> float:
    """The FLOPs of a contestant. Our own call without options also does the work that the options save."""
    if name == workload.own == OWN_CAUSAL:
        workload = dataclasses.replace(workload, causal=True, structure=None)
    elif name == workload.own and workload.structure is None:
        workload = dataclasses.replace(workload, causal=False, window=None, blocks=None)
    return workload.flops(pass_)


def _share(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 4) if part and whole else None


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _figures(unit: str, values: dict[str, float], workload: Workload) -> dict:
    figures = {
        f"ours_{unit}": values.get(OURS),
        f"peer_{unit}": {name: values.get(name) for name in workload.peers},
    }
    if workload.own is not None:
        figures[f"own_{unit}"] = {workload.own: values.get(workload.own)}
    return figures
