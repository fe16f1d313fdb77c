"""The shared memory of the forward kernel at head dim 128 (ForwardShared), with sizes from the tile's numbers.

tests/packaging/test_drawings.py compares these numbers with those that the kernel is compiled for.
"""

from svg import TIMES, Box, Drawing

HEAD_DIM = 128
WARPGROUPS = 2
KEYS = 128
QUERY_STAGES = 2
KEY_STAGES = 2
WARPGROUP_ROWS = 64  # queries of a consumer warpgroup
ONES = 64  # columns of ones that follow V
ELEMENT_BYTES = 2
LIMIT = 227  # KiB that a CTA may have

TOP = 26
UNIT = 2.1  # of height for a KiB
BAR = 116
WIDTH = 116


def blocks() -> list[tuple[str, float, str, str]]:
    """(name, KiB, colour, what it holds), in the order of addresses."""
    kib = ELEMENT_BYTES / 1024
    found = []
    for stage in range(QUERY_STAGES):
        for warpgroup in range(WARPGROUPS):
            size = WARPGROUP_ROWS * HEAD_DIM * kib
            found.append((f"q[{stage}][{warpgroup}]", size, "blue", f"{WARPGROUP_ROWS} {TIMES} {HEAD_DIM}"))
    for stage in range(KEY_STAGES):
        found.append((f"k[{stage}]", KEYS * HEAD_DIM * kib, "green", f"{KEYS} {TIMES} {HEAD_DIM}"))
    for stage in range(KEY_STAGES):
        found.append((f"v[{stage}]", KEYS * HEAD_DIM * kib, "orange", f"{KEYS} {TIMES} {HEAD_DIM}"))
        found.append((f"v[{stage}].ones", KEYS * ONES * kib, "purple", f"{KEYS} {TIMES} {ONES}"))
    return found


def draw() -> str:
    drawing = Drawing(f"The shared memory of the forward kernel at head dim {HEAD_DIM}, {LIMIT} KiB")
    drawing.text(BAR - 8, 16, "KiB", "faint", "end")
    drawing.text(BAR + WIDTH / 2, 16, "ForwardShared", "code bold", "middle")
    at = 0.0
    for name, size, colour, shape in blocks():
        box = Box(BAR, TOP + at * UNIT, WIDTH, size * UNIT)
        drawing.block(box, colour, [f"`{name}"])
        drawing.text(BAR + WIDTH + 8, box.y + box.height / 2 + 4, f"{shape}: {size:g} KiB", "faint")
        drawing.text(BAR - 8, box.y + 9 if at == 0 else box.y + 4, f"{at:g}", "faint", "end")
        at += size
    tiles = at
    rest = Box(BAR, TOP + tiles * UNIT, WIDTH, (LIMIT - tiles) * UNIT)
    drawing.block(rest, "grey", [])
    drawing.text(BAR - 8, rest.y + 4, f"{tiles:g}", "faint", "end")
    drawing.text(BAR - 8, rest.end + 16, f"{LIMIT}", "faint", "end")
    drawing.line([(BAR - 6, rest.end + 12), (BAR, rest.end)])
    drawing.text(BAR, rest.end + 16, "work tiles and barriers,")
    drawing.text(BAR, rest.end + 31, "up to the limit of a CTA")
    for first, count, lines in (
        (0, QUERY_STAGES * WARPGROUPS, ("Q, and then O:", "stages of", "a work tile")),
        (QUERY_STAGES * WARPGROUPS, KEY_STAGES, ("K: stages of", "a key tile")),
        (QUERY_STAGES * WARPGROUPS + KEY_STAGES, 2 * KEY_STAGES, ("V: stages of", "a key tile")),
    ):
        sizes = [size for _, size, _, _ in blocks()]
        top = TOP + sum(sizes[:first]) * UNIT
        middle = top + sum(sizes[first : first + count]) * UNIT / 2
        for i, line in enumerate(lines):
            drawing.text(2, middle + 15 * i - 7 * (len(lines) - 1) + 4, line)
    drawing.height = rest.end + 40
    return drawing.svg()
