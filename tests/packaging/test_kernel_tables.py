"""The documents' tables of kernels are those of csrc/kernels/config/."""

import os
import re
import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "kernels").glob("*.md"))
COMMAND = "run: python docs/site/kernel_tables.py"


@pytest.fixture(scope="module")
def tables() -> dict:
    return runpy.run_path(str(ROOT / "docs" / "site" / "kernel_tables.py"))


@pytest.fixture(scope="module")
def rows(tables) -> dict:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    return tables["rows"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_headers(tables, rows, page):
    text = page.read_text(encoding="utf-8")
    assert tables["with_tables"](text, rows) == text, COMMAND


def test_each_table_stands_on_one_page(tables):
    found = [name for page in PAGES for name in tables["tables_of"](page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(tables["TABLES"])


def test_a_stale_table_is_found(tables, rows):
    (page,) = (page for page in PAGES if page.name == "sm90.md")
    text = page.read_text(encoding="utf-8")
    stale = text.replace("192 \N{MULTIPLICATION SIGN} 112", "192 \N{MULTIPLICATION SIGN} 96")
    assert stale != text
    assert tables["with_tables"](stale, rows) == text


def test_rows_that_differ_in_one_column_become_one(tables):
    cells = [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}, {"a": "3", "b": "x"}]
    assert tables["merge"](cells, "a") == [{"a": "1; 3", "b": "x"}, {"a": "2", "b": "y"}]


@pytest.mark.parametrize("log", sorted((ROOT / "docs" / "kernels" / "log").glob("*.md")), ids=lambda log: log.name)
def test_constants_with_figures_are_in_the_sources(log):
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "csrc").rglob("*.*") if path.is_file())
    section = log.read_text(encoding="utf-8").partition("\n## Figures behind constants\n")[2].partition("\n## ")[0]
    named = [name for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)]
    assert [name for name in named if not re.search(rf"\b{name.split('::')[-1]}\b", sources)] == []
