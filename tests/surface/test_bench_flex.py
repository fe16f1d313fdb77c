"""FlexAttention as a peer of bench: it computes what our call does, and takes part where PyTorch compiles it."""

import json

import pytest
import torch
from torch.nn.attention import flex_attention

from flash_attn_ext.__main__ import main
from flash_attn_ext.cli.bench import command, contestants, flex, peers, suites, timing
from flash_attn_ext.cli.bench.workload import BATCH_MASK, HEAD_BIAS, PADDING_MASK, SQUARE_BIAS, SQUARE_MASK, Workload

SMALL = dict(batch=2, num_heads=4, seqlen=48, head_dim=16, dtype=torch.float32, peers=("flex",), against="best")
ROWS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window=(9, 4)),
    "causal window": dict(causal=True, window=(9, 0)),
    "grouped heads": dict(num_key_heads=2, causal=True),
    "few queries": dict(seqlen_k=70),
    "packed": dict(batch=1, lengths=(20, 48, 7), num_key_heads=2, causal=True),
    "softcap": dict(softcap=0.5, causal=True),
    "ALiBi": dict(has_alibi=True, causal=True),
    "slopes with grad": dict(has_alibi=True, extras_need_grad=True),
    "sink": dict(has_sink=True, causal=True),
    "sink with grad": dict(has_sink=True, extras_need_grad=True, window=(9, 0), causal=True),
    "square mask": dict(mask=SQUARE_MASK),
    "padding": dict(mask=PADDING_MASK),
    "square bias": dict(bias=SQUARE_BIAS),
    "bias and mask": dict(bias=HEAD_BIAS, mask=BATCH_MASK, extras_need_grad=True),
}


@pytest.fixture
def traced(monkeypatch):
    """FlexAttention traced, but not compiled to a kernel, and without its refusal of a backward pass on a CPU."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None, raising=False)


def row_of(options: dict) -> Workload:
    return Workload("workloads", "row", **(SMALL | options))


@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
def test_flex_computes_what_our_call_does(options, traced):
    load = row_of(options)
    inputs = contestants.prepare(load, "backward", "cpu")
    entrants = contestants.contestants(load, inputs, None)
    ours, theirs = (entrant.make_call("forward", inputs.dout)() for entrant in entrants.values())
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    ours, theirs = (entrant.make_call("backward", inputs.dout)() for entrant in entrants.values())
    assert len(ours) == len(inputs.leaves) == 3 + load.extras_need_grad
    for gradients in zip(ours, theirs, strict=True):
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_inductor_compiles_flex_on_the_cpu():
    load = row_of(dict(causal=True, window=(9, 0), softcap=0.5, has_alibi=True))
    inputs = contestants.prepare(load, "forward", "cpu")
    entrants = contestants.contestants(load, inputs, None)
    ours, theirs = (entrant.make_call("forward", inputs.dout)() for entrant in entrants.values())
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_flex_takes_part_on_the_cpu_where_pytorch_compiles_it(traced, monkeypatch, tmp_path, capsys):
    loads = [row_of(options) for options in (dict(softcap=2.0), dict(has_alibi=True), dict(has_sink=True))]
    loads[1] = row_of(dict(has_alibi=True, peers=("flex", "torch sdpa"), passes=("forward", "forward+backward")))
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"workloads": tuple(loads)}})
    monkeypatch.setattr(command, "EFFORTS", {("cpu", False): timing.Effort(1, 1, 1, 0.0)})
    assert main(["bench", "--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert [list(row["peer_ms"]) for row in rows] == [
        *(["flex"], []),
        *(["flex", "torch sdpa"], ["torch sdpa"]),
        *([], []),
    ]
    for row in rows:
        assert "errors" not in row and row["ours_ms"] > 0 and all(row["peer_ms"].values())
        assert not row["peer_ms"] or row["difference"] < 1e-5
    assert capsys.readouterr().out.count(f"{flex.ON_THE_CPU}\n") == 1


def test_flex_that_fails_to_compile_loses_its_own_figure_only(monkeypatch):
    def fail(function, **options):
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(torch, "compile", fail)
    load = row_of(dict(causal=True))
    inputs = contestants.prepare(load, "forward", "cpu")
    entrants = contestants.contestants(load, inputs, None)
    effort, stopwatch = timing.Effort(1, 1, 1, 0.0), contestants.stopwatch(load, inputs)
    measured = timing.measure(entrants, "forward", inputs.dout, effort, stopwatch)
    assert list(measured.times) == ["ours"] and measured.errors == {"flex": "RuntimeError: no compiler"}


def test_flex_needs_triton_on_a_gpu(monkeypatch):
    def import_module(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(peers.importlib, "import_module", import_module)
    loads = [row_of({})]
    assert peers.absences(peers.missing_packages(loads, "cuda")) == [
        "FlexAttention (flex) takes no part: ImportError: no triton"
    ]
    assert peers.missing_packages(loads, "cpu") == {}
