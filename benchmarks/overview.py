"""README's picture, and the tables and the figures in the prose of README and docs/performance.md, from
benchmarks/results/ and nothing else.

    python benchmarks/overview.py    # after new results: draws overview.png, writes tables and figures into both pages

Both passes of a table come from one run, so that they can be added. readme_figures.py says which results a passage
quotes, and speed_tables.py has the tables of ratios.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flash_attn_ext.cli.bench.plot import COLORS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme_figures  # noqa: E402
import speed_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
REPORT = RESULTS / "cuda_h200.json"
PICTURE = RESULTS / "overview.png"
README, GUIDE = readme_figures.PAGES
BEGIN, END = "<!-- benchmarks/overview.py writes from here -->", "<!-- to here -->"

TITLES = {"ours": "flash_attn_ext", "cudnn": "cuDNN", "fa4": "FlashAttention-4", "flash": "FlashAttention-2"}
PEERS = ("cudnn", "fa4", "flash")
TABLE_SEQLEN = 8192
README_WORDS = (
    "Times as fast as the fastest other kernel, on one H200, bfloat16: geometric mean, and worst point in brackets."
)
GRID_WORDS = (
    f"TFLOP/s at {TABLE_SEQLEN} tokens. There are 16384 tokens in all, and the heads have 2048 columns together:"
)
PICTURE_HEAD_DIM = 128

Point = tuple[str, int, int]  # case, head dim, sequence length
Figures = dict[Point, dict[str, float]]  # by name, ours among them


def rates(passes: tuple[str, ...]) -> Figures:
    """TFLOP/s of the grid's points, for several passes together by the sum of their times. Figures have the digits of
    the rows, so that a pass has the same figure here as on the kernels' pages."""
    amounts: dict[Point, dict[str, list[tuple[float, float]]]] = {}
    for row in json.loads(REPORT.read_text())["rows"]:
        if row["suite"] != "grid" or row["pass"] not in passes:
            continue
        point = amounts.setdefault((row["case"], row["head_dim"], row["seqlen_q"]), {})
        work = row["ours_tflops"] * row["ours_ms"]
        for name, rate in {"ours": row["ours_tflops"], **row["peer_tflops"]}.items():
            if rate is not None:
                point.setdefault(name, []).append((work, work / rate))
    return {
        key: {
            name: round(sum(work for work, _ in passed) / sum(time for _, time in passed), 1)
            for name, passed in point.items()
            if len(passed) == len(passes)
        }
        for key, point in amounts.items()
    }


def figures() -> dict[str, Figures]:
    return {"forward": rates(("forward",)), "backward": rates(("backward",)), "both": rates(("forward", "backward"))}


def rates_table(found: Figures) -> str:
    """TFLOP/s of one length, a figure a cell."""
    lines = [f"| {' | '.join(['', 'ours', *map(TITLES.get, PEERS)])} |", "| --- |" + " --- |" * (1 + len(PEERS))]
    for case, head_dim, seqlen in sorted(found, key=lambda point: (point[1], point[0] == "causal")):
        if seqlen == TABLE_SEQLEN:
            point = found[case, head_dim, seqlen]
            cells = [f"**{point['ours']:.0f}**", *(f"{point[name]:.0f}" for name in PEERS)]
            lines.append(f"| head dim {head_dim}, {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def text(page: str, found: dict[str, Figures]) -> str:
    """What is generated of a page."""
    if page == README:
        parts = [README_WORDS, speed_tables.times_as_fast_table(speed_tables.IN_README)]
    else:
        parts = [speed_tables.times_as_fast_table(speed_tables.WORKLOADS), GRID_WORDS]
        parts += [f"**{pass_.capitalize()}**\n\n{rates_table(found[pass_])}" for pass_ in ("forward", "backward")]
    return "\n\n".join([BEGIN, *parts, END])


def draw(found: dict[str, Figures], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    for axes, pass_ in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
        lengths = sorted({seqlen for _, head_dim, seqlen in found[pass_] if head_dim == PICTURE_HEAD_DIM})
        for name in ("ours", *PEERS):
            values = [found[pass_]["causal", PICTURE_HEAD_DIM, length][name] for length in lengths]
            axes.plot(lengths, values, "o-", label=TITLES[name], color=COLORS[name], lw=2.6 if name == "ours" else 1.4)
        axes.set_title(f"{pass_}, causal, head dim {PICTURE_HEAD_DIM}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xlabel("tokens")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="lower right")
    figure.axes[0].set_ylabel("TFLOP/s")
    report = json.loads(REPORT.read_text())
    figure.suptitle(f"{report['machine']['gpu']}, bfloat16, torch {report['versions']['torch']}", fontsize="medium")
    figure.savefig(path, dpi=110)


def write(page: Path, generated: str) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + generated + rest.partition(END)[2], encoding="utf-8")


def write_figures(path: Path, page: str) -> None:
    path.write_text(readme_figures.fill(path.read_text(encoding="utf-8"), page), encoding="utf-8")


def figures_without_source(text: str, page: str) -> list[str]:
    """The figures of a page outside of its generated parts that no result gives."""
    return readme_figures.without_source(text.partition(BEGIN)[0] + text.partition(END)[2], page)


if __name__ == "__main__":
    measured = figures()
    draw(measured, PICTURE)
    print(PICTURE.relative_to(ROOT))
    for name in readme_figures.PAGES:
        write(ROOT / name, text(name, measured))
        write_figures(ROOT / name, name)
        print(name)
