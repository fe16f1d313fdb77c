"""README's picture, its table and the figures in its prose, from benchmarks/results/ and nothing else.

    python benchmarks/overview.py    # after new results: draws overview.png, writes table and figures into README.md

Both passes of the table come from one run, so that they can be added. readme_figures.py says which results a passage
quotes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flash_attn_ext.cli.bench.plot import COLORS
from flash_attn_ext.cli.bench.rows import geometric_mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme_figures  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
REPORT = RESULTS / "cuda_h200.json"
PICTURE = RESULTS / "overview.png"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks/overview.py writes from here -->", "<!-- to here -->"

TITLES = {"ours": "flash_attn_ext", "cudnn": "cuDNN", "fa4": "FlashAttention-4", "flash": "FlashAttention-2"}
PEERS = ("cudnn", "fa4", "flash")
TABLE_SEQLEN = 8192
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


def table(found: dict[str, Figures]) -> str:
    names = " / ".join(["ours", *map(_short, PEERS)])
    heads = [f"{pass_}: {names}" for pass_ in found]
    lines = [f"| S {TABLE_SEQLEN} | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for case, head_dim, seqlen in sorted(found["both"], key=lambda point: (point[1], point[0] == "causal")):
        if seqlen != TABLE_SEQLEN:
            continue
        cells = []
        for rates_of_pass in found.values():
            point = rates_of_pass[case, head_dim, seqlen]
            cells.append(" / ".join([f"**{point['ours']:.0f}**", *(f"{point[name]:.0f}" for name in PEERS)]))
        lines.append(f"| D{head_dim} {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def means(found: dict[str, Figures]) -> str:
    """Times as fast as cuDNN, and as the fastest peer of each point: the geometric mean of the grid, and the least."""

    def of(peers: tuple[str, ...]) -> str:
        texts = []
        for pass_, words in (("forward", "forward"), ("backward", "backward"), ("both", "both together")):
            ratios = [point["ours"] / max(point[name] for name in peers) for point in found[pass_].values()]
            texts.append(f"{words} {geometric_mean(ratios):.2f} (worst {min(ratios):.2f})")
        return ", ".join(texts)

    head_dims, seqlens = (sorted({point[place] for point in found["both"]}) for place in (1, 2))
    return (
        f"In the geometric mean over {len(found['both'])} points (head dims {_listed(head_dims)}, {seqlens[0]} to "
        f"{seqlens[-1]} tokens, full and causal),\ntimes as fast as cuDNN: {of(('cudnn',))};\n"
        f"as the fastest peer of each point: {of(PEERS)}."
    )


def text(found: dict[str, Figures]) -> str:
    return f"{BEGIN}\n\n{table(found)}\n\n{means(found)}\n\n{END}"


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


def write(found: dict[str, Figures], path: Path) -> None:
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(before + text(found) + after, encoding="utf-8")


def write_figures(path: Path) -> None:
    path.write_text(readme_figures.fill(path.read_text(encoding="utf-8")), encoding="utf-8")


def figures_without_source(page: str) -> list[str]:
    """The figures of a page outside of its generated parts that no result gives."""
    return readme_figures.without_source(page.partition(BEGIN)[0] + page.partition(END)[2])


def _short(name: str) -> str:
    return {"fa4": "FA4", "flash": "FA2"}.get(name, TITLES[name])


def _listed(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


if __name__ == "__main__":
    measured = figures()
    draw(measured, PICTURE)
    write(measured, README)
    write_figures(README)
    print(f"{PICTURE.relative_to(ROOT)}, {README.relative_to(ROOT)}")
