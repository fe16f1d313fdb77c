"""Ping-pong scheduling of two consumer warpgroups, in the middle of a work tile.

Lengths are to scale with the bounds of docs/kernels/sm90.md at head dim 128: the GEMMs of an iteration take 0.125
cycles of an SM for a pair of query and key, and its exponentials half of that.
"""

from svg import Box, Drawing

GEMM = 44  # units of height for one of an iteration's two GEMMs, and for its exponentials
TOP = 28
COLUMNS = {1: 4, "tensor cores": 128, 2: 252}
COLUMN = 104
COLOURS = {1: "blue", 2: "orange"}
FIRST_TILE = 7  # the key tile of the first iteration that is shown
TURNS = 4


def draw() -> str:
    drawing = Drawing("Ping-pong scheduling: the softmax of one warpgroup runs under the GEMMs of the other")
    for name, x in COLUMNS.items():
        drawing.text(x + COLUMN / 2, 16, name if isinstance(name, str) else f"warpgroup {name}", "bold", "middle")
    for turn in range(TURNS):
        iteration(drawing, 1 + turn % 2, FIRST_TILE - turn // 2, TOP + 2 * GEMM * turn)
    end = TOP + 2 * GEMM * TURNS
    gemms(drawing, 1, FIRST_TILE - TURNS // 2, end)
    drawing.height = end + 2 * GEMM + 4
    return drawing.svg()


def gemms(drawing: Drawing, warpgroup: int, tile: int, top: float) -> None:
    x = COLUMNS["tensor cores"]
    colour = COLOURS[warpgroup]
    drawing.block(Box(x, top, COLUMN, GEMM), colour, [f"S({tile}) = Q·K({tile})ᵀ", f"warpgroup {warpgroup}"])
    product = f"O += P({tile + 1})·V({tile + 1})"
    drawing.block(Box(x, top + GEMM, COLUMN, GEMM), colour, [product, f"warpgroup {warpgroup}"])
    own = COLUMNS[warpgroup]
    drawing.text(own + COLUMN / 2, top + GEMM + 4, "waits for both", "faint", "middle")


def iteration(drawing: Drawing, warpgroup: int, tile: int, top: float) -> None:
    """The GEMMs, then the softmax under those of the other warpgroup, then the issue of the next GEMMs."""
    gemms(drawing, warpgroup, tile, top)
    x = COLUMNS[warpgroup]
    softmax = Box(x, top + 2 * GEMM, COLUMN, GEMM)
    drawing.block(softmax, COLOURS[warpgroup], ["softmax:", f"P({tile}) = exp2(…)"])
    for i, line in enumerate(("sync,", "issue the next,", "arrive")):
        drawing.text(x + COLUMN / 2, softmax.end + 13 + 14 * i, line, "", "middle")
