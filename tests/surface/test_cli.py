"""python -m flash_attn_ext {info, verify, bench}: exit status, what is printed and written. No times are checked."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.__main__ import main
from flash_attn_ext.cli import machine, verify
from flash_attn_ext.cli.bench import command, contestants, goals, suites, table, timing, workload
from support.backends import device_not_runnable_because

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def run_module(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "flash_attn_ext", *arguments], capture_output=True, text=True)


def test_info_json():
    process = run_module("info", "--json")
    assert process.returncode == 0, process.stdout + process.stderr
    facts = json.loads(process.stdout)
    assert facts["versions"]["flash_attn_ext"] == flash_attn_ext.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["build"] == flash_attn_ext._C.build_info()
    assert facts["runs_on"]["cpu"] == "cpu"
    assert facts["gpu"]
    if device_not_runnable_because("cuda") is None:
        assert facts["runs_on"]["cuda"] in facts["build"]["backends"] and facts["runs_on"]["cuda"] != "cpu"
        assert facts["self_test"]["device"] == "cuda"
    assert facts["self_test"]["passed"] and facts["self_test"]["cases"] > 0


def test_info_text(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (flash_attn_ext.__version__, torch.__version__, "backends", "GPU", "self-test"):
        assert part in text


@pytest.mark.parametrize("arguments", [[], ["train"], ["verify", "--device", "tpu"]], ids=str)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.fixture
def few_cases(monkeypatch):
    """The plain case and the one with everything, in two dtypes."""
    monkeypatch.setattr(verify, "CASES", [verify.CASES[0], verify.CASES[-1]])
    monkeypatch.setattr(verify, "DTYPES", (torch.float32, torch.bfloat16))


def test_verify_keeps_the_rule(few_cases, device, capsys):
    assert main(["verify", "--device", device]) == 0
    assert "4 of 4 keep the rule" in capsys.readouterr().out


def test_verify_fails_when_the_rule_is_broken(few_cases, device, monkeypatch, capsys):
    """A library that is wrong: here, one that attends with another scale."""
    right = flash_attn_ext.functional.attention
    monkeypatch.setattr(
        flash_attn_ext.cli.accuracy, "attention", lambda **tensors: right(**(tensors | dict(scale=0.01)))
    )
    assert main(["verify", "--device", device]) == 1
    assert "BREAK" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_device_that_cannot_run_is_said(command, tmp_path, capsys):
    if device_not_runnable_because("cuda") is None:
        pytest.skip("a backend runs on the GPU of this machine")
    extra = ["--output", str(tmp_path)] if command == "bench" else []
    assert main([command, "--device", "cuda", *extra]) == 2
    assert "--device cuda" in capsys.readouterr().out


CPUINFO = """processor\t: 0
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9V84 96-Core Processor
flags\t\t: fpu sse2 avx2 fma avx512f avx512_bf16 avx512vbmi

processor\t: 1
cpu family\t: 26
"""


def test_machine_names_the_cpu(tmp_path, monkeypatch):
    """Family, model and flags: a name such as "AMD EPYC" stands for several generations."""
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    facts = machine._cpu_facts(path)
    monkeypatch.setattr(machine, "_cpu_facts", lambda: facts)
    found = machine.machine()
    assert found["cpu"] == "AMD EPYC 9V84 96-Core Processor"
    assert (found["cpu_family"], found["cpu_model"]) == (25, 17)
    assert found["cpu_flags"] == ["avx2", "fma", "avx512f", "avx512_bf16"]


def test_machine_without_cpuinfo(tmp_path, monkeypatch):
    facts = machine._cpu_facts(tmp_path / "none")
    monkeypatch.setattr(machine, "_cpu_facts", lambda: facts)
    found = machine.machine()
    assert found["cpu"] and found["cpu_family"] is None and found["cpu_flags"] == []


@pytest.fixture
def tiny_suite(monkeypatch):
    """The CPU's suite at one small size, each call timed once."""
    small = [dataclasses.replace(load, num_heads=2, seqlen=64, head_dim=16) for load in suites.SUITES["cpu"]["cpu"][:5]]
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"cpu": tuple(small)}})
    monkeypatch.setattr(command, "EFFORTS", {("cpu", quick): timing.Effort(1, 1, 1, 0.0) for quick in (False, True)})


