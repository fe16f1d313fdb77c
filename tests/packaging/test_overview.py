"""README's picture and table are those of the committed results."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def overview() -> dict:
    return runpy.run_path(str(ROOT / "benchmarks" / "overview.py"))


def test_readme_has_what_was_measured(overview):
    expected = overview["text"](overview["figures"]())
    assert expected in (ROOT / "README.md").read_text(encoding="utf-8"), "run: python benchmarks/overview.py"


def test_passes_are_added_by_their_times(overview):
    found = overview["figures"]()
    point = ("causal", 128, 8192)
    forward, backward, both = (found[pass_][point]["ours"] for pass_ in ("forward", "backward", "both"))
    # A backward pass is 2.5 times the work of a forward pass.
    assert both == pytest.approx(3.5 / (1 / forward + 2.5 / backward), rel=1e-3)


def test_the_picture_is_drawn(overview, tmp_path):
    pytest.importorskip("matplotlib")
    overview["draw"](overview["figures"](), tmp_path / "overview.png")
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_replaces_the_one_before(overview, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{overview['BEGIN']}\nold\n{overview['END']}\nafter\n")
    overview["write"](overview["figures"](), page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and "D128 causal" in text
