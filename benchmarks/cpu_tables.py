"""The tables of docs/kernels/cpu.md, in Markdown, from benchmarks/results/ and nothing else."""

from __future__ import annotations

from readme_figures import rows, times_as_fast

from flash_attn_ext.cli.bench.rows import geometric_mean

PASSES = ("forward", "forward+backward")
DTYPES = ("float32", "bfloat16")
CASES = {"full": "full", "causal": "causal", "window 256": "window", "bool mask": "bool", "float bias": "float"}


def long_sequences() -> str:
    """The suite `cpu`: times, and how many times as fast as PyTorch and as our own call without the option."""
    report = "cpu_epyc_2_cores"
    of_pass = {name: rows(report, suite="cpu", **{"pass": name}) for name in PASSES}
    ratios = [[times_as_fast([row]) for row in found] for found in of_pass.values()]
    forward, both = ((f"{geometric_mean(found):.2f}", f"{min(found):.2f}") for found in ratios)
    lines = [
        f"The geometric mean is {forward[0]} times as fast as PyTorch forward (worst {forward[1]}),",
        f"and {both[0]} times forward + backward (worst {both[1]}).",
        "",
        "| dtype, D, case | forward: ours / PyTorch, ms; times as fast | forward + backward |",
        "| --- | --- | --- |",
    ]
    for row in of_pass["forward"]:
        name = f"{row['dtype']} {row['head_dim']} {CASES[row['case']]}"
        same = {field: row[field] for field in ("dtype", "head_dim", "case")}
        cells = [_long_cell(*(one for one in found if same.items() <= one.items())) for found in of_pass.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _long_cell(row: dict) -> str:
    cell = f"{row['ours_ms']:.1f} / {row['peer_ms']['torch sdpa']:.1f}; {times_as_fast([row]):.2f}"
    if full := row.get("own_ms", {}).get("full"):
        cell += f"; {full / row['ours_ms']:.2f} x own full"
    return cell


def few_keys() -> str:
    """The suite `few_keys`: how many times as fast as PyTorch."""
    headings = [f"{dtype} {pass_.replace('+', ' + ')}" for dtype in DTYPES for pass_ in PASSES]
    lines = [f"| B, H, Sq, Sk, D | {' | '.join(headings)} |", "| --- |" + " --- |" * len(headings)]
    fields = ("batch", "num_heads", "seqlen_q", "seqlen_k", "head_dim")
    found: dict[tuple, dict[tuple[str, str], float]] = {}
    for row in rows("cpu_few_keys_epyc", suite="few_keys"):
        shape = found.setdefault(tuple(row[field] for field in fields), {})
        shape[row["dtype"], row["pass"]] = times_as_fast([row])
    for shape, ratios in found.items():
        cells = (ratios.get((dtype, pass_)) for dtype in DTYPES for pass_ in PASSES)
        columns = ("none" if ratio is None else f"{ratio:.2f}" for ratio in cells)
        lines.append(f"| {', '.join(map(str, shape))} | {' | '.join(columns)} |")
    return "\n".join(lines)
