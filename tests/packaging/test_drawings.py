"""The drawings of docs/hopper.md and docs/which_mask.md: up to date, legible, and with the names, numbers and masks of
the code."""

import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from flash_attn_ext import masks
from support.host_programs import run_host_program

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "drawings"
OF_HOPPER = ("backward_roles", "decisions", "loop_order", "ping_pong", "query_path", "shared_memory")
# The masks of the pictures, by their names.
OF_MASKS = {
    "mask_block_causal": masks.block_causal(12, 3),
    "mask_block_diffusion": masks.block_diffusion(6, 2),
    "mask_blocks_within_causal": masks.blocks_within_causal(torch.tensor([-1, -1, 0, 0, 0, -1, -1, 1, 1, 1, -1, -1])),
    "mask_blocks": masks.from_mask(
        masks.BlockLists(
            torch.tensor([[[1, 2] + 10 * [3]]]),
            torch.tensor(
                [
                    [
                        [[0, 0, 0], [0, 1, 1], [0, 1, 2], [0, 2, 3], [4, 3, 1], [5, 0, 3], [2, 6, 4], [7, 5, 0]]
                        + [[8, 3, 6], [9, 0, 4], [1, 10, 7], [2, 5, 11]]
                    ]
                ]
            ),
        ).blocks(12 * 128)
    ),
    "mask_chunked": masks.chunked(12, 4),
    "mask_documents": masks.documents(torch.tensor([0] * 4 + [1] * 3 + [2] * 5)) & masks.causal(12),
    "mask_global_and_window": masks.global_and_window(12, 2, 2),
    "mask_padding": masks.padding(12, 9, "left"),
    "mask_prefix_lm": masks.prefix_lm(12, 5),
    "mask_shared_prefix": masks.shared_prefix(torch.tensor([0] * 4 + [1] * 3 + [2] * 3 + [3] * 2)),
    "mask_tree": masks.tree(torch.tensor([-1, 0, 1, 1, 0, 4, 4, 6]), prefix=4),
}
NAMES = (*OF_HOPPER, *OF_MASKS)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn():
    """What docs/drawings/__main__.py defines and imports."""
    before = set(sys.modules)
    yield runpy.run_path(str(FOLDER))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


def elements(name: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.parse(FOLDER / f"{name}.svg").iter(SVG + tag))


