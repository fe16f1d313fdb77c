"""The masks of docs/which_mask.md: a row for each query, and a bar for each interval of keys that it sees.

A picture is text: an x where the query of a row sees the key of a column. tests/packaging/test_drawings.py compares
each with what flash_attn_ext.masks makes.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from svg import LINE, Box, Drawing

CELL = 15
LEFT = 24
TOP = 24
COLOURS = ("blue", "orange", "green")  # of the intervals of a row, from left to right


class Picture(NamedTuple):
    title: str
    queries: str  # a letter for each
    keys: str
    seen: str  # rows of x and .
    says: tuple[str, ...]  # beside the rows
    axes: tuple[str, ...] = ("down: queries", "across: keys", "a bar: an interval")


PICTURES = {
    "documents": Picture(
        "Documents packed in one sequence, causal inside",
        "AAAABBBCCCCC",
        "AAAABBBCCCCC",
        """
        x...........
        xx..........
        xxx.........
        xxxx........
        ....x.......
        ....xx......
        ....xxx.....
        .......x....
        .......xx...
        .......xxx..
        .......xxxx.
        .......xxxxx
        """,
        ("A, B, C:", "three documents"),
    ),
    "prefix_lm": Picture(
        "A prefix that sees itself whole, and causal tokens behind it",
        "ppppp.......",
        "ppppp.......",
        """
        xxxxx.......
        xxxxx.......
        xxxxx.......
        xxxxx.......
        xxxxx.......
        xxxxxx......
        xxxxxxx.....
        xxxxxxxx....
        xxxxxxxxx...
        xxxxxxxxxx..
        xxxxxxxxxxx.
        xxxxxxxxxxxx
        """,
        ("p: the prefix",),
    ),
    "chunked": Picture(
        "Chunks of four tokens, causal inside",
        "111122223333",
        "111122223333",
        """
        x...........
        xx..........
        xxx.........
        xxxx........
        ....x.......
        ....xx......
        ....xxx.....
        ....xxxx....
        ........x...
        ........xx..
        ........xxx.
        ........xxxx
        """,
        ("1, 2, 3: chunks",),
    ),
    "blocks_within_causal": Picture(
        "Causal text with two images, whose tokens see one another",
        "..AAA..BBB..",
        "..AAA..BBB..",
        """
        x...........
        xx..........
        xxxxx.......
        xxxxx.......
        xxxxx.......
        xxxxxx......
        xxxxxxx.....
        xxxxxxxxxx..
        xxxxxxxxxx..
        xxxxxxxxxx..
        xxxxxxxxxxx.
        xxxxxxxxxxxx
        """,
        ("A, B: two images", "dots: text"),
    ),
    "block_causal": Picture(
        "Frames of a video: whole inside, causal from frame to frame",
        "111222333444",
        "111222333444",
        """
        xxx.........
        xxx.........
        xxx.........
        xxxxxx......
        xxxxxx......
        xxxxxx......
        xxxxxxxxx...
        xxxxxxxxx...
        xxxxxxxxx...
        xxxxxxxxxxxx
        xxxxxxxxxxxx
        xxxxxxxxxxxx
        """,
        ("1 to 4: frames",),
    ),
    "global_and_window": Picture(
        "Two global tokens, and a window of two keys on each side",
        "gg..........",
        "gg..........",
        """
        xxxxxxxxxxxx
        xxxxxxxxxxxx
        xxxxx.......
        xxxxxx......
        xxxxxxx.....
        xx.xxxxx....
        xx..xxxxx...
        xx...xxxxx..
        xx....xxxxx.
        xx.....xxxxx
        xx......xxxx
        xx.......xxx
        """,
        ("g: global tokens",),
    ),
    "shared_prefix": Picture(
        "Three continuations of one prefix, all causal",
        "pppp11122233",
        "pppp11122233",
        """
        x...........
        xx..........
        xxx.........
        xxxx........
        xxxxx.......
        xxxxxx......
        xxxxxxx.....
        xxxx...x....
        xxxx...xx...
        xxxx...xxx..
        xxxx......x.
        xxxx......xx
        """,
        ("p: the prefix", "1, 2, 3: branches"),
    ),
    "block_diffusion": Picture(
        "A noisy copy in blocks of two tokens, and behind it the clean one",
        "aabbccAABBCC",
        "aabbccAABBCC",
        """
        xx..........
        xx..........
        ..xx..xx....
        ..xx..xx....
        ....xxxxxx..
        ....xxxxxx..
        ......xx....
        ......xx....
        ......xxxx..
        ......xxxx..
        ......xxxxxx
        ......xxxxxx
        """,
        ("a, b, c: noisy blocks", "A, B, C: clean blocks"),
    ),
    "padding": Picture(
        "A sequence of nine tokens with padding at its left",
        "---.........",
        "---.........",
        """
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        ...xxxxxxxxx
        """,
        ("-: padding",),
    ),
    "tree": Picture(
        "A tree of eight tokens behind a prefix of four keys",
        "01234567",
        "pppp01234567",
        """
        xxxxx.......
        xxxxxx......
        xxxxxxx.....
        xxxxxx.x....
        xxxxx...x...
        xxxxx...xx..
        xxxxx...x.x.
        xxxxx...x.xx
        """,
        ("p: keys of a cache", "1, 4: children of 0", "2, 3: children of 1", "5, 6: children of 4", "7: a child of 6"),
    ),
    "blocks": Picture(
        "Chosen blocks of keys for each block of queries",
        "............",
        "............",
        """
        x...........
        xx..........
        xxx.........
        x.xx........
        .x.xx.......
        x..x.x......
        ..x.x.x.....
        x....x.x....
        ...x..x.x...
        x...x....x..
        .x.....x..x.
        ..x..x.....x
        """,
        ("each its own block,", "and the best two", "before it"),
        ("down: query blocks", "across: key blocks", "a block: 64 or 128"),
    ),
}


def rows_of(picture: Picture) -> list[str]:
    return picture.seen.split()


def draw(picture: Picture) -> str:
    drawing = Drawing(picture.title)
    rows = rows_of(picture)
    for column, key in enumerate(picture.keys):
        drawing.text(LEFT + CELL * (column + 0.5), TOP - 7, key, "faint", "middle")
    for at, (query, row) in enumerate(zip(picture.queries, rows, strict=True)):
        y = TOP + CELL * at
        drawing.text(LEFT - 6, y + 11.5, query, "faint", "end")
        drawing.block(Box(LEFT, y + 1, CELL * len(row), CELL - 2), "grey", [])
        for bar, colour in zip(re.finditer("x+", row), COLOURS, strict=False):
            drawing.block(Box(LEFT + CELL * bar.start(), y + 1, CELL * len(bar.group()), CELL - 2), colour, [])
    x = LEFT + CELL * len(picture.keys) + 12
    y = TOP
    for text in (*picture.axes, "", *picture.says):
        y += LINE if text else LINE / 2
        if text:
            drawing.text(x, y, text)
    drawing.height = max(TOP + CELL * len(rows), y) + 6
    return drawing.svg()


def drawings() -> dict[str, Callable[[], str]]:
    return {f"mask_{name}.svg": lambda picture=picture: draw(picture) for name, picture in PICTURES.items()}
