"""Summarises a suite's figures, and compares them with goals.

The goals are in a file that ``--goals`` names, such as benchmarks/goals.py of the repository; the package has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flash_attn_ext.cli.bench.rows import geometric_mean, is_against_own, place, ratio_to, ratio_unit


@dataclass(frozen=True)
class Goal:
    """A goal for the geometric mean of a suite's ratios in one pass."""

    suite: str
    pass_: str
    goal: float
    floor: float
    worst: float | None = None  # a floor for every single point
    against: str | None = None  # a peer, the "best" that ran or our own other call; None: what the row compares with
    at: dict = field(default_factory=dict)  # for rows with these fields, even if the suite's mean leaves them out
    at_most: bool = False  # for microseconds; else times as fast, at least

    def counts(self, row: dict) -> bool:
        return all(row[name] == value for name, value in self.at.items()) if self.at else row["in_goal"]

    def meets(self, value: float, bound: float) -> bool:
        return value <= bound if self.at_most else value >= bound

    def lines(self, rows: list[dict]) -> Iterator[str]:
        title = ", ".join([f"  {self.pass_}", *(f"{name} {value}" for name, value in self.at.items())])
        if not rows:
            yield f"{title}: not measured; {self}"
            return
        text, mean = mean_and_worst(rows, self.at_most, self.against)
        figures = [(row, _figure(row, self.against)) for row in rows]
        missed = [(row, figure) for row, figure in figures if figure is not None and self._is_bad(figure)]
        verdict = "ABOVE THE LIMIT" if self.at_most else "BELOW THE FLOOR"
        if any(figure is None for _, figure in figures):
            verdict = "INCOMPLETE"
        elif mean is not None and self.meets(mean, self.floor) and not missed:
            verdict = "goal met" if self.meets(mean, self.goal) else f"{self._bound()} kept, goal missed"
        yield f"{title}: {text}; {self}: {verdict}"
        for row, figure in missed:
            yield f"    {place(row)}: {figure:.3g}, {self._bound()} {self.worst:.4g}"

    def _is_bad(self, figure: float) -> bool:
        return self.worst is not None and not self.meets(figure, self.worst)

    def _bound(self) -> str:
        return "limit" if self.at_most else "floor"

    def __str__(self) -> str:
        word, beyond = ("at most", "over") if self.at_most else ("at least", "under")
        bounds = [f"{self._bound()} {self.floor:.4g}"] if self.floor != self.goal else []
        if self.worst is not None:
            bounds.append(f"no point {beyond} {self.worst:.4g}")
        return f"goal {word} {self.goal:.4g}" + (f" ({', '.join(bounds)})" if bounds else "")


@dataclass(frozen=True)
class PointGoals:
    """Goals for our TFLOP/s at single points of a suite."""

    suite: str
    pass_: str
    tflops: dict[tuple[str, int, int], float]  # by case, head dim and sequence length

    def counts(self, row: dict) -> bool:
        return _point(row) in self.tflops

    def lines(self, rows: list[dict]) -> Iterator[str]:
        wanted = [(row, row["ours_tflops"], self.tflops[_point(row)]) for row in rows]
        missed = [(row, rate, goal) for row, rate, goal in wanted if rate is None or rate < goal]
        unknown = f", {len(self.tflops) - len(rows)} not measured" if len(rows) < len(self.tflops) else ""
        yield f"  {self.pass_}, TFLOP/s: goal met at {len(rows) - len(missed)} of {len(self.tflops)} points{unknown}"
        for row, rate, goal in missed:
            yield f"    {place(row)}: {'no figure' if rate is None else f'{rate:.3g} TFLOP/s'}, goal {goal:g}"


def summary(suite: str, rows: list[dict], goals: Iterable[Goal | PointGoals] = ()) -> list[str]:
    """For each pass the mean and the worst point, beside the goals."""
    lines: list[str] = []
    for pass_ in dict.fromkeys(row["pass"] for row in rows):
        of_pass = [row for row in rows if row["pass"] == pass_]
        wanted = [goal for goal in goals if (goal.suite, goal.pass_) == (suite, pass_)]
        for goal in wanted:
            lines += goal.lines([row for row in of_pass if goal.counts(row)])
        if not wanted:
            counted = [row for row in of_pass if row["in_goal"]]
            lines += [f"  {pass_}{title}: {text}" for title, text in _means(counted)]
    return lines


def mean_and_worst(rows: list[dict], at_most: bool, against: str | None = None) -> tuple[str, float | None]:
    """The mean and the worst point in words, and the mean itself."""
    found = [(_figure(row, against), place(row)) for row in rows]
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


def _figure(row: dict, against: str | None) -> float | None:
    """The figure that goals concern: the ratio to the peer that they name, or else microseconds, or the row's ratio."""
    if against is not None:
        return ratio_to(row, against)
    return row["ours_us"] if _in_microseconds(row) else row["ratio"]


def _unit(row: dict, against: str | None) -> str:
    if against is not None:
        return ratio_unit(row, against)
    return "us" if _in_microseconds(row) else ratio_unit(row)


def _in_microseconds(row: dict) -> bool:
    return "ours_us" in row and not is_against_own(row)


def _point(row: dict) -> tuple[str, int, int]:
    return row["case"], row["head_dim"], row["seqlen_q"]