def test_drawings_are_up_to_date(drawn):
    """`python docs/drawings` writes them."""
    assert sorted(drawn["DRAWINGS"]) == sorted(path.name for path in FOLDER.glob("*.svg"))
    assert sorted(f"{name}.svg" for name in NAMES) == sorted(drawn["DRAWINGS"])
    for name, draw in drawn["DRAWINGS"].items():
        assert draw() == (FOLDER / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("name", NAMES)
def test_text_fits_a_phone(name):
    """A width of 360 units, text of 12, and nothing past an edge. Letters of code are 0.6 of their size wide, others on
    average 0.55 in the widest of the fonts."""
    (root,) = elements(name, "svg")
    _, _, width, height = map(float, root.get("viewBox").split())
    assert width == 360
    (style,) = elements(name, "style")
    assert re.findall(r"font(?:-size)?:(\d+)px", style.text) == ["12"]
    for text in elements(name, "text"):
        letter = 12 * (0.6 if "code" in text.get("class", "") else 0.55)
        x, half = float(text.get("x")), letter * len(text.text) / 2
        middle = {"middle": x, "end": x - half, None: x + half}[text.get("text-anchor")]
        assert middle - half >= -1 and middle + half <= width + 1, text.text
        assert 12 <= float(text.get("y")) <= height, text.text


@pytest.mark.parametrize("name", NAMES)
def test_drawings_say_what_they_show(name):
    (title,) = elements(name, "title")
    assert len(title.text) > 20
    page = "hopper.md" if name in OF_HOPPER else "which_mask.md"
    assert f"drawings/{name}.svg" in (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OF_MASKS)
def test_masks_are_drawn_as_they_are(drawn, name):
    """Cell by cell, and a bar for each interval."""
    families = sys.modules["mask_families"]
    rows = families.rows_of(families.PICTURES[name.removeprefix("mask_")])
    shown = torch.tensor([[cell == "x" for cell in row] for row in rows])
    assert torch.equal(OF_MASKS[name].dense(shown.shape[1])[0, 0], shown)
    bars = [rect for rect in elements(name, "rect") if rect.get("class") in families.COLOURS]
    intervals = OF_MASKS[name].merged().tensor[0, 0].unflatten(-1, (-1, 2))
    assert len(bars) == int((intervals[..., 0] < intervals[..., 1]).sum())


def luminance(colour: str) -> float:
    """WCAG 2.1, relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_text_stands_out_in_both_themes(drawn, theme):
    palette = vars(sys.modules["svg"])[theme]
    fills = [colours[0] for colours in palette.values() if isinstance(colours, tuple)]
    assert min(contrast(palette["text"], fill) for fill in (palette["page"], *fills)) >= 7
    assert contrast(palette["faint"], palette["page"]) >= 4.5
    outlines = [colours[1] for colours in palette.values() if isinstance(colours, tuple)]
    assert min(contrast(outline, palette["page"]) for outline in (palette["line"], *outlines)) >= 3


def test_code_in_drawings_is_in_the_sources():
    sources = [path for folder in ("csrc", "flash_attn_ext") for path in (ROOT / folder).rglob("*.*")]
    paths = {path.relative_to(ROOT).as_posix() for path in sources}
    texts = (path.read_text(encoding="utf-8") for path in sources if path.suffix in (".h", ".cuh", ".cpp", ".py"))
    words = set(re.findall(r"\w+", "\n".join(texts)))
    named = [e.text for name in NAMES for e in elements(name, "text") if "code" in e.get("class", "")]
    assert len(named) > 20
    for code in named:
        if "/" in code:
            assert any(f"kernels/{code.rstrip('/')}/" in path for path in paths), code
        else:
            assert set(re.findall(r"[A-Za-z_]\w*", code)) <= words, code


def test_numbers_are_those_of_the_kernels(drawn, tmp_path):
    memory, order = sys.modules["shared_memory"], sys.modules["loop_order"]
    kib = sum(size for _, size, _, _ in memory.blocks())
    assert memory.LIMIT - 3 <= kib < memory.LIMIT  # work tiles and barriers take the rest
    constants = {
        "HeadDim": memory.HEAD_DIM,
        "Warpgroups": memory.WARPGROUPS,
        "Keys": memory.KEYS,
        "QueryStages": memory.QUERY_STAGES,
        "KeyStages": memory.KEY_STAGES,
        "LimitKib": memory.LIMIT,
        "KeyTiles": order.KEY_TILES,
        "Followed": order.FOLLOWED,
    }
    tiles = [
        f"{{{int(direction == 'descending')}, {tile}, {{{', '.join(map(str, queries))}}}}}"
        for direction, tile, queries in order.work_tiles()
    ]
    lines = [f"namespace drawn {{ inline constexpr int k{name} = {value}; }}" for name, value in constants.items()]
    lines.append(f"#define DRAWN_WORK_TILES {{{', '.join(tiles)}}}")
    (tmp_path / "drawn.h").write_text("\n".join(lines) + "\n")
    run_host_program(Path(__file__).with_name("drawings.cpp"), tmp_path, options=("-I", tmp_path))


def test_contributors_that_are_drawn_wait_for_none(drawn):
    """Each adds to the query tile after the contributor of the rank before has, as drawn."""
    order = sys.modules["loop_order"]
    steps = {"ascending": [], "descending": []}
    for _, start, direction, _, queries in order.placed():
        steps[direction].append(start + queries.index(order.FOLLOWED))
    assert all(times == sorted(set(times)) and len(times) == order.KEY_TILES for times in steps.values())
    ends = [start + len(queries) for _, start, direction, _, queries in order.placed() if direction == "descending"]
    assert len(set(ends)) == 1
