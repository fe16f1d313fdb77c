"""The layer rules and size budgets of CONTRIBUTING.md, as functions from source text to a list of violations.

    python tests/architecture/rules.py        # prints every violation; exit status 1 when there is one

Standard library only, so that they also run before anything is installed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # started as a script: make the sibling modules importable by the names the tests use
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from architecture import cpp_rules, python_rules, word_rules

ROOT = Path(__file__).resolve().parents[2]
WORD_FILES = ("word_rules.py", "test_words.py")
PYTHON_FOLDERS = ("flash_attn_ext", "build_support", "examples", "tests", "benchmarks", "docs")


def cpp_sources() -> dict[str, str]:
    """Path under csrc/ -> text."""
    folder = ROOT / "csrc"
    paths = sorted(path for path in folder.rglob("*") if path.suffix in cpp_rules.SUFFIXES)
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def python_sources() -> dict[str, str]:
    """Path under the repository's root -> text."""
    paths = [ROOT / "setup.py", *(p for folder in PYTHON_FOLDERS for p in sorted((ROOT / folder).rglob("*.py")))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def worded_sources() -> dict[str, str]:
    """Path under the repository's root -> text, of all that people read to understand the project. Logs are history,
    and the rule's own files have the words."""
    paths = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {*cpp_rules.SUFFIXES, ".md"}]
    for folder in ("flash_attn_ext", "benchmarks", "examples", "tests"):
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md"}]
    paths = [path for path in paths if path.name not in WORD_FILES]
    paths += [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "log"]
    paths += ROOT.glob("*.md")
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def all_violations() -> Iterator[str]:
    cpp, python = cpp_sources(), python_sources()
    yield from word_rules.words_are_the_fields(worded_sources())
    yield from (f"csrc/{violation}" for violation in word_rules.identifiers_are_the_fields(cpp))
    for rule in cpp_rules.RULES:
        yield from (f"csrc/{violation}" for violation in rule(cpp))
    for rule in python_rules.RULES:
        yield from rule(python)


def main() -> int:
    violations = list(all_violations())
    print("\n".join(violations) if violations else f"layering: {len(cpp_sources())} C++ files keep every rule")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
