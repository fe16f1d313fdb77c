"""Minimum and quartiles in bench's rows, what its table makes of them, and the commit that a report names."""

import dataclasses
import json
import subprocess

import pytest

from flash_attn_ext.__main__ import main
from flash_attn_ext.cli import machine
from flash_attn_ext.cli.bench import command, decode_suites, report, rows, suites, table, timing
from flash_attn_ext.cli.bench.spread import spread_of

GRID = dataclasses.replace(suites.SUITES["cuda"]["grid"][0], peers=("flash", "cudnn"))


def times_around(median: float, reach: float, rounds: int = 15) -> list[float]:
    """Evenly from median - reach to median + reach."""
    return [median + reach * (2 * place / (rounds - 1) - 1) for place in range(rounds)]


def measured(load=GRID, **times: list[float]) -> dict:
    counts = {len(of_one) for of_one in times.values()}
    return rows.make_row(load, "forward", "sm90", timing.Measurement(times=times, rounds=max(counts)))


def test_a_row_has_minimum_and_quartiles_beside_each_median():
    row = measured(ours=[5.0, 1.0, 2.0, 4.0, 3.0], flash=[4.0] * 5)
    assert row["ours_ms"] == 3.0 and row["spread_ms"]["ours"] == {"min": 1.0, "q1": 2.0, "q3": 4.0}
    assert row["peer_ms"] == {"flash": 4.0, "cudnn": None}
    assert row["spread_ms"]["flash"] == {"min": 4.0, "q1": 4.0, "q3": 4.0} and "cudnn" not in row["spread_ms"]


def test_a_row_in_microseconds_has_its_spread_in_microseconds():
    row = measured(decode_suites.DecodeWorkload("decode", "", 1, 1, 1, 16, against="own", own="own"), ours=[0.25, 0.75])
    assert row["ours_us"] == 500.0 and row["spread_us"] == {"ours": {"min": 250.0, "q1": 375.0, "q3": 625.0}}
    assert "spread_ms" not in row and rows.is_distinct(row) is None


def test_one_time_is_its_own_quartiles():
    assert spread_of([2.0], digits=2) == {"min": 2.0, "q1": 2.0, "q3": 2.0}


@pytest.mark.parametrize(
    ("ours", "flash", "distinct"),
    [
        (times_around(1.00, 0.001), times_around(0.99, 0.001), True),
        (times_around(1.00, 0.1), times_around(0.99, 0.1), False),
        (times_around(1.00, 0.1, rounds=1001), times_around(0.99, 0.1, rounds=1001), True),
        (times_around(1.0, 0.0), times_around(1.0, 0.0), False),
    ],
    ids=["0.99 of quiet times", "0.99 of noisy times", "of many noisy times", "equal"],
)
def test_the_table_says_when_a_ratio_is_not_distinguishable_from_1(ours, flash, distinct):
    row = measured(ours=ours, flash=flash)
    assert rows.is_distinct(row) is distinct
    assert ("not distinguishable from 1" in table.line(row, (GRID,))) is not distinct


def test_the_table_says_that_there_were_too_few_rounds():
    row = measured(ours=times_around(1.0, 0.1, rounds=4), flash=times_around(2.0, 0.1, rounds=4))
    assert rows.is_distinct(row) is None
    assert table.line(row, (GRID,)).endswith("2.00 x flash (rounds: 4)")


def test_the_best_peer_is_the_one_that_is_told_apart():
    load = dataclasses.replace(GRID, against="best")
    row = measured(load, ours=times_around(1.0, 0.001), flash=times_around(1.0, 0.001), cudnn=times_around(3.0, 0.001))
    assert table.line(row, (load,)).endswith("1.00 x best (flash) (not distinguishable from 1)")
    row = measured(load, ours=times_around(2.0, 0.001), flash=times_around(3.0, 0.001), cudnn=times_around(1.0, 0.001))
    assert table.line(row, (load,)).endswith("0.50 x best (cudnn)")


def test_our_own_other_call_is_told_apart_too():
    load = dataclasses.replace(GRID, own="plain", against="plain")
    row = measured(load, ours=times_around(1.0, 0.1), plain=times_around(1.01, 0.1))
    assert table.line(row, (load,)).endswith("1.01 x own plain (not distinguishable from 1)")


def test_rows_of_earlier_reports_say_nothing():
    row = measured(ours=times_around(1.0, 0.1), flash=times_around(1.0, 0.1))
    del row["spread_ms"]
    assert rows.is_distinct(row) is None
    assert "distinguishable" not in table.line(row, (GRID,))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository whose one commit has the package, as git_(...) runs git in it."""
    monkeypatch.delenv(machine.COMMIT_VARIABLE, raising=False)
    folder = tmp_path / "checkout"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("")

    def git_(*arguments: str) -> str:
        settings = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
        return subprocess.run(
            ["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    git_("init", "-q")
    git_("add", ".")
    git_("commit", "-q", "-m", "all")
    git_("tag", "-a", "v1", "-m", "v1")
    return folder, git_


def test_a_report_names_the_commit_of_the_checkout(checkout):
    folder, git_ = checkout
    assert machine.commit(folder / "package") == git_("rev-parse", "--short=12", "HEAD")
    (folder / "package" / "__init__.py").write_text("changed = True\n")
    assert machine.commit(folder / "package") == git_("rev-parse", "--short=12", "HEAD") + "-dirty"


def test_the_commit_of_somebody_elses_repository_is_not_ours(checkout, tmp_path):
    folder, _ = checkout
    installed = folder / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert machine.commit(installed) is None
    (tmp_path / "alone").mkdir()
    assert machine.commit(tmp_path / "alone") is None


def test_without_git_a_variable_names_the_commit(tmp_path, monkeypatch, capsys):
    small = [dataclasses.replace(suites.SUITES["cpu"]["cpu"][0], num_heads=2, seqlen=64, head_dim=16)]
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"cpu": tuple(small)}})
    monkeypatch.setattr(command, "EFFORTS", {("cpu", False): timing.Effort(1, 5, 5, 0.0)})
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "0123456789ab")
    assert main(["bench", "--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert written["commit"] == "0123456789ab" and "quartiles" in written["method"]
    for row in written["rows"]:
        assert row["rounds"] == 5 and set(row["spread_ms"]) == {"ours", "torch sdpa"}
        for name, median in {"ours": row["ours_ms"], **row["peer_ms"]}.items():
            spread = row["spread_ms"][name]
            assert 0 < spread["min"] <= spread["q1"] <= median <= spread["q3"]
    assert "commit: 0123456789ab\n" in capsys.readouterr().out


def test_bench_says_that_it_knows_no_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"cpu": ()}})
    monkeypatch.setattr(report, "commit", lambda: None)
    assert main(["bench", "--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "cpu.json").read_text())["commit"] is None
    assert "FLASH_ATTN_EXT_COMMIT names it" in capsys.readouterr().out
