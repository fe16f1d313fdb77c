"""Every link in the documents leads to a file and a heading of the repository, and source files named there exist."""

import inspect
import re
from pathlib import Path

import pytest

import flash_attn_ext
import flash_attn_ext.reference
from build_support import plan

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("", "docs", "docs/kernels", "docs/kernels/log", "csrc", "tests", "benchmarks/results")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    text = without_code(path.read_text(encoding="utf-8"))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    return broken


SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".py", ".pyi", ".sh"}
SOURCES = ("flash_attn_ext", "csrc", "build_support", "tests", "benchmarks", "examples", "docs")


def test_source_files_that_are_named_exist():
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for folder in SOURCES for path in (ROOT / folder).rglob("*.*")]
    missing = []
    for document in DOCUMENTS:
        names = re.findall(r"`([\w./-]+)`", without_code(document.read_text(encoding="utf-8")))
        named = {name for name in names if Path(name).suffix in SUFFIXES and name not in ("setup.py", ".cpp", ".cu")}
        missing += [(document.name, name) for name in named if not any(path.endswith(f"/{name}") for path in paths)]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# One `word`, two\n```\n# no heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#one-word-two) [x](https://a.b) [y](none.md) [y](b.md#no-heading)\n```\n[z](none)\n```\n")
    assert broken_links(page) == ["none.md", "b.md#no-heading"]


def test_every_kernel_page_and_its_log_name_each_other():
    for log in sorted((ROOT / "docs/kernels/log").glob("*.md")):
        page = ROOT / "docs/kernels" / log.name
        assert f"(log/{log.name}" in page.read_text(encoding="utf-8")
        assert f"(../{log.name}" in log.read_text(encoding="utf-8")


USERS_PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOR_CONTRIBUTORS = ("architecture.md",)


@pytest.mark.parametrize("path", USERS_PAGES, ids=lambda path: path.name)
def test_pages_for_users_name_no_private_function(path):
    if path.name not in FOR_CONTRIBUTORS:
        assert re.findall(r"\b_C\.\w+", path.read_text(encoding="utf-8")) == []


def test_docstrings_of_public_functions_name_no_private_function():
    modules = (flash_attn_ext, flash_attn_ext.reference)
    public = [value for module in modules for value in vars(module).values() if inspect.isfunction(value)]
    assert [value for value in public if re.search(r"\b_C\.\w+", inspect.getdoc(value) or "")] == []


def texts(*suffixes: str) -> dict[str, str]:
    """Of what users read, messages and docstrings included."""
    folders = ("flash_attn_ext", "docs", "examples", "benchmarks", "build_support", "csrc")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in suffixes]
    paths += [path for path in ROOT.glob("*.*") if path.suffix in suffixes]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def test_no_page_says_to_install_the_package_from_an_index():
    """None has it, and whoever took the name there could serve anything."""
    command = re.compile(r"pip install[^\n`;]*\bflash[_-]attn[_-]ext\b")
    found = {name: command.findall(text) for name, text in texts(".md", ".py", ".toml", ".sh").items()}
    assert {name: commands for name, commands in found.items() if commands} == {}


def test_the_bound_of_the_workspace_is_that_of_the_code():
    (share,) = re.findall(
        r"memory_bytes / (\d+)\)", (ROOT / "csrc/host/library/limits.cpp").read_text(encoding="utf-8")
    )
    said = {
        name: re.findall(r"a (\d+)th of\s+the\s+(?:GPU|device)'s\s+memory", text)
        for name, text in texts(".md", ".py", ".h").items()
    }
    pages = {"CHANGELOG.md", "docs/environment.md", "docs/numerics.md", "docs/performance.md", "docs/semantics.md"}
    assert pages | {"flash_attn_ext/functional.py"} <= {name for name, shares in said.items() if shares}
    assert {name: shares for name, shares in said.items() if set(shares) - {share}} == {}


def variables_of_the_sources() -> set[str]:
    """Names that a program or a makefile reads from the environment."""
    found = set()
    for name, text in texts(".py", ".cpp", ".h").items():
        if name.startswith(("flash_attn_ext/", "csrc/", "build_support/")) or name == "setup.py":
            found |= set(re.findall(r"[\"'](FLASH_ATTN_EXT_[A-Z_]+)[\"']", text))
            found |= set(re.findall(r"environ(?:\.get\(|\[)[\"'](\w+)[\"']", text))
    found |= set(re.findall(r"\bFLASH_ATTN_EXT_[A-Z_]+", (ROOT / "Makefile").read_text(encoding="utf-8")))
    return found


def test_the_bound_of_a_fast_build_is_that_of_the_code():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    row = re.search(r"^\| `FLASH_ATTN_EXT_FAST_BUILD` .*head dims up to (\d+)", page, re.MULTILINE)
    assert row and int(row.group(1)) == plan.fast_build_head_dim()


def test_every_variable_of_the_environment_has_a_row():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    in_rows = set(re.findall(r"`([A-Z_]+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE))))
    variables = variables_of_the_sources()
    assert {"FLASH_ATTN_EXT_WORKSPACE_MIB", "FLASH_ATTN_EXT_CHECK", "FLASH_ATTN_EXT_ARCHS", "CXX"} <= variables
    assert variables - in_rows == set(), "docs/environment.md has no row of it"
    ours = {name for name in in_rows if name.startswith("FLASH_ATTN_EXT_")}
    assert ours - variables == set(), "nothing reads it"


def test_the_changelog_compares_with_nothing_that_was_never_released():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (unreleased,) = re.findall(r"^## [\d.]+ \(unreleased\)$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    comparisons = r"[^\n]*(?:of the time\b|less time|[\d.]+ times as fast as before|\d, before\b|\bbefore, now)[^\n]*"
    assert re.findall(comparisons, unreleased) == []
