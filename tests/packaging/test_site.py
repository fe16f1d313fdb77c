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


@pytest.fixture(scope="module")
def conf() -> dict:
    return runpy.run_path(str(SITE / "conf.py"))


def test_newcomers_find_their_pages_first(conf):
    pages = [page for part in conf["MENU"].values() for page in part]
    assert pages[:3] == ["docs/install", "docs/quickstart", "docs/performance"]
    source = ["# Title\n"]
    conf["add_menu"](None, "README", source)
    entries = re.findall(r"^(?:/[\w/]+|Home <self>)$", source[0], re.MULTILINE)
    assert entries == ["Home <self>", *(f"/{page}" for page in pages)]


def test_logs_are_not_searched_and_lie_below_the_pages_of_their_kernels(conf):
    assert "docs/kernels/log/sm90" in conf["KERNEL_LOGS"]
    for log in conf["KERNEL_LOGS"]:
        source, page, kernels = ["# Log\n"], ["# Kernel\n"], ["# Kernels\n"]
        conf["add_menu"](None, log, source)
        conf["add_menu"](None, log.replace("/log", ""), page)
        conf["add_menu"](None, "docs/kernels/README", kernels)
        assert source[0] == "---\nnosearch: true\n---\n# Log\n"
        assert f"\n/{log}\n" in page[0] and log not in kernels[0]


def test_links_are_named_by_titles_and_not_by_files(conf):
    source = [
        "[numerics.md](numerics.md#memory), [`csrc/a.md`](a.md), [why](a.md), ![a.md](a.png), [a.md](https://a.b)"
    ]
    conf["name_pages_by_titles"](None, "docs/page", source)
    assert source[0] == "[](numerics.md#memory), [](a.md), [why](a.md), ![a.md](a.png), [a.md](https://a.b)"


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


OWN = ("flash_attn_ext", "flash_attn_ext.masks")


@pytest.mark.parametrize("name", [*OWN, *(f"flash_attn_ext.integrations.{name}" for name in INTEGRATIONS)])
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