def test_bench_writes_rows_and_a_plot(tiny_suite, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--device", "cpu", "--quick", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert [row["case"] for row in report["rows"][::2]] == ["full", "causal", "window 256", "bool mask", "float bias"]
    assert {row["pass"] for row in report["rows"]} == {"forward", "forward+backward"}
    for row in report["rows"]:
        assert row["ours_ms"] > 0 and row["peer_ms"]["torch sdpa"] > 0 and row["difference"] < 1e-3
        assert row["ours_tflops"] > 0 and row["peer_tflops"]["torch sdpa"] > 0
        assert (row["suite"], row["backend"], row["against"]) == ("cpu", "cpu", "torch sdpa")
        assert (row["dtype"], row["head_dim"], row["seqlen_q"]) == ("float32", 16, 64)
    assert report["command"] == "python -m flash_attn_ext bench --device cpu --quick"  # nothing of this machine
    assert (
        report["machine"]["cpu_flags"] == machine.machine()["cpu_flags"]
        and report["date"]
        and report["versions"]["torch"] == torch.__version__
    )
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "x torch sdpa" in text and "geometric mean" in text


def test_bench_without_a_plot(tiny_suite, tmp_path):
    assert main(["bench", "--device", "cpu", "--output", str(tmp_path / "new"), "--no-plot"]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["cpu.json"]


def test_bench_notes_the_choices_that_made_the_rows(tiny_suite, tmp_path):
    choices = ["--suite", "cpu", "--backend", "cpu"]
    assert main(["bench", "--no-plot", "--output", str(tmp_path), *choices, "--device", "cpu"]) == 0
    report = json.loads((tmp_path / "cpu_cpu_cpu.json").read_text())
    assert report["command"] == "python -m flash_attn_ext bench --device cpu --suite cpu --backend cpu"


def test_bench_a_peer_that_fails_loses_its_own_figure_only(tiny_suite, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **keywords):
        raise RuntimeError("not today")

    monkeypatch.setattr(contestants.F, "scaled_dot_product_attention", fail)
    assert main(["bench", "--device", "cpu", "--output", str(tmp_path), "--no-plot"]) == 0
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert len(rows) == 10
    for row in rows:
        assert row["ours_ms"] > 0 and row["peer_ms"] == {"torch sdpa": None} and row["ratio"] is None
        assert row["errors"] == {"torch sdpa": "RuntimeError: not today"}
    assert "fails" in capsys.readouterr().out


def test_bench_says_when_ours_is_wrong(tiny_suite, tmp_path, monkeypatch, capsys):
    right = contestants.attention
    monkeypatch.setattr(contestants, "attention", lambda *tensors, **keywords: right(*tensors, **keywords, scale=0.01))
    assert main(["bench", "--device", "cpu", "--output", str(tmp_path), "--no-plot"]) == 1
    assert "differs from the first peer's" in capsys.readouterr().out


def test_bench_says_when_ours_fails_and_keeps_the_peers_figures(tiny_suite, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **keywords):
        raise RuntimeError("not today")

    monkeypatch.setattr(contestants, "attention", fail)
    assert main(["bench", "--device", "cpu", "--output", str(tmp_path), "--no-plot"]) == 1
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert len(rows) == 10
    assert all(row["ours_ms"] is None and row["peer_ms"]["torch sdpa"] > 0 for row in rows)
    assert "!! ours: RuntimeError: not today" in capsys.readouterr().out


def test_bench_refuses_names_that_it_does_not_have(tmp_path, capsys):
    arguments = ["bench", "--device", "cpu", "--output", str(tmp_path / "never")]
    assert main([*arguments, "--suite", "grid"]) == 2
    assert "--suite grid: on cpu there are cpu" in capsys.readouterr().out
    assert main([*arguments, "--backend", "sm81"]) == 2
    built = ", ".join(flash_attn_ext._C.build_info()["backends"])
    assert f"--backend sm81: this build has {built}\n" in capsys.readouterr().out
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("report", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_bench_draws_what_was_measured(report, tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(report, tmp_path)
    assert main(["bench", "--draw", str(tmp_path / report.name)]) == 0
    assert list(tmp_path.glob("*.png"))


def test_bench_counts_operations():
    base = workload.Workload("grid", "full", 2, 3, seqlen=8, head_dim=4)
    full = 4 * 2 * 3 * 8 * 8 * 4
    assert base.flops("forward") == full and base.flops("backward") == 2.5 * full
    assert dataclasses.replace(base, causal=True).flops("forward") == full / 2
    assert dataclasses.replace(base, head_dim_v=12).flops("forward") == 2 * full
    assert dataclasses.replace(base, window=(0, 0)).flops("forward") == full / 8
    assert dataclasses.replace(base, window=(7, 7)).flops("forward") == full
    assert dataclasses.replace(base, window=(7, 0), causal=True).flops("forward") == full * 36 / 64
    assert dataclasses.replace(base, lengths=(8, 8)).flops("forward") == full


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
def test_bench_summary_names_the_goal(ratios, verdict):
    text, *others = table.summary("grid", grid_rows(ratios))
    assert not others
    assert text.endswith(f"goal at least 1.1 (floor 1, no point under 0.85): {verdict}")


def test_bench_every_goal_has_rows():
    loads = [load for of_suite in suites.SUITES["cuda"].values() for load in of_suite]
    for goal in goals.GOALS:
        found = [load for load in loads if load.suite == goal.suite and goal.case in (None, load.case) and load.in_goal]
        assert found and all(goal.pass_ in load.passes for load in found), goal
