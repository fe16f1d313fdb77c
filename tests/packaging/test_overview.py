"""README's picture, table and the figures in its prose are those of the committed results."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def overview() -> dict:
    return runpy.run_path(str(ROOT / "benchmarks" / "overview.py"))


def test_readme_has_what_was_measured(overview):
    expected = overview["text"](overview["figures"]())
    assert expected in README.read_text(encoding="utf-8"), "run: python benchmarks/overview.py"


def test_figures_in_readmes_prose_are_those_of_the_results(overview, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    overview["write_figures"](page)
    assert page.read_text(encoding="utf-8") == README.read_text(encoding="utf-8"), "run: python benchmarks/overview.py"


def test_every_figure_in_readme_has_a_source(overview):
    found = overview["figures_without_source"](README.read_text(encoding="utf-8"))
    assert found == [], "give it a passage in benchmarks/readme_figures.py"


@pytest.mark.parametrize("figure", ["1.32 times", "3 %", "12 µs", "380 000", "400 TFLOP/s", "15 ms", "2 times"])
def test_a_figure_without_a_source_is_found(overview, figure):
    page = README.read_text(encoding="utf-8").replace("## Install", f"It takes {figure} of something.\n\n## Install", 1)
    assert len(overview["figures_without_source"](page)) == 1


def test_a_figure_of_the_results_is_written_where_another_stands(overview, tmp_path):
    page = tmp_path / "README.md"
    text = README.read_text(encoding="utf-8")
    wrong = text.replace("run 1.30 times as fast", "run 9.99\ntimes as fast", 1)
    assert wrong != text
    page.write_text(wrong, encoding="utf-8")
    overview["write_figures"](page)
    assert page.read_text(encoding="utf-8") == text.replace("run 1.30 times as fast", "run 1.30\ntimes as fast", 1)


def test_a_passage_that_readme_does_not_have_is_an_error(overview, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="README has 0 times: "):
        overview["write_figures"](page)


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
