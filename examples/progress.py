"""A progress bar with rich, or a line now and then where rich is not installed or there is no terminal."""

import sys
import time
from collections.abc import Iterable, Iterator

try:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column
except ImportError:
    Progress = None

SECONDS_BETWEEN_LINES = 10


class Reporter:
    """Iterate over `track(steps)` and call `update(text)` in every step."""

    def __init__(self, title: str):
        self._title = title
        self._text = ""

    def update(self, text: str) -> None:
        self._text = text

    def track(self, steps: range) -> Iterable[int]:
        return self._with_bar(steps) if Progress and sys.stdout.isatty() else self._with_lines(steps)

    def _with_bar(self, steps: range) -> Iterator[int]:
        text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True))
        columns = (TextColumn(f"{self._title:14}"), BarColumn(bar_width=20), text, TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("", total=len(steps), text="")
            for step in steps:
                yield step
                progress.update(task, advance=1, text=self._text)

    def _with_lines(self, steps: range) -> Iterator[int]:
        last = time.monotonic()
        for step in steps:
            yield step
            if time.monotonic() - last > SECONDS_BETWEEN_LINES or step == steps[-1]:
                last = time.monotonic()
                print(f"{self._title:14} step {step + 1}/{len(steps)}  {self._text}", flush=True)
