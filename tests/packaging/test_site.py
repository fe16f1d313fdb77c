"""The site of `make docs`: its menu has every page, its reference every public name, and broken links are found.

That it builds without warnings is for `make docs` itself.
"""

import importlib
import re
import runpy
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"


def test_every_page_of_docs_is_in_the_menu():
    pages = set(runpy.run_path(str(SITE / "conf.py"))["include_patterns"])
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} - pages == set()
    assert [page for page in sorted(pages) if not (ROOT / page).is_file()] == []


def documented_names(module: str) -> set[str]:
    """What api.md has of a module."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^\.\. currentmodule:: ([\w.]+)$", page, flags=re.MULTILINE)
    texts = [text for name, text in zip(parts[::2], parts[1::2], strict=True) if name == module]
    return set(re.findall(r"^\.\. auto\w+:: (\w+)", "".join(texts), re.MULTILINE))


def public_names(module: types.ModuleType) -> set[str]:
    """Those in __all__, or else of what the module itself defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return {name for name in names if callable(getattr(module, name))}


INTEGRATIONS = ("dtensor", "flash_attn", "flash_attn.bert_padding", "torch_backend", "transformers")


@pytest.mark.parametrize("name", ["flash_attn_ext", *(f"flash_attn_ext.integrations.{name}" for name in INTEGRATIONS)])
def test_the_reference_has_every_public_function(name):
    names = public_names(importlib.import_module(name))
    assert names and names - documented_names(name) == set()


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
