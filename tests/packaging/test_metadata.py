"""pyproject.toml and requirements say the same as the code."""

import re
from pathlib import Path

import flash_attn_ext
from build_support.toolchain import MIN_TORCH

ROOT = Path(__file__).resolve().parents[2]


def test_version_agrees():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', text, re.MULTILINE).group(1) == flash_attn_ext.__version__


def test_the_changelog_and_the_citation_have_the_version():
    assert f"## {flash_attn_ext.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {flash_attn_ext.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_an_issue_asks_for_what_info_says():
    assert "info --json" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.md").read_text()


def test_the_least_torch_agrees():
    """Otherwise pip would build against the user's torch and then replace it."""
    assert f'dependencies = ["torch>={MIN_TORCH}"]' in (ROOT / "pyproject.toml").read_text()


def test_torch_is_no_build_requirement():
    """A build sandbox would install a torch of its own, and the extension would be built against that one."""
    requires = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    assert "torch" not in requires


def test_every_requirement_of_make_is_pinned():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert requirements
    assert [line for line in requirements if not re.match(r"[\w-]+==[\w.]+", line)] == []
