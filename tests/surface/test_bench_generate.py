"""The suite generate of benchmarks/bench.py with a tiny model on the CPU. No times are checked."""

import dataclasses
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import generate
from flash_attn_ext.cli.bench import command, suites, timing
from generate_suites import DECODE, DYNAMIC, PREFILL, STATIC, generate_on_cpu

TINY = dict(num_heads=4, num_key_heads=2, seqlen=40, head_dim=16, hidden_size=32, intermediate_size=48, vocab_size=50)
NUM_LAYERS, NEW_TOKENS = 2, 6


class CountOurs(TorchDispatchMode):
    """Calls of this library's operators."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.namespace == "flash_attn_ext"
        return func(*args, **(kwargs or {}))


def tiny(**changes):
    (load, *_) = generate_on_cpu()
    return dataclasses.replace(load, num_layers=NUM_LAYERS, new_tokens=NEW_TOKENS, **TINY, **changes)


@pytest.mark.parametrize("cache", [DYNAMIC, STATIC])
@pytest.mark.parametrize("batch", [1, 2])
def test_generate_gives_the_same_tokens_by_attention_of_ours(cache, batch):
    """In float32, where nothing but the order of sums differs."""
    pytest.importorskip("transformers")
    load = tiny(cache=cache, batch=batch)
    inputs = generate.prepare(load, DECODE, "cpu")
    tokens, calls = {}, {}
    for name, contestant in generate.contestants(load, inputs, None).items():
        with contestant.context(), CountOurs() as counted:
            tokens[name] = contestant.make_call(DECODE, inputs.dout)()
        calls[name] = counted.calls
        assert len(contestant.generation.seconds) == 1 + 1 + NEW_TOKENS
        assert contestant.generation.milliseconds_of_a_step() > 0
    assert tokens["ours"].shape == (batch, load.seqlen + 1 + NEW_TOKENS)
    assert torch.equal(tokens["ours"], tokens["torch sdpa"])
    assert calls == {"ours": NUM_LAYERS * (1 + NEW_TOKENS), "torch sdpa": 0}


def test_generate_of_one_token_is_the_prompts_time():
    pytest.importorskip("transformers")
    load = tiny()
    generation = generate.Generation(generate.prepare(load, PREFILL, "cpu"), load)
    assert generation().shape == (1, load.seqlen + 1)
    start, token = generation.seconds
    assert generation.milliseconds_of_a_step() == (token - start) * 1e3


def test_generate_rows_have_tokens_per_second(monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(command, "EFFORTS", {("cpu", quick): timing.Effort(1, 1, 1, 0.0) for quick in (False, True)})
    monkeypatch.setattr(bench, "GENERATE", {device: (tiny(),) for device in suites.SUITES})
    arguments = ["--device", "cpu", "--no-plot", "--output", str(tmp_path), "--suite", "generate"]
    assert bench.main(arguments) == 0
    rows = json.loads((tmp_path / "cpu_generate.json").read_text())["rows"]
    assert [row["pass"] for row in rows] == [PREFILL, DECODE]
    for row, tokens in zip(rows, (TINY["seqlen"], 1), strict=True):
        assert row["ours_tokens_per_s"] == pytest.approx(tokens / row["ours_us"] * 1e6, rel=1e-3)
        assert row["peer_us"]["torch sdpa"] > 0 and row["ratio"] > 0 and row["backend"] == "cpu"
    assert " tokens/s " in capsys.readouterr().out
    assert bench.main([*arguments, "--backend", "cpu"]) == 1
    assert "--backend cpu does not go with suite generate" in capsys.readouterr().out


def test_generate_without_transformers_says_what_to_install(monkeypatch, capsys):
    def import_module(name):
        raise ImportError(f"no {name} here")

    monkeypatch.setattr(generate.importlib, "import_module", import_module)
    assert bench.main(["--device", "cpu", "--suite", "generate"]) == 2
    text = capsys.readouterr().out
    assert (
        "--suite generate: it needs transformers, which cannot be imported (ImportError: no transformers here)" in text
    )
    assert "pip install 'transformers>=5.15'" in text


def test_generate_runs_only_when_it_is_named(monkeypatch, tmp_path):
    small = tuple(dataclasses.replace(load, num_heads=2, seqlen=64, head_dim=16) for load in suites.cpu())[:1]
    monkeypatch.setattr(suites, "SUITES", {"cpu": {"cpu": small}})
    monkeypatch.setattr(command, "EFFORTS", {("cpu", quick): timing.Effort(1, 1, 1, 0.0) for quick in (False, True)})
    assert bench.main(["--device", "cpu", "--no-plot", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert {row["suite"] for row in report["rows"]} == {"cpu"}
    assert report["command"] == "python benchmarks/bench.py --device cpu"
