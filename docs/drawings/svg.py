"""A drawing as SVG text, with one palette for light and one for dark themes.

A drawing is 360 units wide, about as wide as the text of a page on a phone, and no text is smaller than 12 units.
Blocks differ in more than their colour: each carries its name.
"""

from dataclasses import dataclass, field
from html import escape

WIDTH = 360
SHOWN_WIDTH = 480  # pixels, where the page is wider than that
TEXT = 12
LINE = 15  # from one line of text to the next
TIMES = "\u00d7"
MINUS = "\u2212"

# A class of blocks: its fill and its outline. The hues are those of Okabe and Ito, which colour-blind people can tell
# apart.
LIGHT = {
    "page": "#ffffff",
    "text": "#1f2328",
    "faint": "#59636e",
    "line": "#7d8590",
    "blue": ("#d3e8f6", "#0072b2"),
    "orange": ("#fce6bd", "#9a6700"),
    "green": ("#cdeee2", "#007a5a"),
    "purple": ("#f4dcea", "#a0447a"),
    "grey": ("#eef1f4", "#7d8590"),
}
DARK = {
    "page": "#0d1117",
    "text": "#e6edf3",
    "faint": "#a3adb8",
    "line": "#7d8590",
    "blue": ("#12344d", "#56b4e9"),
    "orange": ("#4a3300", "#e69f00"),
    "green": ("#0b3d2e", "#2fc79a"),
    "purple": ("#4a2440", "#d68fb8"),
    "grey": ("#21262d", "#7d8590"),
}


def _style(palette: dict) -> str:
    rules = [
        f".page{{fill:{palette['page']}}}",
        f"text{{fill:{palette['text']}}}",
        f"text.faint{{fill:{palette['faint']}}}",
        f".line{{stroke:{palette['line']};fill:none}}",
        f".head{{fill:{palette['line']}}}",
        f".mark{{stroke:{palette['text']};fill:none;stroke-width:2.5}}",
    ]
    for name, colours in palette.items():
        if isinstance(colours, tuple):
            rules.append(f".{name}{{fill:{colours[0]};stroke:{colours[1]}}}")
    return "".join(rules)


STYLE = (
    f"text{{font:{TEXT}px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}}"
    "text.code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    "text.bold{font-weight:600}"
    f"{_style(LIGHT)}@media(prefers-color-scheme:dark){{{_style(DARK)}}}"
)


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def end(self) -> float:
        return self.y + self.height


@dataclass
class Drawing:
    """What is drawn so far. title: what the drawing shows, for those who cannot see it."""

    title: str
    height: float = 0
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> None:
        """kind: some of "code", "bold" and "faint". y is that of the base line."""
        attributes = f' class="{kind}"' if kind else ""
        attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(content, quote=False)}</text>')

    def block(self, box: Box, colour: str, lines: list[str], kind: str = "") -> None:
        """A box with lines of text in its middle; a line that begins with a backtick is code."""
        self.parts.append(
            f'<rect class="{colour}" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="3"/>'
        )
        first = box.y + (box.height - LINE * len(lines)) / 2 + 11.5
        for i, line in enumerate(lines):
            code = "code" if line.startswith("`") else ""
            self.text(
                box.middle, first + LINE * i, line.removeprefix("`"), " ".join(filter(None, (code, kind))), "middle"
            )

    def outline(self, box: Box) -> None:
        self.parts.append(
            f'<rect class="mark" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="3"/>'
        )

    def line(self, points: list[tuple[float, float]], dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="3 3"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="line" points="{path}"{dashes}/>')

    def arrow(self, points: list[tuple[float, float]], dashed: bool = False) -> None:
        """A line with a head at its end, whose last piece is horizontal or vertical."""
        self.line(points, dashed)
        (from_x, from_y), (x, y) = points[-2:]
        along = (x > from_x) - (x < from_x), (y > from_y) - (y < from_y)
        back = x - 6 * along[0], y - 6 * along[1]
        side = 3.5 * along[1], 3.5 * along[0]
        corners = [(x, y), (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
        self.parts.append(f'<polygon class="head" points="{" ".join(f"{a:g},{b:g}" for a, b in corners)}"/>')

    def svg(self) -> str:
        height = round(self.height)
        size = f'width="{SHOWN_WIDTH}" height="{round(height * SHOWN_WIDTH / WIDTH)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size} role="img">'
        page = f'<rect class="page" width="{WIDTH}" height="{height}"/>'
        lines = [head, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", page, *self.parts, "</svg>"]
        return "\n".join(lines) + "\n"
