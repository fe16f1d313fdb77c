"""What ``bench`` says after a suite: for each pass the mean and the worst point."""

from __future__ import annotations

from collections.abc import Iterable

from flash_attn_ext.cli.bench.rows import geometric_mean, is_against_own, place, ratio_to, ratio_unit


def summary(suite: str, rows: list[dict]) -> list[str]:
    return [line for pass_, of_pass in by_pass(rows).items() for line in lines_of_pass(pass_, of_pass)]


def by_pass(rows: list[dict]) -> dict[str, list[dict]]:
    return {
        pass_: [row for row in rows if row["pass"] == pass_] for pass_ in dict.fromkeys(row["pass"] for row in rows)
    }


def lines_of_pass(pass_: str, rows: list[dict]) -> list[str]:
    return [f"  {pass_}{title}: {text}" for title, text in _means([row for row in rows if row["in_goal"]])]


def mean_and_worst(rows: list[dict], at_most: bool, against: str | None = None) -> tuple[str, float | None]:
    """The mean and the worst point in words, and the mean itself."""
    found = [(figure(row, against), place(row)) for row in rows]
    figures = [(figure, where) for figure, where in found if figure is not None]
    if not figures:
        return "no point could be measured", None
    mean = geometric_mean(figure for figure, _ in figures)
    unit = _unit(rows[0], against)
    if len(rows) == 1:
        return f"{mean:.3g} {unit} ({figures[0][1]})", mean
    worst, where = (max if at_most else min)(figures)
    text = f"geometric mean {mean:.3g} {unit} over {len(figures)} of {len(rows)} points, worst {worst:.3g} ({where})"
    return text, mean


def _means(rows: list[dict]) -> Iterable[tuple[str, str]]:
    """One mean, or one for each case if they are compared with our own other call, because each case saves another
    share of its work."""
    own = [row for row in rows if is_against_own(row)]
    for case in dict.fromkeys(row["case"] for row in own):
        yield f", {case}", mean_and_worst([row for row in own if row["case"] == case], at_most=False)[0]
    others = [row for row in rows if not is_against_own(row)]
    if others:
        against = others[0]["against"] if "ours_us" in others[0] else None
        yield "", mean_and_worst(others, at_most=False, against=against)[0]


def figure(row: dict, against: str | None) -> float | None:
    """The figure that a mean is of: the ratio to the named peer, or else microseconds, or the row's ratio."""
    if against is not None:
        return ratio_to(row, against)
    return row["ours_us"] if _in_microseconds(row) else row["ratio"]


def _unit(row: dict, against: str | None) -> str:
    if against is not None:
        return ratio_unit(row, against)
    return "us" if _in_microseconds(row) else ratio_unit(row)


def _in_microseconds(row: dict) -> bool:
    return "ours_us" in row and not is_against_own(row)
