"""Ascending and descending loops of a causal call: a small example of csrc/kernels/schedule/loop_order.h.

Two heads of 4 key tiles (128 keys each) and 8 query tiles (64 queries each) run on 4 CTAs. The first head is ascending,
the second one descending. tests/packaging/test_drawings.py compares this with what LoopOrder computes.
"""

from svg import Box, Drawing

KEY_TILES = 4
QUERY_TILES_OF_KEY_TILE = 2
QUERY_TILES = KEY_TILES * QUERY_TILES_OF_KEY_TILE
CTAS = 4
FOLLOWED = 7  # the query tile whose contributors are outlined

LEFT = 48
CELL = 30
ROW = 62
TOP = 40


def work_tiles() -> list[tuple[str, int, list[int]]]:
    """(direction, key tile, its query tiles), in the order in which CTAs fetch them."""
    seen = {tile: list(range(QUERY_TILES_OF_KEY_TILE * tile, QUERY_TILES)) for tile in range(KEY_TILES)}
    ascending = [("ascending", tile, seen[tile]) for tile in reversed(range(KEY_TILES))]
    return ascending + [("descending", tile, seen[tile][::-1]) for tile in range(KEY_TILES)]


def placed() -> list[tuple[int, int, str, int, list[int]]]:
    """(CTA, first step, direction, key tile, its query tiles): a CTA fetches the next work tile when it is free."""
    free = [0] * CTAS
    found = []
    for direction, tile, queries in work_tiles():
        cta = free.index(min(free))
        found.append((cta, free[cta], direction, tile, queries))
        free[cta] += len(queries)
    return found


def draw() -> str:
    drawing = Drawing("Causal key tiles in ascending and descending order end together and fill the CTAs")
    steps = max(start + len(queries) for _, start, _, _, queries in placed())
    drawing.text(LEFT, 15, "time, in iterations →", "faint")
    for cta, start, direction, tile, queries in placed():
        colour = "blue" if direction == "ascending" else "orange"
        top = TOP + ROW * cta
        drawing.text(LEFT + CELL * start + 2, top - 5, f"key tile {tile}")
        for i, query in enumerate(queries):
            drawing.block(Box(LEFT + CELL * (start + i), top, CELL, CELL), colour, [str(query)])
    for cta in range(CTAS):
        drawing.text(4, TOP + ROW * cta + 20, f"CTA {cta}", "bold")
    for cta, start, _, _, queries in placed():
        x = LEFT + CELL * (start + queries.index(FOLLOWED))
        drawing.outline(Box(x + 1.5, TOP + ROW * cta + 1.5, CELL - 3, CELL - 3))
    legend = TOP + ROW * CTAS - 2
    drawing.block(Box(4, legend, 18, 18), "blue", [])
    drawing.text(28, legend + 13, "first head, ascending")
    drawing.block(Box(168, legend, 18, 18), "orange", [])
    drawing.text(192, legend + 13, "second head, descending")
    drawing.outline(Box(5.5, legend + 26, 15, 15))
    drawing.text(28, legend + 38, f"query tile {FOLLOWED}: contributors add in this order")
    assert LEFT + CELL * steps <= 360
    drawing.height = legend + 50
    return drawing.svg()
