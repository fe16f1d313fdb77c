"""The site of `make docs`: its menu has every page, its reference every public name, and broken links are found.

That it builds without warnings is for `make docs` itself.
"""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"


def test_every_page_of_docs_is_in_the_menu():
    pages = set(runpy.run_path(str(SITE / "conf.py"))["include_patterns"])
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} - pages == set()
    assert [page for page in sorted(pages) if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("name", ["", ".integrations.flash_attn", ".integrations.transformers"])
def test_the_reference_has_every_public_function(name):
    module = importlib.import_module(f"flash_attn_ext{name}")
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    section = page.partition(f".. currentmodule:: {module.__name__}\n")[2]
    public = {public for public in module.__all__ if callable(getattr(module, public))}
    assert public - set(re.findall(r"^\.\. auto\w+:: (\w+)", section, re.MULTILINE)) == set()


def test_broken_links_of_a_site_are_found(tmp_path):
    broken_links = runpy.run_path(str(SITE / "check_links.py"))["broken_links"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.html").write_text('<h1 id="here">b</h1> <a href="../c.html#there">c</a>')
    (tmp_path / "c.html").write_text(
        '<a href="a/b.html#here">b</a> <a href="a/b.html#nowhere">b</a> <a href="https://a.b/c">d</a> <img src="e.png">'
        '<a href="#there">there</a>'
    )
    assert broken_links(tmp_path) == [
        "a/b.html: ../c.html#there",
        "c.html: #there",
        "c.html: a/b.html#nowhere",
        "c.html: e.png",
    ]
