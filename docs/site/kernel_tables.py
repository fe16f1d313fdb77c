"""The tables of kernels in the documents, from csrc/kernels/config/ and nothing else.

    python docs/site/kernel_tables.py    # after a change of a table there: writes it into docs/kernels/*.md

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. kernel_tables.cpp prints the rows.
Rows that differ in their head dims, or in their score mode, become one row.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "kernels"
REGION = re.compile(r"(<!-- table: ([^>]*) -->\n).*?(<!-- end of table -->)", re.DOTALL)

TIMES, NOTHING = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
QUERIES_KEYS, HEAD_DIMS, NOTES = f"queries {TIMES} keys", "head dims of q and k, v", "also"

Row = dict[str, Any]  # as kernel_tables.cpp prints it
Cells = dict[str, str]  # by the heading of the column
Cell = Callable[[Row], str]


@dataclass(frozen=True)
class Note:
    """What the last column says of some rows. name: with the row's own numbers. text: its line below the table."""

    name: str
    of_row: Callable[[Row], bool]
    text: str


@dataclass(frozen=True)
class Table:
    """columns: heading -> cell. merged: the columns in which rows may differ and still become one. repeated: how many
    of the first columns are left empty where they repeat what is above."""

    columns: dict[str, Cell]
    merged: tuple[str, ...] = ()
    repeated: int = 0
    notes: tuple[Note, ...] = ()


def is_set(column: str) -> Callable[[Row], bool]:
    return lambda row: row[column] == 1


def is_clear(column: str) -> Callable[[Row], bool]:
    return lambda row: row[column] == 0


def number(column: str) -> Cell:
    return lambda row: str(row[column])


def head_dims(row: Row) -> str:
    return f"({row['qk']}, {row['v']})"


def tile(row: Row) -> str:
    return f"{row['block_m']} {TIMES} {row['block_n']}"


def head_dim(row: Row) -> str:
    return str(row["qk"]) if row["qk"] == row.get("v", row["qk"]) else head_dims(row)


def elements(row: Row) -> str:
    return "16 bits" if row["element_bytes"] == 2 else "float32"


