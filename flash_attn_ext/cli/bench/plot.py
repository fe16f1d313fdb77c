"""Pictures of a report, one a suite: TFLOP/s by sequence length for the grid, ratios to each peer for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flash_attn_ext.cli.bench.contestant import OURS
from flash_attn_ext.cli.bench.rows import place, times_as_fast

NO_MATPLOTLIB = "no plot: matplotlib is not installed (pip install matplotlib)"
TITLES = {
    OURS: "flash_attn_ext",
    "flash": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "fa4 deterministic": "FlashAttention-4, deterministic",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient",
    "flex": "FlexAttention, compiled",
    "cudnn flex": "cuDNN's FlexAttention",
    "math": "unfused (MATH)",
    "torch sdpa": "PyTorch's default",
}
# Colours that people with any colour vision tell apart (Okabe and Ito 2008). Peers that share one meet in no suite, and
# each has a marker of its own.
COLORS = {
    OURS: "#000000",
    "flash": "#0072B2",
    "cudnn": "#009E73",
    "efficient": "#E69F00",
    "math": "#999999",
    "torch sdpa": "#D55E00",
    "varlen_attn": "#D55E00",
    "flex": "#F0E442",
    "cudnn flex": "#009E73",
    "fa3": "#56B4E9",
    "fa4": "#CC79A7",
    "fa4 deterministic": "#D55E00",
}
MARKERS = {
    OURS: "o",
    "flash": "s",
    "cudnn": "^",
    "efficient": "D",
    "math": "x",
    "torch sdpa": "v",
    "varlen_attn": "P",
    "flex": "h",
    "cudnn flex": "p",
    "fa3": "<",
    "fa4": "*",
    "fa4 deterministic": ">",
}


def style_of(name: str) -> dict:
    """A contestant's label, colour, marker and width, the same in every picture."""
    size = 7 if MARKERS.get(name) == "*" else 5
    width = 2.4 if name == OURS else 1.3
    return dict(
        label=TITLES.get(name, name),
        color=COLORS.get(name),
        marker=MARKERS.get(name, "o"),
        markersize=size,
        linewidth=width,
    )


def draw(report: dict, path: Path) -> list[str]:
    """Writes FOLDER/NAME_SUITE.png for each suite, or FOLDER/NAME.png where there is only one other than the grid.
    Returns lines to print."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [NO_MATPLOTLIB]
    suites: dict[str, list[dict]] = {}
    for row in report["rows"]:
        if row["suite"] == "grid" or times_as_fast(row):
            suites.setdefault(row["suite"], []).append(row)
    others = [name for name in suites if name != "grid"]
    told = []
    for name, rows in suites.items():
        figure = Figure(layout="constrained")
        (_draw_grid if name == "grid" else _draw_ratios)(figure, rows)
        where = path if others == [name] else path.with_name(f"{path.stem}_{name}{path.suffix}")
        told.append(_save(figure, report, rows, where))
    return told or ["no plot: no row has both a time of ours and one of a peer"]


def _draw_grid(figure, rows: list[dict]) -> None:
    """A row of axes for each head dimension, a column for each pass with and without causality."""
    head_dims, columns = sorted({row["head_dim"] for row in rows}), _grid_columns(rows)
    figure.set_size_inches(3.4 * len(columns), 1.6 + 2.3 * len(head_dims))
    all_axes = figure.subplots(len(head_dims), len(columns), squeeze=False, sharey="row")
    for axes_of_dim, head_dim in zip(all_axes, head_dims, strict=True):
        for axes, (pass_, causal) in zip(axes_of_dim, columns, strict=True):
            key = (head_dim, pass_, causal)
            points = [row for row in rows if (row["head_dim"], row["pass"], row["causal"]) == key]
            points.sort(key=lambda row: row["seqlen_q"])
            draw_lines(axes, points)
            axes.set_title(f"{pass_}, {'causal' if causal else 'full'}, head dim {head_dim}", fontsize="medium")
        axes_of_dim[0].set_ylabel("TFLOP/s")
    for axes in all_axes[-1]:
        axes.set_xlabel("tokens of a sequence")
    _add_legend(figure)


def draw_lines(axes, points: list[dict]) -> None:
    """TFLOP/s of ours and each peer by sequence length. Bands reach from the first to the third quartile."""
    names = dict.fromkeys(name for row in points for name in (OURS, *row["peer_tflops"]))
    for name in names:
        known = [(row, _rate(row, name)) for row in points if _rate(row, name) is not None]
        lengths, rates = [row["seqlen_q"] for row, _ in known], [rate for _, rate in known]
        if known:
            axes.plot(lengths, rates, **style_of(name))
        bands = [_quartiles(row, name) for row, _ in known]
        if bands and all(bands):
            low, high = zip(*bands, strict=True)
            axes.fill_between(lengths, low, high, color=COLORS.get(name), alpha=0.25, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    lengths = [row["seqlen_q"] for row in points]
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.grid(alpha=0.3)


def _rate(row: dict, name: str) -> float | None:
    return row["ours_tflops"] if name == OURS else row["peer_tflops"].get(name)


def _quartiles(row: dict, name: str) -> tuple[float, float] | None:
    """The rates at the quartiles of the time, of reports that have them."""
    spread, rate = row.get("spread_ms", {}).get(name), _rate(row, name)
    if spread is None or rate is None:
        return None
    median = row["ours_ms"] if name == OURS else row["peer_ms"][name]
    return rate * median / spread["q3"], rate * median / spread["q1"]


def _draw_ratios(figure, rows: list[dict]) -> None:
    """Axes for each pass; a line of them for each problem, and on it a mark for each peer, with a bar from quartile to
    quartile."""
    passes, places = list(dict.fromkeys(row["pass"] for row in rows)), list(dict.fromkeys(map(_place, rows)))
    figure.set_size_inches(4.5 + 3.5 * len(passes), 1.9 + 0.24 * len(places))
    all_axes = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    for axes, pass_ in zip(all_axes, passes, strict=True):
        for row in (row for row in rows if row["pass"] == pass_):
            height = places.index(_place(row))
            for name, ratio in times_as_fast(row).items():
                axes.plot(ratio, height, **style_of(name) | {"linestyle": "none"})
                if spread := _quartiles_of_ratio(row, name):
                    axes.plot(spread, (height, height), color=COLORS.get(name), alpha=0.4, linewidth=3)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(pass_, fontsize="medium")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.grid(alpha=0.3)
        axes.set_xlabel("times as fast as the peer (above 1: ours is faster)")
    all_axes[0].set_yticks(range(len(places)), places, fontsize="small")
    all_axes[0].set_ylim(len(places) - 0.5, -0.5)
    _add_legend(figure)


def _quartiles_of_ratio(row: dict, name: str) -> tuple[float, float] | None:
    """From the peer's first quartile by our third one to the opposite, of reports that have them."""
    spread = row.get("spread_us" if "ours_us" in row else "spread_ms")
    if spread is None:
        return None
    ours, peer = spread["ours"], spread[name]
    return peer["q1"] / ours["q3"], peer["q3"] / ours["q1"]


