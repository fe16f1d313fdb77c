"""README's picture, and tables and figures of README and docs/performance.md, are those of the committed results."""

import re
import runpy
from pathlib import Path

import pytest

from architecture.word_rules import words_are_the_fields
from flash_attn_ext.cli.bench.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def overview() -> dict:
    return runpy.run_path(str(ROOT / "benchmarks" / "overview.py"))


PAGES = ("README.md", "docs/performance.md")
KERNEL_PAGES = ("cpu", "sm90", "sm90_backward", "sm90_backward_query_stationary", "sm80", "split")
TABLE_PAGES = (*(f"docs/kernels/{name}.md" for name in KERNEL_PAGES), "docs/torch_backend.md")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_every_page_with_tables_is_compared(overview):
    assert set(TABLE_PAGES) == set(overview["TABLE_PAGES"])


@pytest.mark.parametrize("page", [*PAGES, *TABLE_PAGES])
def test_a_page_has_what_was_measured(overview, page):
    for part, markdown in overview["generated"](page, overview["figures"]()).items():
        marks = (overview["BEGIN"].format(part), overview["END"].format(part))
        assert f"\n\n{markdown}\n\n".join(marks) in read(page), "run: python benchmarks/overview.py"


def with_figures(overview: dict, page: str, text: str, folder: Path) -> str:
    (folder / "page.md").write_text(text, encoding="utf-8")
    overview["write_figures"](folder / "page.md", page)
    return (folder / "page.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_figures_in_prose_are_those_of_the_results(overview, page, tmp_path):
    assert with_figures(overview, page, read(page), tmp_path) == read(page), "run: python benchmarks/overview.py"


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_a_source(overview, page):
    found = overview["figures_without_source"](read(page), page)
    assert found == [], "give it a passage in benchmarks/readme_figures.py"


def test_every_passage_has_a_page(overview):
    quotes = overview["readme_figures"].QUOTES
    assert quotes and all(quote.pages and set(quote.pages) <= set(PAGES) for quote in quotes)


@pytest.mark.parametrize(
    "figure", ["1.32 times", "3 %", "12 µs", "380 000", "380,000", "400 TFLOP/s", "15 ms", "2 times"]
)
def test_a_figure_without_a_source_is_found(overview, figure):
    text = read("README.md").replace("## Install", f"It takes {figure} of something.\n\n## Install", 1)
    assert len(overview["figures_without_source"](text, "README.md")) == 1


def test_a_figure_of_the_results_is_written_where_another_stands(overview, tmp_path):
    text = read("docs/performance.md")
    (right,) = re.findall(r"At head dim 72, forward and\s+backward together are ([\d.]+)", text)
    wrong = text.replace(f"together are {right}", "together are\n9.99", 1)
    assert wrong != text
    found = with_figures(overview, "docs/performance.md", wrong, tmp_path)
    assert found == text.replace(f"together are {right}", f"together are\n{right}", 1)


def test_a_passage_that_a_page_does_not_have_is_an_error(overview, tmp_path):
    with pytest.raises(ValueError, match=r"README\.md has 0 times: "):
        with_figures(overview, "README.md", "nothing", tmp_path)


def test_passes_are_added_by_their_times(overview):
    found = overview["figures"]()
    point = ("causal", 128, 8192)
    forward, backward, both = (found[pass_][point]["ours"] for pass_ in ("forward", "backward", "both"))
    # A backward pass is 2.5 times the work of a forward pass.
    assert both == pytest.approx(3.5 / (1 / forward + 2.5 / backward), rel=1e-3)


def test_the_picture_is_drawn(overview, tmp_path):
    pytest.importorskip("matplotlib")
    overview["draw_overview"](tmp_path / "overview.png")
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_generated_replaces_what_was_there(overview, tmp_path):
    page = tmp_path / "page.md"
    begin, end = overview["BEGIN"].format("x: "), overview["END"].format("x: ")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    overview["write"](page, {"x: ": "| new |"})
    assert page.read_text() == f"before\n{begin}\n\n| new |\n\n{end}\nafter\n"


def test_every_point_below_1_has_a_row(overview):
    tables = overview["speed_tables"]
    table = tables.slow_points_table()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert all(float(ratio) < 1 for ratio, _ in found)
    points = [
        (min(time for time in row["peer_ms"].values() if time), row["ours_ms"])
        for row in tables.rows("cuda_h200_workloads")
        if tables.has_peer(row)
    ]
    slow = {f"{round(peer / ours, 2):.2f}" for peer, ours in points if round(peer / ours, 2) < 1}
    assert slow and slow <= {ratio for ratio, _ in found}


def test_ratios_of_a_workload_are_means_and_worst_points(overview):
    """A point counts by the fastest peer that ran it; a suite without a pass says so."""
    tables = overview["speed_tables"]
    rows = [row for row in tables.rows("cuda_h200", suite="dropout") if row["pass"] == "backward"]
    ratios = [min(row["peer_ms"].values()) / row["ours_ms"] for row in rows]
    mean = (ratios[0] * ratios[1]) ** 0.5
    assert tables.Workload("", "dropout").cell("backward") == f"{mean:.2f} ({min(ratios):.2f})"
    assert tables.Workload("", "decode", report="cuda_h200_decode").cell("backward") == "none"


def test_a_suite_that_no_report_has_has_no_line(overview):
    tables = overview["speed_tables"]
    assert all(work.suite in SUITES["cuda"] for work in tables.WORKLOADS)
    workloads = (tables.Workload("first", "dropout"), tables.Workload("second", "no such suite"))
    assert [line.split(" | ")[0] for line in tables.times_as_fast_table(workloads).splitlines()[2:]] == ["| first"]


MOST_LINES_OF_README = 130
FOR_NEWCOMERS = ("README.md", *(f"docs/{name}.md" for name in ("install", "quickstart", "faq", "migrating", "recipes")))


def test_readme_is_short():
    assert len(read("README.md").splitlines()) <= MOST_LINES_OF_README


def own_words() -> list[str]:
    """The names that CONTRIBUTING.md explains, but for plans, which `explain` returns."""
    table = read("CONTRIBUTING.md").partition("| word | meaning |")[2].partition("\n\n")[0]
    words = re.findall(r"^\| ([^|,]*?)(?:,[^|]*)? \|", table, re.MULTILINE)
    return [word for word in words if word not in ("---", "plan")]


@pytest.mark.parametrize("page", FOR_NEWCOMERS)
def test_newcomers_need_no_word_of_our_own(page):
    assert {"room", "repair", "canonical form"} <= set(own_words())
    found = re.findall(rf"\b(?:{'|'.join(map(re.escape, own_words()))})\b", without_code(read(page)))
    assert found == []
    assert list(words_are_the_fields({page: read(page)})) == []


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
