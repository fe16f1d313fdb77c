"""Pictures of a report: TFLOP/s by sequence length for the grid, ratios to each peer for the rest."""

from __future__ import annotations

from pathlib import Path

from flash_attn_ext.cli.bench.contestant import OURS
from flash_attn_ext.cli.bench.rows import place, times_as_fast

NO_MATPLOTLIB = "no plot: matplotlib is not installed (pip install matplotlib)"
COLORS = {
    OURS: "black",
    "flash": "tab:blue",
    "cudnn": "tab:green",
    "efficient": "tab:orange",
    "math": "tab:gray",
    "torch sdpa": "tab:red",
    "varlen_attn": "tab:purple",
    "fa3": "tab:cyan",
    "fa4": "tab:pink",
    "fa4 deterministic": "tab:olive",
}


def draw(report: dict, path: Path) -> list[str]:
    """Writes FOLDER/NAME_grid.png for the grid's rows and FOLDER/NAME.png for all others. Returns lines to print."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [NO_MATPLOTLIB]
    grid = [row for row in report["rows"] if row["suite"] == "grid"]
    others = [row for row in report["rows"] if row["suite"] != "grid" and times_as_fast(row)]
    told = []
    if grid:
        columns = _grid_columns(grid)
        figure = Figure(figsize=(3.4 * len(columns), 1.2 + 2.6 * len(_head_dims(grid))), layout="constrained")
        _draw_grid(figure, grid)
        told.append(_save(figure, report, path.with_name(f"{path.stem}_grid{path.suffix}")))
    if others:
        figure = Figure(figsize=(10, 1.6 + 0.24 * len(others)), layout="constrained")
        _draw_ratios(figure.subplots(), others)
        told.append(_save(figure, report, path))
    return told or ["no plot: no row has both a time of ours and one of a peer"]


def _draw_grid(figure, rows: list[dict]) -> None:
    """A row of axes for each head dimension, a column for each pass with and without causality."""
    head_dims, columns = _head_dims(rows), _grid_columns(rows)
    all_axes = figure.subplots(len(head_dims), len(columns), squeeze=False, sharey="row")
    for axes_of_dim, head_dim in zip(all_axes, head_dims, strict=True):
        for axes, (pass_, causal) in zip(axes_of_dim, columns, strict=True):
            key = (head_dim, pass_, causal)
            points = [row for row in rows if (row["head_dim"], row["pass"], row["causal"]) == key]
            points.sort(key=lambda row: row["seqlen_q"])
            _draw_lines(axes, points)
            axes.set_title(f"D{head_dim} {'causal' if causal else 'full'} {pass_}", fontsize="medium")
        axes_of_dim[0].set_ylabel("TFLOP/s")
    all_axes[0][0].legend(fontsize="small")


def _draw_lines(axes, points: list[dict]) -> None:
    names = dict.fromkeys(name for row in points for name in (OURS, *row["peer_tflops"]))
    for name in names:
        values = [row["ours_tflops"] if name == OURS else row["peer_tflops"].get(name) for row in points]
        known = [(row["seqlen_q"], value) for row, value in zip(points, values, strict=True) if value is not None]
        if known:
            style = dict(marker="o", markersize=3, linewidth=2.0 if name == OURS else 1.2, color=COLORS.get(name))
            axes.plot(*zip(*known, strict=True), label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    lengths = [row["seqlen_q"] for row in points]
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.grid(alpha=0.3)


def _draw_ratios(axes, rows: list[dict]) -> None:
    """A line for each row, a dot for each peer."""
    drawn = set()
    for height, row in enumerate(rows):
        for name, ratio in times_as_fast(row).items():
            label = None if name in drawn else f"against {name}"
            axes.plot(ratio, height, "o", markersize=5, color=COLORS.get(name), label=label)
            drawn.add(name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['suite']}: {place(row)} {row['pass']}" for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.set_xlabel("times as fast as the peer (above 1: ours is faster)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _save(figure, report: dict, path: Path) -> str:
    where = report["machine"]["gpu"] or report["machine"]["cpu"]
    versions = report["versions"]
    figure.suptitle(f"flash_attn_ext {versions['flash_attn_ext']}, torch {versions['torch']}, {where}")
    figure.savefig(path, dpi=110)
    return f"plot: {path}"


def _head_dims(rows: list[dict]) -> list[int]:
    return sorted({row["head_dim"] for row in rows})


def _grid_columns(rows: list[dict]) -> list[tuple[str, bool]]:
    order = {"forward": 0, "backward": 1}
    return sorted({(row["pass"], row["causal"]) for row in rows}, key=lambda column: (order[column[0]], column[1]))
