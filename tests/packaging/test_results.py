"""Files in benchmarks/results: each names its commit, machine and method, and what spreads has its quartiles."""

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILES = sorted(path for path in RESULTS.iterdir() if path.suffix in (".json", ".txt"))
COMMIT = r"[0-9a-f]{7,40}"


def test_every_file_stands_in_the_table():
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    found = set(re.findall(r"^\| `([\w.]+\.(?:json|txt))` \|", text, re.MULTILINE))
    assert found == {path.name for path in FILES}


def own_commit(path: Path) -> str | None:
    if path.suffix == ".json":
        return json.loads(path.read_text()).get("commit")
    found = re.search(rf"^commit: ({COMMIT}[\w-]*)", path.read_text(), re.MULTILINE)
    return found and found.group(1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_names_its_commit(path):
    """One that had changes is not to be found again."""
    assert re.fullmatch(COMMIT, own_commit(path) or ""), "measure a commit, not a checkout with changes"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_names_its_machine_and_versions(path):
    if path.suffix == ".json":
        report = json.loads(path.read_text())
        assert (report["machine"]["gpu"] or report["machine"]["cpu"]) and report["versions"]["torch"] and report["date"]
    else:
        text = path.read_text()
        assert all(word in text for word in ("NVIDIA", "torch ")) and re.search(r"\b20\d\d-\d\d-\d\d\b", text)
        assert "\nmethod: " in text


REPORTS = [path for path in FILES if path.suffix == ".json"]


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.name)
def test_reports_have_a_method_and_quartiles(path):
    report = json.loads(path.read_text())
    assert "quartiles" in report["method"] and report["command"].startswith("python ")
    for row in report["rows"]:
        unit = "us" if "ours_us" in row else "ms"
        medians = {"ours": row[f"ours_{unit}"]} | row[f"peer_{unit}"] | row.get(f"own_{unit}", {})
        measured = {name for name, median in medians.items() if median is not None}
        assert set(row[f"spread_{unit}"]) == measured, (row["suite"], row["case"], row["pass"])
