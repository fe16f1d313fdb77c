"""The table that ``bench`` prints: a line for each row."""

from __future__ import annotations

from flash_attn_ext.cli.bench.rows import (
    compared_with,
    failed,
    is_against_own,
    is_distinct,
    place,
    ratio_unit,
    times_as_fast_as_own,
    unit_of,
)
from flash_attn_ext.cli.bench.spread import MIN_ROUNDS
from flash_attn_ext.cli.bench.workload import Workload

PLACE_WIDTH, FIGURE_WIDTH = 40, 9
UNITS = {"tflops": "TFLOP/s", "ms": "ms", "us": "us", "tokens_per_s": "tokens/s"}


def heading(suite: str, about: str | None, workloads: tuple[Workload, ...]) -> str:
    columns = "".join(f"{name:>{_width(name)}}" for name in ("ours", *_columns(workloads)))
    title = suite if about is None else f"{suite}: {about}"
    return f"\n{title}\n{'case':<{PLACE_WIDTH}} {'pass':<17}{'backend':<8}{columns} {'unit':<9}ratio"


def line(row: dict, workloads: tuple[Workload, ...]) -> str:
    unit = unit_of(row)
    figures = row[f"peer_{unit}"] | row.get(f"own_{unit}", {}) | {"ours": row[f"ours_{unit}"]}
    texts = ""
    for name in ("ours", *_columns(workloads)):
        missing = "fails" if name in row.get("errors", {}) else ""
        figure = figures.get(name)
        texts += f"{missing if figure is None else f'{figure:.4g}':>{_width(name)}}"
    where = f"{place(row):<{PLACE_WIDTH}} {row['pass']:<17}{row['backend'] or 'none':<8}"
    return f"{where}{texts} {UNITS[unit]:<9}{_ratio_text(row)}".rstrip()


def complaints(row: dict) -> list[str]:
    """Says why our call has no figure, or that its answer is wrong. A peer that cannot run a case is no complaint."""
    return [f"  !! ours: {row['errors']['ours']}"] if failed(row) else []


def _ratio_text(row: dict) -> str:
    texts = []
    if row["ratio"] is not None:
        texts.append(f"{row['ratio']:.2f} {ratio_unit(row)}")
        if row["against"] == "best":
            texts[0] += f" ({compared_with(row)})"
        if row["rounds"] < MIN_ROUNDS:
            texts[0] += f" (rounds: {row['rounds']})"
        elif is_distinct(row) is False:
            texts[0] += " (not distinguishable from 1)"
    own = times_as_fast_as_own(row)
    if is_against_own(row):
        own = None
    if own is not None and row.get("share_of_causal"):  # says more than the time of a call with other work
        texts.append(f"{row['share_of_causal']:.2f} of own causal's TFLOP/s")
    elif own is not None and row.get("share_of_dense"):
        texts.append(f"{row['share_of_dense']:.2f} of own dense call's TFLOP/s")
    elif own is not None:
        texts.append(f"{own[1]:.2f} {ratio_unit(row, own[0])}")
    if row.get("ours_tbs"):
        texts.append(f"{row['ours_tbs']:.3g} TB/s (a copy {row['copy_tbs']:.3g})")
    if "non_causal_peers" in row:
        texts.append(f"{', '.join(row['non_causal_peers'])} without causality")
    return ", ".join(texts)


def _width(name: str) -> int:
    return max(FIGURE_WIDTH, len(name) + 2)


def _columns(workloads: tuple[Workload, ...]) -> list[str]:
    """The columns: every peer of the suite, then our own calls without options."""
    names = [name for workload in workloads for name in workload.peers]
    names += [workload.own for workload in workloads if workload.own]
    return list(dict.fromkeys(names))
