"""The figures in the prose of README and docs/performance.md, each with the results that it comes from.

`QUOTES` has the passages with a {} for each figure and the pages that have them; overview.py writes the figures there,
and tests/packaging/test_overview.py fails where a page has others, or a figure that no passage has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flash_attn_ext.cli.bench.rows import geometric_mean

RESULTS = Path(__file__).resolve().parent / "results"
README, GUIDE = PAGES = ("README.md", "docs/performance.md")
FIGURE = r"(\d+(?:,\d{3})*(?:\.\d+)?)"


@dataclass(frozen=True)
class Quote:
    passage: str  # as a page has it but for line breaks, with {} for each figure
    figures: tuple[str, ...]
    pages: tuple[str, ...] = (GUIDE,)

    def pattern(self) -> re.Pattern:
        words = [r"\s+".join(map(re.escape, part.split(" "))) for part in self.passage.split("{}")]
        return re.compile(FIGURE.join(words))


def rows(report: str, **fields) -> list[dict]:
    """The rows of a report that have these fields."""
    found = json.loads((RESULTS / f"{report}.json").read_text())["rows"]
    found = [row for row in found if all(row.get(name) == value for name, value in fields.items())]
    if not found:
        raise ValueError(f"{report}.json has no row with {fields}")
    return found


def machine(report: str) -> dict:
    return json.loads((RESULTS / f"{report}.json").read_text())["machine"]


def times_as_fast(passes: list[dict], peer: str | None = None) -> float:
    """How many times as fast as the peer we are, or as the fastest of those that ran every pass. Several passes count
    by the sum of their times."""
    unit = "us" if "ours_us" in passes[0] else "ms"
    ours = sum(row[f"ours_{unit}"] for row in passes)
    names = [peer] if peer else set.intersection(*(_who_ran(row[f"peer_{unit}"]) for row in passes))
    return min(sum(row[f"peer_{unit}"][name] for row in passes) for name in names) / ours


def _who_ran(times: dict[str, float | None]) -> set[str]:
    return {name for name, time in times.items() if time is not None}


def forward(report: str, **fields) -> float:
    (row,) = rows(report, **{"pass": "forward"}, **fields)
    return times_as_fast([row])


def both(report: str, **fields) -> float:
    passes = rows(report, **fields)
    if sorted(row["pass"] for row in passes) != ["backward", "forward"]:
        raise ValueError(f"{report}.json has other rows with {fields} than one of each pass")
    return times_as_fast(passes)


def found_in(name: str, pattern: str) -> str:
    """The text that the one group of a pattern matches in a text file."""
    found = re.findall(pattern, (RESULTS / name).read_text(), re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"{name} has {len(found)} times {pattern}")
    return found[0]


def ratio(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:.2f}" for value in values)


def span(values: list[float], digits: int = 2) -> tuple[str, str]:
    return f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"


def quotes() -> Iterator[Quote]:
    yield _grid()
    yield _training()
    yield from _short_calls()
    yield from _decoding()
    yield from _other_gpus()
    yield _odd_head_dims()
    yield _deepseek()
    yield _lists_of_blocks()


def _grid() -> Quote:
    means = [
        geometric_mean(times_as_fast([row], "cudnn") for row in rows("cuda_h200", suite="grid", **{"pass": name}))
        for name in ("forward", "backward")
    ]
    count = len(rows("cuda_h200", suite="grid", **{"pass": "forward"}))
    return Quote(
        "is {} times as fast as cuDNN forward and {} times backward, in the geometric mean over {} bfloat16 shapes",
        (*ratio(*means), str(count)),
        (README,),
    )


def _training() -> Quote:
    tokens = [found_in("training_h200.txt", rf"^{name} +([\d,]+) tokens/s") for name in ("flash_attn_ext", "torch")]
    thousands = tuple(f"{round(int(number.replace(',', '')) / 1000)},000" for number in tokens)
    return Quote("trains at {} tokens/s, and at {} with PyTorch's default attention", thousands, PAGES)


def _short_calls() -> Iterator[Quote]:
    in_a_row = [forward("cuda_h200", suite="in_a_row", seqlen_q=tokens) for tokens in (128, 197)]
    yield Quote("128 and 197 tokens are {} and {} times as fast back to back", ratio(*in_a_row))
    worst = [
        min(times_as_fast([row]) for row in rows("cuda_h200", suite=suite, **{"pass": "forward"}))
        for suite in ("short", "head_dims")
    ]
    yield Quote(
        "a forward pass is at worst {} and {} times as fast as the fastest other kernel", ratio(*worst), (README,)
    )


def _decoding() -> Iterator[Quote]:
    compared = [row for row in rows("cuda_h200_decode", suite="decode") if row["against"] == "best"]
    compared = [row for row in compared if _who_ran(row["peer_us"])]
    one = span([times_as_fast([row]) for row in compared if row["seqlen_q"] == 1])
    several = span([times_as_fast([row]) for row in compared if row["seqlen_q"] > 1])
    yield Quote(
        "With one new token a call is {} to {} times as fast as the fastest other kernel, with 8 to 256 new tokens {} "
        "to {} times",
        (*one, *several),
    )
    steps = rows("cuda_h100_generate", **{"pass": "decode"})
    yield Quote(
        "A Llama of 1B parameters decodes one sequence {} to {} times as fast as with PyTorch's attention",
        span([row["ratio"] for row in steps]),
    )


def _other_gpus() -> Iterator[Quote]:
    grid = rows("cuda_h200_sm80", suite="grid")
    of_peer = {name: [times_as_fast([row], name) for row in grid] for name in ("cudnn", "flash")}
    mean = f"{geometric_mean(of_peer['cudnn']):.2f}"
    yield Quote("On an H200 they are {} times as fast as cuDNN in the geometric mean", (mean,), (README,))
    yield Quote(
        "the portable backend is {} to {} times as fast as cuDNN ({} in the geometric mean of both passes) and {} to "
        "{} times as fast as FlashAttention-2",
        (*span(of_peer["cudnn"]), mean, *span(of_peer["flash"])),
    )


def _deepseek() -> Quote:
    fields = {"case": "DeepSeek", "pass": "backward"}
    found = [rows(f"cuda_{gpu}_workloads", **fields) for gpu in ("h100", "h200")]
    return Quote(
        "There it is {} times as fast as FlashAttention-4, and on an H200 {} times",
        tuple(f"{times_as_fast(of_gpu, 'fa4'):.2f}" for of_gpu in found),
    )


def _odd_head_dims() -> Quote:
    points = [
        dict(suite="head_dims", head_dim=72, seqlen_q=seqlen, batch=batch)
        for seqlen, batch in ((729, 1), (256, 32), (729, 32))
    ]
    return Quote(
        "At head dim 72, forward and backward together are {} to {} times as fast",
        span([both("cuda_h200", **point) for point in points]),
    )


def _lists_of_blocks() -> Quote:
    cases = ("8 of 64, blocks of 128", "64 of 64", "8 of 64, blocks of 64")
    found = [rows("cuda_h100_blocks", suite="blocks", case=case) for case in cases]
    shares = [[row["ours_tflops"] / row["own_tflops"]["dense"] for row in of_case] for of_case in found]
    return Quote(
        "in blocks of 128 drawn at random, it has {} to {} of a plain call's TFLOP/s. With all of the keys it has {} "
        "to {}, and with an eighth in blocks of 64 only {} to {}",
        tuple(figure for of_case in shares for figure in span(of_case)),
    )


QUOTES = tuple(quotes())

# Numbers that look like figures but are versions.
NOT_MEASURED = (
    "Python 3.10 or later",
    "torch 2.11 or later",
    "with torch 2.11, and on CPUs with torch 2.11 and 2.15",
    "transformers** 5.15",
    "compute capability 8.0",
)


def quotes_of(page: str) -> list[Quote]:
    return [quote for quote in QUOTES if page in quote.pages]


def fill(text: str, page: str) -> str:
    """Returns a page with these figures. Raises ValueError for a passage that it does not have exactly once."""
    for quote in quotes_of(page):
        matches = list(quote.pattern().finditer(text))
        if len(matches) != 1:
            raise ValueError(f"{page} has {len(matches)} times: {quote.passage}")
        for index in range(len(quote.figures), 0, -1):
            start, end = matches[0].span(index)
            text = text[:start] + quote.figures[index - 1] + text[end:]
    return text


def without_source(text: str, page: str) -> list[str]:
    """The figures of a page that no passage has: decimals, and numbers with a unit of speed or time."""
    for quote in quotes_of(page):
        text = quote.pattern().sub("", text)
    text = re.sub(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    text = " ".join(text.split())
    for phrase in NOT_MEASURED:
        text = text.replace(phrase, "")
    unit = r"(?:times|%|[µn]s|us|ms|s|TFLOP/s|GB/s|TB/s|tokens/s)(?!\w)"
    return [match.group() for match in re.finditer(rf"\d+\.\d+|\d+(?:[ ,]\d{{3}})+|\d+(?= ?{unit})", text)]
