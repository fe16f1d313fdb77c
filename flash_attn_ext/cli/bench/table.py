"""What ``bench`` prints: a line for each row, each suite's mean and worst point, and its goals where some are given.

A goal is an object as in benchmarks/goals.py of the repository; the package has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flash_attn_ext.cli.bench.rows import failed, geometric_mean, place, share_of_own, times_as_fast, unit_of
from flash_attn_ext.cli.bench.workload import Workload

PLACE_WIDTH, FIGURE_WIDTH = 40, 9
UNITS = {"tflops": "TFLOP/s", "ms": "ms", "us": "us"}


def heading(suite: str, workloads: tuple[Workload, ...]) -> str:
    columns = "".join(f"{name:>{_width(name)}}" for name in ("ours", *_columns(workloads)))
    return f"\n{suite}\n{'case':<{PLACE_WIDTH}} {'pass':<17}{'backend':<8}{columns} {'unit':<8}ratio"


def line(row: dict, workloads: tuple[Workload, ...]) -> str:
    unit = unit_of(row)
    figures = row[f"peer_{unit}"] | row.get(f"own_{unit}", {}) | {"ours": row[f"ours_{unit}"]}
    texts = ""
    for name in ("ours", *_columns(workloads)):
        missing = "fails" if name in row.get("errors", {}) else ""
        figure = figures.get(name)
        texts += f"{missing if figure is None else f'{figure:.4g}':>{_width(name)}}"
    where = f"{place(row):<{PLACE_WIDTH}} {row['pass']:<17}{row['backend'] or 'none':<8}"
    return f"{where}{texts} {UNITS[unit]:<8}{_ratio_text(row)}".rstrip()


def complaints(row: dict) -> list[str]:
    """Why ours has no figure, or a wrong answer. A peer that cannot run a case is no news."""
    return [f"  !! ours: {row['errors']['ours']}"] if failed(row) else []


def summary(suite: str, rows: list[dict], goals: Iterable[Any] = ()) -> list[str]:
    """For each pass the mean and the worst point, beside what is wanted."""
    lines = []
    for pass_ in dict.fromkeys(row["pass"] for row in rows):
        counted = [row for row in rows if row["pass"] == pass_ and row["in_goal"]]
        wanted = [goal for goal in goals if (goal.suite, goal.pass_) == (suite, pass_)]
        for goal in wanted:
            lines.append(_against_goal(goal, [row for row in counted if goal.case in (None, row["case"])]))
        if not wanted:
            lines += [f"  {pass_}{title}: {text}" for title, text in _means(counted)]
    return lines


def _means(rows: list[dict]) -> Iterable[tuple[str, str]]:
    """One mean, or one a case where the ratios are shares of our own time: each case saves another share."""
    shares = [row for row in rows if _is_share(row)]
    for case in dict.fromkeys(row["case"] for row in shares):
        yield f", {case}", _mean_and_worst([row for row in shares if row["case"] == case], at_most=True)[0]
    if rows and not shares:
        yield "", _mean_and_worst(rows, at_most=False)[0]


def _against_goal(goal: Any, rows: list[dict]) -> str:
    title = f"  {goal.pass_}{f', {goal.case}' if goal.case else ''}"
    if not rows:
        return f"{title}: not measured; {goal}"
    text, mean, worst = _mean_and_worst(rows, goal.at_most)
    verdict = "ABOVE THE LIMIT" if goal.at_most else "BELOW THE FLOOR"
    if mean is None or any(_figure(row) is None for row in rows):
        verdict = "INCOMPLETE"
    elif goal.meets(mean, goal.floor) and (goal.worst is None or worst >= goal.worst):
        bound = "limit" if goal.at_most else "floor"
        verdict = "goal met" if goal.meets(mean, goal.goal) else f"{bound} kept, goal missed"
    return f"{title}: {text}; {goal}: {verdict}"


def _mean_and_worst(rows: list[dict], at_most: bool) -> tuple[str, float | None, float | None]:
    figures = [(_figure(row), place(row)) for row in rows if _figure(row) is not None]
    if not figures:
        return "no point could be measured", None, None
    mean = geometric_mean(figure for figure, _ in figures)
    worst, where = (max if at_most else min)(figures)
    unit = "us" if "ours_us" in rows[0] else _unit(rows[0])
    text = f"geometric mean {mean:.3g} {unit} over {len(figures)} of {len(rows)} points, worst {worst:.3g} ({where})"
    return text, mean, worst


def _figure(row: dict) -> float | None:
    """What goals are about: microseconds of host time, else the ratio."""
    return row["ours_us"] if "ours_us" in row else row["ratio"]


def _is_share(row: dict) -> bool:
    return row["against"] in row.get("own_ms", {})


def _unit(row: dict) -> str:
    return f"of own {row['against']} time" if _is_share(row) else f"x {row['against']}"


def _ratio_text(row: dict) -> str:
    texts = []
    if row["ratio"] is not None:
        texts.append(f"{row['ratio']:.2f} {_unit(row)}")
        if row["against"] == "best":
            ratios = times_as_fast(row)
            texts[0] += f" ({min(ratios, key=ratios.get)})"
    share = share_of_own(row)
    if share is not None and not _is_share(row):
        texts.append(f"{share[1]:.2f} of own {share[0]} time")
    return ", ".join(texts)


def _width(name: str) -> int:
    return max(FIGURE_WIDTH, len(name) + 2)


def _columns(workloads: tuple[Workload, ...]) -> list[str]:
    """Every peer of the suite, then its own calls without options."""
    names = [name for workload in workloads for name in workload.peers]
    names += [workload.own for workload in workloads if workload.own]
    return list(dict.fromkeys(names))
