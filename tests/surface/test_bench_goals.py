"""benchmarks/bench.py --goals: what a run says about goals, and that each goal has rows."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest

import bench
from flash_attn_ext.cli.bench import command, rows, suites, timing
from goal_rules import Goal, PointGoals, judged

BENCHMARKS = Path(bench.__file__).parent


@pytest.fixture(scope="module")
def goals() -> tuple:
    return runpy.run_path(str(BENCHMARKS / "goals.py"))["GOALS"]


@pytest.fixture
def tiny_suite(monkeypatch):
    """The CPU's suite at one small size, each call timed once."""
    small = [dataclasses.replace(load, num_heads=2, seqlen=64, head_dim=16) for load in suites.SUITES["cpu"]["cpu"][:5]]
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"cpu": tuple(small)}})
    monkeypatch.setattr(command, "EFFORTS", {("cpu", quick): timing.Effort(1, 1, 1, 0.0) for quick in (False, True)})


def grid_rows(ratios: list[float]) -> list[dict]:
    common = {"suite": "grid", "case": "full", "pass": "forward", "dtype": "bfloat16", "head_dim": 64, "in_goal": True}
    return [common | {"seqlen_q": n, "against": "flash", "ratio": r, "ours_ms": 1} for n, r in enumerate(ratios)]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0, 1.3], "goal met"),
        ([1.0, 1.1], "floor kept, goal missed"),
        ([0.8, 1.9], "BELOW THE FLOOR"),
        ([0.9, 1.0], "BELOW THE FLOOR"),
        ([1.2, None], "INCOMPLETE"),
    ],
    ids=str,
)
def test_a_goal_has_its_verdict(ratios, verdict):
    text, *others = judged("grid", grid_rows(ratios), [Goal("grid", "forward", 1.1, 1.0, worst=0.85)])
    assert text.endswith(f"goal at least 1.1 (floor 1, no point under 0.85): {verdict}")
    assert others == ["    full bfloat16 D64 S0: 0.8, floor 0.85"] * (0.8 in ratios)


def test_goals_against_one_peer_and_the_best():
    """The row itself compares with flash."""
    (row,) = grid_rows([2.0])
    row["peer_ms"] = {"flash": 2, "cudnn": 0.5, "fa4": None}
    goals = [Goal("grid", "forward", 1.5, 1.5, against=name) for name in (None, "cudnn", "best", "fa4")]
    assert judged("grid", [row], goals) == [
        "  forward: 2 x flash (full bfloat16 D64 S0); goal at least 1.5: goal met",
        "  forward: 0.5 x cudnn (full bfloat16 D64 S0); goal at least 1.5: BELOW THE FLOOR",
        "  forward: 0.5 x best (full bfloat16 D64 S0); goal at least 1.5: BELOW THE FLOOR",
        "  forward: no point could be measured; goal at least 1.5: INCOMPLETE",
    ]


def test_goals_at_some_points_count_what_the_mean_leaves_out():
    rows_ = grid_rows([1.0, 2.0, 4.0])
    rows_[2]["in_goal"] = False
    goals = [Goal("grid", "forward", 1.5, 1.5, at=at) for at in ({}, {"seqlen_q": 2}, {"seqlen_q": 3})]
    lines = judged("grid", rows_, goals)
    assert [line.partition(";")[0] for line in lines] == [
        "  forward: geometric mean 1.41 x flash over 2 of 2 points, worst 1 (full bfloat16 D64 S0)",
        "  forward, seqlen_q 2: 4 x flash (full bfloat16 D64 S2)",
        "  forward, seqlen_q 3: not measured",
    ]


def test_goals_in_tflops_name_each_point_that_misses():
    rows_ = [row | {"ours_tflops": rate} for row, rate in zip(grid_rows([1.0] * 3), (500, 400, None), strict=True)]
    goal = PointGoals("grid", "forward", {("full", 64, seqlen): 450 for seqlen in range(4)})
    assert judged("grid", rows_, [goal]) == [
        "  forward, TFLOP/s: goal met at 1 of 4 points, 1 not measured",
        "    full bfloat16 D64 S1: 400 TFLOP/s, goal 450",
        "    full bfloat16 D64 S2: no figure, goal 450",
    ]


def test_goals_are_read_from_the_file_that_is_named(tiny_suite, tmp_path, capsys):
    text = (BENCHMARKS / "goals.py").read_text()
    mine = tmp_path / "mine.py"
    mine.write_text(text[: text.index("GOALS = (")] + 'GOALS = (Goal("cpu", "forward", 1e6, 1e-6),)\n')
    common = ["--device", "cpu", "--no-plot", "--output", str(tmp_path)]
    assert bench.main([*common, "--goals", str(mine)]) == 0
    assert "goal at least 1e+06 (floor 1e-06): floor kept, goal missed" in capsys.readouterr().out
    assert "goals" not in json.loads((tmp_path / "cpu.json").read_text())["command"]
    broken = tmp_path / "broken.py"
    mine.write_text("GOAL = 1\n")
    broken.write_text("GOALS = (")
    for path in (mine, broken, tmp_path / "none.py"):
        assert bench.main([*common, "--goals", str(path)]) == 2
        assert f"--goals {path}: " in capsys.readouterr().out


def test_every_goal_has_rows(goals):
    """And names a peer that is timed there."""
    offered = {**suites.SUITES["cuda"], "generate": bench.GENERATE["cuda"]}
    of_suite: dict[str, list[dict]] = {name: [] for name in offered}
    for load in (load for loads in offered.values() for load in loads):
        for pass_ in load.passes:
            of_suite[load.suite].append(rows.make_row(load, pass_, None, timing.Measurement()))
    for goal in goals:
        found = [row for row in of_suite[goal.suite] if row["pass"] == goal.pass_ and goal.counts(row)]
        assert found, goal
        if isinstance(goal, PointGoals):
            assert len(found) == len(goal.tflops)
        elif goal.against not in (None, "best"):
            others = [row | row.get("peer_us", {}) | row.get("own_us", {}) | row.get("peer_ms", {}) for row in found]
            assert all(goal.against in names for names in others), goal
        else:
            assert len({row["against"] for row in found}) == 1, goal


def test_goals_take_microseconds_and_our_own_other_calls():
    row = {"suite": "decode", "case": "B1 4k", "pass": "forward", "dtype": "bfloat16", "head_dim": 128, "seqlen_q": 8}
    row |= {"in_goal": True, "against": "flash", "ratio": 2.0, "ours_us": 12.0}
    row |= {"peer_us": {"flash": 24.0}, "own_us": {"1 query": 10.0}}
    goals = [
        Goal("decode", "forward", 11, 12.1, at_most=True),
        Goal("decode", "forward", 0.91, 0.826, against="1 query"),
        Goal("decode", "forward", 1.5, 1.5, against="flash"),
    ]
    assert judged("decode", [row], goals) == [
        "  forward: 12 us (B1 4k bfloat16 D128 S8); goal at most 11 (limit 12.1): limit kept, goal missed",
        "  forward: 0.833 x own 1 query (B1 4k bfloat16 D128 S8); goal at least 0.91 (floor 0.826): "
        "floor kept, goal missed",
        "  forward: 2 x flash (B1 4k bfloat16 D128 S8); goal at least 1.5: goal met",
    ]
    own = row | {"against": "1 query", "ratio": 0.8333}
    assert judged("decode", [own, row], []) == [
        "  forward, B1 4k: 0.833 x own 1 query (B1 4k bfloat16 D128 S8)",
        "  forward: 2 x flash (B1 4k bfloat16 D128 S8)",
    ]
