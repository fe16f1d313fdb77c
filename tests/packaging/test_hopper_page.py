"""Every name and every line of code on docs/hopper.md is in the sources, in a file that its chapter names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hopper.md"
SUFFIXES = (".h", ".cuh", ".cpp", ".py")


def chapters(text: str) -> dict[str, str]:
    """Heading -> text, of the page's introduction too."""
    title, *rest = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)[1:]
    introduction, *parts = rest
    return {title: introduction, **dict(zip(parts[::2], parts[1::2], strict=True))}


CODE = re.compile(r"^```cpp\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def unknown_names(text: str) -> list[str]:
    """Of a chapter: what it has in backticks or as code, and its files and their text do not."""
    marked = re.findall(r"`([^`\n]+)`", CODE.sub("", text))
    named = [ROOT / name for name in marked if "/" in name and " " not in name]
    unknown = [path.relative_to(ROOT).as_posix() for path in named if not path.exists()]
    files = [file for path in named for file in ([path] if path.is_file() else path.rglob("*.*"))]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix in SUFFIXES)
    words = set(re.findall(r"\w+", sources))
    unknown += [code for code in CODE.findall(text) if code not in sources]
    for name in marked:
        if "/" in name:
            continue  # a path, or a command that names one
        elif name.endswith(SUFFIXES):
            known = name in {file.name for file in files}
        elif re.fullmatch(r"\w+(::\w+)*", name):
            known = set(name.split("::")) <= words
        else:
            known = name in sources  # an instruction
        if not known:
            unknown.append(name)
    return unknown


CHAPTERS = chapters(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("heading", CHAPTERS)
def test_names_are_in_the_sources_that_the_chapter_names(heading):
    assert unknown_names(CHAPTERS[heading]) == []


def test_unknown_names_are_found():
    path = "csrc/kernels/cpu/forward/forward.cpp"
    text = f"`{path}` `csrc/lost/` `ForwardWorker::attend` `ForwardWorker::lost` `lost.h` `a.b`"
    assert unknown_names(text) == ["csrc/lost", "ForwardWorker::lost", "lost.h", "a.b"]
    code = "```cpp\n  void run(const RowTile& rows) {\n```\n\n```cpp\nint lost;\n```\n"
    assert unknown_names(f"`{path}`\n\n{code}") == ["int lost;\n"]


def test_the_page_has_its_chapters():
    assert sum(bool(re.match(r"\d\. ", heading)) for heading in CHAPTERS) == 6
