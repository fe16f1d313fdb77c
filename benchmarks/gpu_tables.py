"""The tables of speed on the pages of the GPU kernels, in Markdown, from benchmarks/results/ and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from readme_figures import rows, times_as_fast

from flash_attn_ext.cli.bench import plot
from flash_attn_ext.cli.bench.rows import geometric_mean

SHORT = {
    "flash": "FA2",
    "fa3": "FA3",
    "fa4": "FA4",
    "fa4 deterministic": "FA4 deterministic",
    "flex": "FlexAttention",
    "cudnn flex": "cuDNN's FlexAttention",
}
PASSES = ("forward", "backward")


def grid(report: str, pass_: str) -> str:
    """TFLOP/s of the suite `grid`, a line for each head dim and a column for each length, and its means."""
    found = rows(report, suite="grid", **{"pass": pass_})
    peers = _peers(found)
    lengths = sorted({row["seqlen_q"] for row in found})
    lines = [f"**{' / '.join(['ours', *map(_title, peers)])}**, TFLOP/s:", ""]
    lines += _heading(["head dim", *(f"{length} tokens" for length in lengths)])
    for head_dim, case in dict.fromkeys((row["head_dim"], row["case"]) for row in found):
        points = {row["seqlen_q"]: row for row in found if (row["head_dim"], row["case"]) == (head_dim, case)}
        lines.append(_line([f"{head_dim} {case}", *(_rates(points[length], peers) for length in lengths)]))
    return "\n".join([*lines, "", *_means(found, peers)])


def _rates(row: dict, peers: Sequence[str]) -> str:
    rates = [row["ours_tflops"], *(row["peer_tflops"].get(name) for name in peers)]
    return " / ".join("-" if rate is None else f"{rate:.0f}" for rate in rates)


def _means(found: list[dict], peers: Sequence[str]) -> list[str]:
    lines = _heading(["times as fast as", "geometric mean", "worst"])
    for name in [None, *peers]:
        ratios = [times_as_fast([row], name) for row in found if name is None or row["peer_ms"].get(name) is not None]
        title = "the fastest of each point" if name is None else _title(name)
        lines.append(_line([title, f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}"]))
    return lines


def suites(report: str, passes: Sequence[str], names: Sequence[str]) -> str:
    """TFLOP/s of every row of those of these suites that the report has, and how many times as fast as the fastest peer
    ours is."""
    found = [row for row in rows(report) if row["suite"] in names and row["pass"] in passes]
    peers = _peers(found)
    lines = _heading(["call", *(["pass"] if len(passes) > 1 else []), "ours", *map(_title, peers), "times as fast"])
    for row in found:
        cells = [problem(row), *([row["pass"]] if len(passes) > 1 else []), f"{row['ours_tflops']:.3g}"]
        cells += ["-" if (rate := row["peer_tflops"].get(name)) is None else f"{rate:.3g}" for name in peers]
        lines.append(_line([*cells, _against(row)]))
    return "\n".join(lines)


def problem(row: dict) -> str:
    return f"{SUITES.get(row['suite'], row['suite'])}: {_call(row)}"


SUITES = {"head_dims": "head dims", "in_a_row": "back to back", "few_queries": "few queries", "gqa": "groups"}


def _against(row: dict) -> str:
    if any(time is not None for time in row["peer_ms"].values()):
        return f"{times_as_fast([row]):.2f}"
    ((name, time),) = row["own_ms"].items()
    return f"{time / row['ours_ms']:.2f} ({name})"


def _call(row: dict) -> str:
    heads = f"{row['num_heads']}" + f"/{row['num_key_heads']}" * (row["num_key_heads"] != row["num_heads"])
    length = f"S{row['seqlen_q']}" + f" of {row['seqlen_k']}" * (row["seqlen_k"] != row["seqlen_q"])
    dims = f"D{row['head_dim']}" + f", {row['head_dim_v']}" * (row["head_dim_v"] != row["head_dim"])
    dtype = [row["dtype"]] * (row["dtype"] != "bfloat16")
    return ", ".join([row["case"], *dtype, f"B{row['batch']} H{heads} {length} {dims}"])


def decode(report: str) -> str:
    """Steps of the suite `decode` beside other kernels, in microseconds, and TB/s of ours."""
    found = [row for row in rows(report, suite="decode") if row["against"] == "best"]
    peers = _peers(found, unit="us")
    lines = _heading(["queries, keys", "ours", *map(_title, peers), "times as fast", "TB/s"])
    for row in found:
        heads = {32: "32 key heads", 1: "1 key head"}.get(row["num_key_heads"])
        details = [f"{row['num_heads']} query heads"] * (row["num_heads"] != 32) + ([heads] if heads else [])
        details += [f"D{row['head_dim']}"] * (row["head_dim"] != 128) + [row["dtype"]] * (row["dtype"] != "bfloat16")
        details += ["padding mask"] * ("masked" in row["case"])
        call = ", ".join([f"{row['seqlen_q']}, {row['batch']} x {row['seqlen_k']}", *details])
        times = [row["ours_us"], *(row["peer_us"].get(name) for name in peers)]
        cells = ["-" if time is None else f"{time:.1f}" for time in times]
        ratio = f"{times_as_fast([row]):.2f}" if any(times[1:]) else "-"
        lines.append(_line([call, *cells, ratio, f"{row['ours_tbs']:.2f}"]))
    (copy,) = {row["copy_tbs"] for row in found}
    return "\n".join([*lines, "", f"In the same run a copy moved {copy:.2f} TB/s."])


def pages(report: str) -> str:
    """Steps with a paged cache, beside a contiguous one."""
    found: dict[str, dict[str, dict]] = {}
    for row in rows(report, suite="decode"):
        for kind in ("cache", "page 16", "page 64", "page 256"):
            if row["case"].endswith(f" {kind}"):
                found.setdefault(row["case"].removesuffix(f" {kind}"), {})[kind] = row
    lines = _heading(["cache", "contiguous", "pages of 16", "of 64", "of 256", "FA3: contiguous", "pages of 16"])
    for case, kinds in found.items():
        cells = [f"{row['ours_us']:.1f}" for row in kinds.values()]
        ratios = ["", *(f" ({row['ratio']:.2f})" for kind, row in kinds.items() if kind != "cache")]
        theirs = [f"{kinds[kind]['peer_us']['fa3']:.1f}" for kind in ("cache", "page 16")]
        lines.append(_line([case, *map("".join, zip(cells, ratios, strict=True)), *theirs]))
    return "\n".join(lines)


def host(report: str, names: Iterable[str]) -> str:
    """Host time of calls, beside PyTorch's attention and our own direct call."""
    lines = _heading(["call", "ours", "beside", "times as fast"])
    for row in (row for name in names for row in rows(report, suite=name)):
        if row["suite"] == "switch":
            call, (other, time) = f"through PyTorch's switch, {row['pass']}", ("direct", row["own_us"]["direct"])
        else:
            call, (other, time) = f"{row['case']}, {row['pass']}", ("PyTorch", row["peer_us"]["torch sdpa"])
        lines.append(_line([call, f"{row['ours_us']:.1f}", f"{time:.1f} ({other})", f"{time / row['ours_us']:.2f}"]))
    return "\n".join(lines)


def generate(report: str) -> str:
    """Tokens per second of a model that generates text, by those with PyTorch's attention."""
    found = rows(report, suite="generate")
    lengths = sorted({row["seqlen_q"] for row in found})
    lines = _heading(["times as fast as PyTorch's attention", *(f"{length} tokens" for length in lengths)])
    for pass_, case in dict.fromkeys((row["pass"], row["case"]) for row in found):
        of = {row["seqlen_q"]: row["ratio"] for row in found if (row["pass"], row["case"]) == (pass_, case)}
        what = "prompt" if pass_ == "prefill" else "each token after it"
        lines.append(_line([f"{what}, {case}", *(f"{of[length]:.2f}" if length in of else "-" for length in lengths)]))
    return "\n".join(lines)


def _peers(found: list[dict], unit: str = "ms") -> list[str]:
    """Those that ran one of the rows, in the order of the pictures."""
    ran = {name for row in found for name, time in row[f"peer_{unit}"].items() if time is not None}
    return [name for name in plot.TITLES if name in ran] + sorted(ran - set(plot.TITLES))


def _title(name: str) -> str:
    return SHORT.get(name) or plot.TITLES.get(name, name)


def _heading(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|" + " --- |" * len(cells)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