def _place(row: dict) -> str:
    """Rows of one case and length may differ by their batch and heads alone."""
    return f"{place(row)}, {row['batch']} x {row['num_heads']} heads"


def _add_legend(figure) -> None:
    """One for all axes, with every contestant that any of them has."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=min(4, len(entries)), fontsize="small")


def caption(report: dict, rows: list[dict]) -> str:
    """What was measured, on what, and how large the batch of a point is."""
    versions, commit = report["versions"], report.get("commit")
    where = report["machine"]["gpu"] or report["machine"]["cpu"]
    backends = sorted({row["backend"] for row in rows if row.get("backend")})
    first = f"flash_attn_ext {versions['flash_attn_ext']} ({', '.join(backends)}), torch {versions['torch']}, {where}"
    second = [*_batch_rule(rows), f"commit {commit}" if commit else ""]
    return "\n".join([first, "; ".join(filter(None, second))]).rstrip()


def _batch_rule(rows: list[dict]) -> list[str]:
    tokens = {row["batch"] * row["seqlen_q"] for row in rows}
    columns = {row["num_heads"] * row["head_dim"] for row in rows}
    dtypes = sorted({row["dtype"] for row in rows})
    rule = [", ".join(dtypes)]
    if len(tokens) == 1 and len({row["seqlen_q"] for row in rows}) > 1:
        rule.append(f"batch x tokens = {tokens.pop()}")
    if len(columns) == 1 and len({row["head_dim"] for row in rows}) > 1:
        rule.append(f"heads x head dim = {columns.pop()}")
    return rule


def _save(figure, report: dict, rows: list[dict], path: Path) -> str:
    suite = "" if rows[0]["suite"] == "grid" else f"{rows[0]['suite']}: "
    figure.suptitle(suite + caption(report, rows), fontsize="medium")
    figure.savefig(path, dpi=100)
    return f"plot: {path}"


def _grid_columns(rows: list[dict]) -> list[tuple[str, bool]]:
    order = {"forward": 0, "backward": 1}
    return sorted({(row["pass"], row["causal"]) for row in rows}, key=lambda column: (order[column[0]], column[1]))
