"""What the figures should be on our own H200, and the floors under which a suite is not done.

For `python -m flash_attn_ext bench --device cuda --goals benchmarks/goals.py`, which reads GOALS.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """For the geometric mean of a suite's ratios in one pass."""

    suite: str
    pass_: str
    goal: float
    floor: float
    worst: float | None = None  # a floor for every single point
    case: str | None = None  # of this case only
    at_most: bool = False  # a share of our own time, or microseconds; else times as fast as the peer, at least

    def meets(self, value: float, bound: float) -> bool:
        return value <= bound if self.at_most else value >= bound

    def __str__(self) -> str:
        word, bound = ("at most", "limit") if self.at_most else ("at least", "floor")
        every = f", no point under {self.worst:g}" if self.worst is not None else ""
        floor = f" ({bound} {self.floor:g}{every})" if (self.floor, self.worst) != (self.goal, None) else ""
        return f"goal {word} {self.goal:g}{floor}"


GOALS = (
    Goal("grid", "forward", 1.10, 1.0, worst=0.85),
    Goal("grid", "backward", 1.0, 0.85),
    Goal("mask", "forward", 2.0, 1.5),
    Goal("mask", "backward", 2.0, 1.5),
    Goal("float32", "forward", 2.0, 1.5),
    Goal("float32", "backward", 1.6, 1.2),
    Goal("dropout", "forward", 1.20, 1.30, at_most=True),
    Goal("head_dims", "forward", 1.1, 1.0),
    Goal("head_dims", "backward", 1.1, 1.0),
    Goal("short", "forward", 1.2, 1.0),
    Goal("short", "backward", 1.2, 1.0),
    Goal("varlen", "forward", 1.15, 1.0),
    Goal("varlen", "backward", 1.15, 1.0),
    Goal("window", "forward", 0.56, 0.56, case="causal", at_most=True),
    Goal("window", "backward", 0.56, 0.56, case="causal", at_most=True),
    Goal("window", "forward", 0.15, 0.15, case="window 512", at_most=True),
    Goal("window", "backward", 0.15, 0.15, case="window 512", at_most=True),
    Goal("host", "forward", 12, 15, at_most=True),
    Goal("host", "forward+backward", 90, 105, at_most=True),
)
