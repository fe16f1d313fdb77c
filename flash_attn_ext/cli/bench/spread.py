"""The spread of the times of one call, and whether two medians differ by more than it explains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MIN_ROUNDS = 5  # quartiles of fewer times say nothing
# Half the width of a box plot's notch, in interquartile ranges divided by the root of the number of times. Medians
# whose notches do not overlap differ at the 5 % level (McGill, Tukey and Larsen, "Variations of box plots", 1978).
NOTCH = 1.57


def spread_of(times: Sequence[float], digits: int) -> dict[str, float]:
    """Minimum and quartiles. A row has the median beside them."""
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return {"min": round(min(times), digits), "q1": round(lower, digits), "q3": round(upper, digits)}


def differ(
    medians: tuple[float, float], spreads: tuple[dict[str, float], dict[str, float]], rounds: int
) -> bool | None:
    """Whether two medians of `rounds` times each differ significantly; None if these are too few to say."""
    if rounds < MIN_ROUNDS:
        return None
    reach = sum(NOTCH * (spread["q3"] - spread["q1"]) / math.sqrt(rounds) for spread in spreads)
    return abs(medians[0] - medians[1]) > reach
