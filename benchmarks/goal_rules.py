"""Goals for the figures of a suite of ``bench``, and what a run says about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flash_attn_ext.cli.bench import summary
from flash_attn_ext.cli.bench.rows import place


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
        text, mean = summary.mean_and_worst(rows, self.at_most, self.against)
        figures = [(row, summary.figure(row, self.against)) for row in rows]
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


def judged(suite: str, rows: list[dict], goals: Iterable[Goal | PointGoals]) -> list[str]:
    """For each pass the goals with what was measured, or without goals the mean and the worst point."""
    lines: list[str] = []
    for pass_, of_pass in summary.by_pass(rows).items():
        wanted = [goal for goal in goals if (goal.suite, goal.pass_) == (suite, pass_)]
        for goal in wanted:
            lines += goal.lines([row for row in of_pass if goal.counts(row)])
        if not wanted:
            lines += summary.lines_of_pass(pass_, of_pass)
    return lines


def _point(row: dict) -> tuple[str, int, int]:
    return row["case"], row["head_dim"], row["seqlen_q"]
