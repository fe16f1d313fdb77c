"""python -m flash_attn_ext bench: exit status, what is printed and written. No times are checked."""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.__main__ import main
from flash_attn_ext.cli import machine
from flash_attn_ext.cli.bench import command, contestants, peers, suites, timing, workload
from flash_attn_ext.cli.bench.summary import summary

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


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
    assert report["method"].startswith("medians of wall-clock times")
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


def test_bench_times_the_switch_by_the_direct_call(tiny_suite, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"switch": tuple(suites.switch_on_cpu())}})
    assert main(["bench", "--device", "cpu", "--output", str(tmp_path), "--no-plot"]) == 0
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert [(row["case"], row["pass"]) for row in rows] == [
        (case, pass_) for case in ("small call", "one key") for pass_ in ("forward", "forward+backward")
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["own_us"]["direct"] / row["ours_us"], abs=1e-4)
        assert row["difference"] == 0
    assert "x own direct" in capsys.readouterr().out


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
    assert (
        "--suite grid: on cpu there are cpu, few_keys, decode_host, switch, decode, softcap, alibi\n"
        in capsys.readouterr().out
    )
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


def grid_rows(ratios: list[float]) -> list[dict]:
    common = {"suite": "grid", "case": "full", "pass": "forward", "dtype": "bfloat16", "head_dim": 64, "in_goal": True}
    return [common | {"seqlen_q": n, "against": "flash", "ratio": r, "ours_ms": 1} for n, r in enumerate(ratios)]


def test_bench_summary_has_no_goal_of_its_own():
    (text,) = summary("grid", grid_rows([1.0, 1.3]))
    assert text.startswith("  forward: geometric mean 1.14 x flash over 2 of 2 points, worst 1 (")
    assert "goal" not in text


def test_bench_summary_beside_our_own_other_call_has_a_line_for_each_case():
    own = [
        row | {"against": "own", "own_ms": {"own": 2}, "case": f"case {row['seqlen_q']}"}
        for row in grid_rows([2.0, 10.0])
    ]
    lines = summary("window", own)
    assert lines == [
        "  forward, case 0: 2 x own own (case 0 bfloat16 D64 S0)",
        "  forward, case 1: 10 x own own (case 1 bfloat16 D64 S1)",
    ]


@pytest.fixture
def suite_with_packages(tiny_suite, monkeypatch):
    """FlashAttention-4 is there, as PyTorch's attention in its layout; FlashAttention-3 is not."""

    def flash_attn_func(q, k, v, causal=False, deterministic=False):
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        asked.append((q.requires_grad, deterministic))
        transposed = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=causal).transpose(1, 2)
        if out.requires_grad:
            out.register_hook(lambda gradient: layouts.append(gradient.is_contiguous()))
        return out, None

    asked, layouts = [], []
    package = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    real_import = peers.importlib.import_module

    def import_module(name):
        if name == "flash_attn_interface":
            raise ImportError("not here")
        return package if name == "flash_attn.cute" else real_import(name)

    monkeypatch.setattr(peers.importlib, "import_module", import_module)
    loads = [
        dataclasses.replace(load, peers=("fa3", "fa4", "fa4 deterministic"), against="fa4", num_heads=3)
        for load in suites.SUITES["cpu"]["cpu"][:2]
    ]
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"cpu": tuple(loads)}})
    return types.SimpleNamespace(package=package, asked=asked, layouts=layouts)


def test_bench_packages_take_part(suite_with_packages, tmp_path, capsys):
    assert main(["bench", "--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("FlashAttention-3 (fa3) takes no part: ImportError: not here\n") == 1
    found = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert [row["pass"] for row in found] == ["forward", "forward+backward"] * 2
    for row in found:
        both = ["fa4", "fa4 deterministic"]
        assert list(row["peer_ms"]) == (["fa4"] if row["pass"] == "forward" else both) and "errors" not in row
        assert row["ratio"] > 0 and row["difference"] < 1e-3 and all(row["peer_ms"].values())
    assert set(suite_with_packages.asked) == {(False, False), (True, False), (True, True)}
    assert suite_with_packages.layouts and all(suite_with_packages.layouts)


def test_bench_packages_take_part_in_the_backward_pass_alone(suite_with_packages, monkeypatch, tmp_path):
    loads = [dataclasses.replace(load, passes=("backward",)) for load in suites.SUITES["cpu"]["cpu"]]
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"cpu": tuple(loads)}})
    assert main(["bench", "--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    for row in json.loads((tmp_path / "cpu.json").read_text())["rows"]:
        assert list(row["peer_ms"]) == ["fa4", "fa4 deterministic"] and all(row["peer_ms"].values())
        assert row["difference"] < 1e-3 and "errors" not in row


def test_bench_a_package_without_a_backward_pass(suite_with_packages, monkeypatch, tmp_path):
    """Its forward figures stay."""
    whole = suite_with_packages.package.flash_attn_func
    forward_alone = torch.no_grad()(lambda *tensors, **options: whole(*tensors, **options))
    monkeypatch.setattr(suite_with_packages.package, "flash_attn_func", forward_alone)
    assert main(["bench", "--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    for row in json.loads((tmp_path / "cpu.json").read_text())["rows"]:
        runs = row["pass"] == "forward"
        assert row["ours_ms"] > 0 and all((time is not None) == runs for time in row["peer_ms"].values())
        assert list(row.get("errors", {})) == ([] if runs else ["fa4", "fa4 deterministic"])


def test_bench_says_once_that_a_package_is_missing(suite_with_packages, monkeypatch, tmp_path, capsys):
    def import_module(name):
        raise ImportError("not here")

    monkeypatch.setattr(peers.importlib, "import_module", import_module)
    assert main(["bench", "--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("takes no part") == 2
    assert "FlashAttention-4 (fa4, fa4 deterministic) takes no part: ImportError: not here\n" in text
    assert all(row["peer_ms"] == {} for row in json.loads((tmp_path / "cpu.json").read_text())["rows"])


def test_bench_padding_beside_packed_sequences(tiny_suite, tmp_path, monkeypatch):
    """Both give the same result, or the row would fail."""
    (load,) = [load for load in suites.mask() if load.own == workload.OWN_VARLEN]
    small = dataclasses.replace(load, batch=3, num_heads=2, seqlen=32, head_dim=16)
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"cpu": (small,)}})
    assert main(["bench", "--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert row["own_ms"]["varlen"] > 0 and row["ratio"] > 0 and row["difference"] < 1e-2
