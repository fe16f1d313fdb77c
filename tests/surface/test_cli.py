"""python -m flash_attn_ext {info, verify, bench}: exit status, what is printed and written. No times are checked."""

import json
import subprocess
import sys

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.__main__ import main
from flash_attn_ext.cli import bench, verify


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
    monkeypatch.setattr(verify, "DTYPES", {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)})


def test_verify_keeps_the_rule(few_cases, capsys):
    assert main(["verify", "--device", "cpu"]) == 0
    assert "4 of 4 keep the rule" in capsys.readouterr().out


def test_verify_fails_when_the_rule_is_broken(few_cases, monkeypatch, capsys):
    """A library that is wrong: here, one that attends with another scale."""
    right = flash_attn_ext.functional.attention
    monkeypatch.setattr(
        flash_attn_ext.cli.accuracy, "attention", lambda **tensors: right(**(tensors | dict(scale=0.01)))
    )
    assert main(["verify", "--device", "cpu"]) == 1
    assert "BREAK" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_device_that_cannot_run_is_said(command, tmp_path, capsys):
    extra = ["--output", str(tmp_path)] if command == "bench" else []
    assert main([command, "--device", "cuda", *extra]) == 2
    assert "--device cuda" in capsys.readouterr().out


@pytest.fixture
def tiny_plan(monkeypatch):
    plan = bench.Plan(1, 2, 64, (16,), (torch.float32,), seconds=0.0, min_rounds=1)
    monkeypatch.setattr(bench, "PLANS", {("cpu", False): plan, ("cpu", True): plan})


def test_bench_writes_rows_and_a_plot(tiny_plan, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--device", "cpu", "--quick", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert {row["suite"] for row in report["rows"]} == {"full", "causal", "window", "bool", "float"}
    assert {row["pass"] for row in report["rows"]} == {"forward", "forward+backward"}
    for row in report["rows"]:
        assert row["ours_ms"] > 0 and all(time > 0 for time in row["peer_ms"].values())
        assert (row["dtype"], row["head_dim"], row["seqlen_q"]) == ("float32", 16, 64)
    assert report["machine"] and report["versions"]["torch"] == torch.__version__
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "ours / torch" in capsys.readouterr().out


def test_bench_without_a_plot(tiny_plan, tmp_path):
    assert main(["bench", "--device", "cpu", "--output", str(tmp_path / "new"), "--no-plot"]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["cpu.json"]
