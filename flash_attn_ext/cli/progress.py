"""Shows how far a command is and how long it still takes, in one line on stderr that is redrawn in place."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator

ERASE = "\r\x1b[K"


class Progress:
    """Counts steps. If stderr is not a terminal, it writes nothing.

    The line is removed whenever no step runs, so that text printed between steps does not run into it.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._is_watched = sys.stderr.isatty()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._write(f"{self._title} {self._done + 1}/{self._total}{self._time_left()}: {what}")
        try:
            yield
        finally:
            self._done += 1
            self._write("")

    def _time_left(self) -> str:
        """An estimate by the mean time of the steps so far."""
        if self._done == 0:
            return ""
        seconds = (time.monotonic() - self._start) / self._done * (self._total - self._done)
        return f", {duration(seconds)} left"

    def _write(self, line: str) -> None:
        if self._is_watched:
            sys.stderr.write(ERASE + line[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()


def duration(seconds: float) -> str:
    """Such as 7 s, 4 min 05 s, 1 h 30 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
