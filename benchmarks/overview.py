"""The pictures of benchmarks/results/, the tables and the figures in the prose of README and docs/performance.md, and
the tables of the kernels' pages, from the reports there and nothing else.

    python benchmarks/overview.py    # after new results: draws all pictures, writes tables and figures into the pages

Both passes of a table come from one run, so that they can be added. readme_figures.py says which results a passage
quotes. speed_tables.py has the tables of README and the guide, cpu_tables.py and gpu_tables.py those of the kernels'
pages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from flash_attn_ext.cli.bench import plot

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import cpu_tables  # noqa: E402
import gpu_tables  # noqa: E402
import readme_figures  # noqa: E402
import speed_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
REPORT = RESULTS / "cuda_h200.json"
PORTABLE, DECODING, GENERATION = "cuda_h200_sm80", "cuda_h200_decode", "cuda_h100_generate"
PICTURE = RESULTS / "overview.png"
README, GUIDE = readme_figures.PAGES
CPU_PAGE, FORWARD_PAGE, BACKWARD_PAGE, FEW_QUERIES_PAGE, PORTABLE_PAGE, SPLIT_PAGE, SWITCH_PAGE = TABLE_PAGES = (
    "docs/kernels/cpu.md",
    "docs/kernels/sm90.md",
    "docs/kernels/sm90_backward.md",
    "docs/kernels/sm90_backward_query_stationary.md",
    "docs/kernels/sm80.md",
    "docs/kernels/split.md",
    "docs/torch_backend.md",
)
BEGIN, END = "<!-- {}benchmarks/overview.py writes from here -->", "<!-- {}to here -->"

PEERS = ("cudnn", "fa4", "fa3", "flash")
TABLE_SEQLEN = 8192
README_WORDS = (
    "Times as fast as the fastest other kernel, bfloat16, on an H200: geometric mean, worst point in brackets."
)
GRID_WORDS = (
    f"TFLOP/s at {TABLE_SEQLEN} tokens, with 16384 tokens in all and heads of 2048 columns together.\n"
    "FA2, FA3 and FA4 are FlashAttention-2, 3 and 4."
)
PICTURE_HEAD_DIM = 128
PICTURED = (
    "cpu_epyc_2_cores",
    "cpu_few_keys_epyc",
    "cuda_h200",
    "cuda_h200_sm80",
    "cuda_h100_blocks",
    "cuda_h200_workloads",
    "cuda_h100_workloads",
    "cuda_h100_long",
    "cuda_h200_masks",
)

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
    lines = [f"| {' | '.join(['head dim', 'ours', *map(_short, PEERS)])} |", "| --- |" + " --- |" * (1 + len(PEERS))]
    for case, head_dim, seqlen in sorted(found, key=lambda point: (point[1], point[0] == "causal")):
        if seqlen == TABLE_SEQLEN:
            point = found[case, head_dim, seqlen]
            cells = [f"**{point['ours']:.0f}**", *(f"{point[name]:.0f}" if name in point else "none" for name in PEERS)]
            lines.append(f"| {head_dim} {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def generated(page: str, found: dict[str, Figures]) -> dict[str, str]:
    """What is generated of a page, by the name of the part as its marks have it."""
    if page == README:
        return {"": "\n\n".join([README_WORDS, speed_tables.times_as_fast_table(speed_tables.IN_README)])}
    if page == CPU_PAGE:
        return {"long sequences: ": cpu_tables.long_sequences(), "few keys: ": cpu_tables.few_keys()}
    if page in TABLE_PAGES:
        return _of_a_kernel(page)
    parts = [speed_tables.times_as_fast_table(speed_tables.WORKLOADS), GRID_WORDS]
    parts += [f"**{pass_.capitalize()}**\n\n{rates_table(found[pass_])}" for pass_ in ("forward", "backward")]
    return {"": "\n\n".join(parts), "slow points: ": speed_tables.slow_points_table()}


OTHER_SUITES = ("mask", "dropout", "head_dims", "gqa", "varlen", "window", "softcap", "alibi", "sinks")
SHORT_SUITES = ("short", "in_a_row", "encoders", "few_queries")
PORTABLE_SUITES = ("mask", "float32", "dropout", "head_dims", "short", "varlen", "gqa", "window")


def _of_a_kernel(page: str) -> dict[str, str]:
    measured = REPORT.stem
    if page in (FORWARD_PAGE, BACKWARD_PAGE):
        pass_ = "forward" if page == FORWARD_PAGE else "backward"
        others = gpu_tables.suites(measured, (pass_,), OTHER_SUITES + SHORT_SUITES)
        return {"grid: ": gpu_tables.grid(measured, pass_), "other calls: ": others}
    if page == FEW_QUERIES_PAGE:
        return {"": gpu_tables.suites(measured, ("backward",), ("few_queries",))}
    if page == PORTABLE_PAGE:
        grids = [f"{pass_.capitalize()}:\n\n{gpu_tables.grid(PORTABLE, pass_)}" for pass_ in gpu_tables.PASSES]
        others = gpu_tables.suites(PORTABLE, gpu_tables.PASSES, PORTABLE_SUITES)
        return {"grid: ": "\n\n".join(grids), "other calls: ": others, "host: ": gpu_tables.host(PORTABLE, ("host",))}
    if page == SWITCH_PAGE:
        return {"": gpu_tables.host(DECODING, ("switch",))}
    return {
        "steps: ": gpu_tables.decode(DECODING),
        "pages: ": gpu_tables.pages(DECODING),
        "host: ": gpu_tables.host(DECODING, ("decode_host",)),
        "generation: ": gpu_tables.generate(GENERATION),
    }


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def draw_overview(path: Path) -> None:
    """Both passes at one head dim, causal."""
    from matplotlib.figure import Figure

    report = load(REPORT)
    rows = [
        row | {"peer_tflops": {name: row["peer_tflops"].get(name) for name in PEERS}}
        for row in report["rows"]
        if (row["suite"], row["case"], row["head_dim"]) == ("grid", "causal", PICTURE_HEAD_DIM)
    ]
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    for axes, pass_ in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
        plot.draw_lines(axes, sorted((row for row in rows if row["pass"] == pass_), key=lambda row: row["seqlen_q"]))
        axes.set_title(f"{pass_}, causal, head dim {PICTURE_HEAD_DIM}", fontsize="large")
        axes.set_xlabel("tokens of a sequence", fontsize="large")
    figure.axes[0].set_ylabel("TFLOP/s", fontsize="large")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="large")
    figure.suptitle(plot.caption(report, rows), fontsize="medium")
    figure.savefig(path, dpi=120)


def draw_reports() -> None:
    """The pictures of the reports that pages show, in place of those that are there."""
    for name in PICTURED:
        for old in RESULTS.glob(f"{name}*.png"):
            if not any(old.name.startswith(other) for other in PICTURED if len(other) > len(name)):
                old.unlink()
        print("\n".join(plot.draw(load(RESULTS / f"{name}.json"), RESULTS / f"{name}.png")))


def _short(name: str) -> str:
    return gpu_tables.SHORT.get(name, plot.TITLES[name])


def write(page: Path, parts: dict[str, str]) -> None:
    for part, markdown in parts.items():
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN.format(part))
        after = rest.partition(END.format(part))[2]
        text = f"{before}{BEGIN.format(part)}\n\n{markdown}\n\n{END.format(part)}{after}"
        page.write_text(text, encoding="utf-8")


def write_figures(path: Path, page: str) -> None:
    path.write_text(readme_figures.fill(path.read_text(encoding="utf-8"), page), encoding="utf-8")


def figures_without_source(text: str, page: str) -> list[str]:
    """The figures of a page outside of its generated parts that no result gives."""
    marks = (re.escape(mark).replace(r"\{\}", "[a-z :]*") for mark in (BEGIN, END))
    return readme_figures.without_source(re.sub(".*?".join(marks), "", text, flags=re.DOTALL), page)


if __name__ == "__main__":
    measured = figures()
    draw_overview(PICTURE)
    draw_reports()
    for name in (*readme_figures.PAGES, *TABLE_PAGES):
        write(ROOT / name, generated(name, measured))
        if name in readme_figures.PAGES:
            write_figures(ROOT / name, name)
        print(name)