def rows_per_warp(row: Row) -> str:
    return str(row["block_m"] // row["warps"])


SCORES = {"scores": number("score")}
HOPPER = SCORES | {HEAD_DIMS: head_dims}
HOPPER_MERGED = (HEAD_DIMS, "scores")
PORTABLE = {"elements": elements} | SCORES | {"head dims": head_dim}
PORTABLE_MERGED = ("head dims", "scores")

SLICES = Note(
    "{slices} slices",
    lambda row: row["slices"] > 1,
    "as many CTAs share a tile. Each computes the same scores, and its share of the result's columns",
)


def ctas_per_sm(text: str) -> Note:
    return Note("{ctas_per_sm} CTAs per SM", lambda row: row["ctas_per_sm"] > 1, text)


TABLES = {
    "sm90 forward": Table(
        HOPPER
        | {
            QUERIES_KEYS: tile,
            "stages of Q": number("q_stages"),
            "of K and V": number("kv_stages"),
            "registers": number("registers"),
        },
        HOPPER_MERGED,
        1,
        (
            ctas_per_sm("the softmax of one overlaps the GEMMs of the other"),
            Note("split-KV", is_set("split_kv"), "several CTAs share the keys of a tile of queries"),
            Note("no ping-pong", is_clear("ping_pong"), "nothing orders the GEMMs of the warpgroups"),
            Note("no overlap", is_clear("intra_overlap"), "a warpgroup waits for O before it issues the next S"),
            Note("TMA store", is_set("tma_store"), "a warp stages O over its rows of Q, and TMA stores it"),
            Note(
                "early LSE",
                is_set("early_lse"),
                "the LSE and the factors of O are computed while the last GEMM is in flight",
            ),
            Note(
                "early release of Q",
                is_set("early_q_release"),
                "Q is released after the last S of a work tile, and not only after its last softmax",
            ),
            Note(
                "late wait for O",
                is_set("late_pv_wait"),
                "the PV GEMM is waited for after a quarter of a tile's exponentials",
            ),
            Note(
                "unmasked loop",
                is_set("unmasked_loop"),
                "tiles of keys without masked scores have a mainloop of their own",
            ),
            Note("rounded sums", is_set("rounded_sums"), "O is divided by the sums of P as it was rounded"),
            Note("row_max", is_set("row_max"), "the largest score of each row is written where a call wants it"),
            Note(
                "cache", is_set("kv_cache"), "K and V may be a cache, and up to head dim 128 query heads may be packed"
            ),
            Note(
                "later keys", is_set("later_keys"), "queries may see later keys, and the row maximum follows the scores"
            ),
        ),
    ),
    "sm90 single tile": Table(
        SCORES
        | {
            "head dims": head_dim,
            "keys": number("block_n"),
            "consumer warpgroups": number("warpgroups"),
            "stages of Q of each": number("q_stages"),
            "stages of K and V": number("kv_stages"),
            "registers": number("registers"),
        },
        ("scores",),
        notes=(
            Note("overlap", is_set("intra_overlap"), "a warpgroup issues the next S before it stores O"),
            Note(
                "{parts} parts",
                lambda row: row["parts"] > 1,
                "the QK GEMM of each part of the keys but the first overlaps the PV GEMM of the one before",
            ),
        ),
    ),
    "sm90 backward tiles": Table(
        {
            "head dims": head_dim,
            "stages of Q, dO and dS": number("q_stages"),
            "of K and V": number("kv_stages"),
            "columns of dQ": number("dq_columns"),
            "registers: producer": number("producer_registers"),
            "key warpgroups": number("key_registers"),
            "dQ warpgroup": number("dq_registers"),
        },
        notes=(
            Note(
                "K and V in registers",
                is_set("keys_in_registers"),
                "registers hold them as left operands too, which saves bandwidth of shared memory",
            ),
        ),
    ),
    "sm90 backward": Table(
        SCORES | {"head dims": head_dim},
        ("head dims", "scores"),
        1,
        (
            Note(
                "pre-signalled dQ",
                is_set("pre_signals_dq"),
                "a reducer warp is signalled before a partial dQ is computed",
            ),
            Note("augmented columns", is_set("adds_statistics"), "the GEMMs S and dP add the LSE and delta"),
            Note("query chunks", is_set("chunks_queries"), "a launch has some of a head's queries"),
            Note(
                "beside a mask",
                is_set("hides_keys"),
                "or intervals or lists of blocks; the other rows with a bias have it alone",
            ),
            Note("sums of dS", is_set("sums_dscores"), "for the gradient of a key bias"),
        ),
    ),
    "sm90 two-pass": Table(
        {
            HEAD_DIMS: head_dims,
            "scores": number("score"),
            "stages of K": number("k_stages"),
            "of V": lambda row: NOTHING if row["dq_from_tiles"] else number("v_stages")(row),
            "registers: producer": number("producer_registers"),
            "consumer": number("registers"),
        },
        HOPPER_MERGED,
        1,
        (
            Note(
                "dP ahead",
                is_set("dp_ahead"),
                "dP of the next tile of keys is computed while dQ of this one is, as S is",
            ),
            Note(
                "dQ from materialised tiles",
                is_set("dq_from_tiles"),
                "the score kernel runs instead of the dQ kernel, and slices of all operands share stages",
            ),
        ),
    ),
    "sm80 forward": Table(
        PORTABLE | {QUERIES_KEYS: tile, "rows per warp": rows_per_warp, "stages": number("stages")},
        PORTABLE_MERGED,
        2,
        (
            SLICES,
            ctas_per_sm("they hide each other's prologue and epilogue"),
            Note(
                "for few queries",
                is_set("for_few_queries"),
                "keeps the addresses of copies in registers, and asks for no interval of keys where all are visible",
            ),
            Note("repairs rows", is_set("repairs_in_kernel"), "the kernel itself computes rows with a NaN again"),
            Note(
                "unmasked by warp",
                is_set("unmasked_by_warp"),
                "the first row of a warp, not that of the CTA, decides which tiles need no masking",
            ),
        ),
    ),
    "sm80 bias-stationary": Table(
        {
            "head dims": head_dim,
            QUERIES_KEYS: tile,
            "rows per warp": rows_per_warp,
            "stages": number("stages"),
            "CTAs per SM: forward": number("ctas_per_sm"),
            "backward": number("ctas_per_sm_backward"),
        },
    ),
    "sm80 dQ": Table(
        PORTABLE | {QUERIES_KEYS: tile, "rows per warp": rows_per_warp},
        PORTABLE_MERGED,
        2,
        (
            SLICES,
            Note("split-KV", is_set("divides_keys"), "several CTAs may share the keys of a tile of queries"),
            Note(
                "stores P and dS",
                is_set("stores_p_and_ds"),
                "may materialise P and dS for the GEMMs of dK and dV; generic kernels of head dim 64 never do",
            ),
            Note(
                "K and V share a tile",
                is_set("one_key_tile"),
                "shared memory has no room for two, so each is loaded when the other one is not read any more",
            ),
        ),
    ),
    "sm80 dK/dV": Table(
        PORTABLE | {f"keys {TIMES} queries": tile, "rows per warp": rows_per_warp, "stages": number("stages")},
        PORTABLE_MERGED,
        2,
        (
            SLICES,
            Note("two launches", is_clear("both"), "one for dK, one for dV: registers do not hold both accumulators"),
            Note("stores dS", is_set("stores_ds"), "may materialise dS for the GEMM of dQ"),
            Note(
                "Q and dO share a tile",
                is_set("one_query_tile"),
                "shared memory has no room for two, so each is loaded when the other one is not read any more",
            ),
        ),
    ),
}


def rows() -> dict[str, list[Row]]:
    """Table -> its rows, as the headers of csrc/kernels/config/ have them."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "c++"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "kernel_tables"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run([compiler, "-std=c++20", "-I", ROOT / "csrc", source, "-o", program], check=True)
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, list[Row]] = {}
    for line in lines:
        row = json.loads(line)
        found.setdefault(row.pop("table"), []).append(row)
    return found


def merge(cells: list[Cells], column: str) -> list[Cells]:
    """Rows that differ in this column alone become one."""
    merged: dict[tuple[str, ...], Cells] = {}
    for row in cells:
        others = tuple(cell for name, cell in row.items() if name != column)
        first = merged.setdefault(others, row)
        if first is not row:
            merged[others] = first | {column: f"{first[column]}; {row[column]}"}
    return list(merged.values())


def markdown(table: Table, table_rows: list[Row]) -> str:
    notes = [note for note in table.notes if any(note.of_row(row) for row in table_rows)]
    cells: list[Cells] = []
    for row in table_rows:
        said = ", ".join(note.name.format(**row) for note in notes if note.of_row(row))
        shown = {name: cell(row) for name, cell in table.columns.items()}
        shown |= {NOTES: said or NOTHING} if table.notes else {}
        if shown not in cells:
            cells.append(shown)
    for column in table.merged:
        cells = merge(cells, column)
    names = [*table.columns, *([NOTES] if table.notes else [])]
    lines = [names, ["---"] * len(names)]
    above: list[str] = []
    for merged in cells:
        line = list(merged.values())
        repeated = [bool(above) and line[: i + 1] == above[: i + 1] for i in range(table.repeated)]
        above = line
        lines.append(["" if i < len(repeated) and repeated[i] else cell for i, cell in enumerate(line)])
    legend = [f"- *{note.name.format(**next(filter(note.of_row, table_rows)))}*: {note.text}." for note in notes]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *legend])


def with_tables(text: str, found: dict[str, list[Row]]) -> str:
    """A page with each table between its marks as the headers have it."""
    return REGION.sub(lambda at: f"{at[1]}\n{markdown(TABLES[at[2]], found[at[2]])}\n\n{at[3]}", text)


def tables_of(text: str) -> list[str]:
    return [name for _, name, _ in REGION.findall(text)]


def main() -> None:
    found = rows()
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(with_tables(text, found), encoding="utf-8")


if __name__ == "__main__":
    main()
