"""The demo at sizes of a test: it trains with both attentions, compares and writes. No times are checked."""

import functools
import json
import re

import large
import pytest
import speed
import torch
import train_gpt
from gpt import GPTConfig
from stdlib_text import Corpus
from training import Schedule

from flash_attn_ext.cli.bench import plot

TINY = large.Size(
    GPTConfig(context=32, num_layers=1, num_heads=2, width=16),
    Schedule(steps=8, batch=4, learning_rate=1e-2, warmup_steps=2),
    untimed_steps=2,
    last_steps=3,
)


@pytest.fixture
def corpus() -> Corpus:
    text = torch.tensor(list(b"the same words again and again, " * 40))
    return Corpus(train=text, validation=text[:200], num_files=2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_large_compares_both(compiled, corpus, device, tmp_path, capsys, monkeypatch):
    quickly = functools.partial(torch.compile, backend="aot_eager")  # the default backend takes a minute
    monkeypatch.setattr(torch, "compile", quickly)
    path = tmp_path / "new" / "large.json"
    assert large.train_large(TINY, corpus, torch.device(device), compiled, path) == []
    report = json.loads(path.read_text())
    (row,) = report["rows"]
    assert report["command"] == f"python examples/train_gpt.py --large{' --compile' * compiled} --steps 8"
    assert row["rounds"] == 6 and row["seqlen_q"] == 32 and row["head_dim"] == 8
    assert row["ratio"] == pytest.approx(row["peer_ms"]["torch sdpa"] / row["ours_ms"], abs=1e-4)
    for name, median in {"ours": row["ours_ms"], **row["peer_ms"]}.items():
        spread = row["spread_ms"][name]
        assert 0 < spread["min"] <= spread["q1"] <= median <= spread["q3"]
    tokens = 4 * 32
    assert row["ours_tokens_per_s"] == pytest.approx(tokens / row["ours_ms"] * 1e3, rel=1e-2)
    peer_ms = row["peer_ms"]["torch sdpa"]
    assert row["peer_tokens_per_s"]["torch sdpa"] == pytest.approx(tokens / peer_ms * 1e3, rel=1e-2)
    assert {name: len(losses) for name, losses in row["losses"].items()} == {"flash_attn_ext": 8, "torch": 8}
    assert all((peak is None) == (device == "cpu") for peak in row["peak_bytes"].values())
    text = capsys.readouterr().out
    assert "times as many tokens/s as torch; medians of 6 steps each" in text
    assert ("GiB above weights" in text) == (device == "cuda")


def test_large_draws_as_the_bench_does(corpus, device, tmp_path):
    pytest.importorskip("matplotlib")
    large.train_large(TINY, corpus, torch.device(device), False, tmp_path / "large.json")
    plot.draw(json.loads((tmp_path / "large.json").read_text()), tmp_path / "large.png")
    assert (tmp_path / "large.png").exists()


def test_large_says_when_the_losses_part(corpus, device, monkeypatch, tmp_path):
    right = large.ATTENTIONS[large.OURS]
    wrong = dict(large.ATTENTIONS, **{large.OURS: lambda q, k, v, is_causal: 30 * right(q, k, v, is_causal=False)})
    monkeypatch.setattr(large, "ATTENTIONS", wrong)
    (problem,) = large.train_large(TINY, corpus, torch.device(device), False, tmp_path / "large.json")
    assert "the last losses differ by" in problem


def test_large_counts_parameters():
    assert large.LARGE.model.num_parameters == 91_703_808
    assert large.LARGE.tokens == 65536


def test_demo_options():
    options = train_gpt.parse(["--large", "--compile", "--steps", "6", "--json", "numbers.json"])
    assert (options.large, options.compile, options.steps, options.json.name) == (True, True, 6, "numbers.json")
    assert train_gpt.parse([]).large is False


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--compile"], "--compile and --json go with --large only"),
        (["--json", "x"], "--compile and --json go with --large only"),
        (["--steps", "0"], "--steps 0: allowed is a whole number of at least 1"),
        (["--large", "--steps", "5"], "--steps 5: allowed is a whole number of at least 6"),
    ],
    ids=" ".join,
)
def test_demo_refuses(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse(arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_large_wants_a_gpu():
    with pytest.raises(SystemExit, match="--large: allowed is a CUDA GPU"):
        train_gpt.main(["--large"])


def test_small_demo(corpus, device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "EVAL_WINDOWS", 4)
    monkeypatch.setattr(train_gpt, "SAMPLE_BYTES", 4)
    train_gpt.train_small(corpus, Schedule(steps=3, batch=2), torch.device(device), tmp_path)
    numbers = json.loads((tmp_path / "loss.json").read_text())
    assert [len(curve["train_losses"]) for curve in numbers["curves"]] == [3, 3]
    text = capsys.readouterr().out
    assert "validation loss" in text and "\nBlue: the loss of" in text and "\nOrange: the loss of" in text


def test_the_demo_says_how_fast_attention_alone_is(device):
    """Medians of both, and their ratio as the sentence has it."""
    line = speed.speed_line(torch.device(device), tokens=64, seconds=0.0)
    sentence = r"64 causal tokens: flash_attn_ext ([\d.]+) ms, torch ([\d.]+) ms. That is ([\d.]+) times as fast"
    found = re.search(sentence, line)
    ours, theirs, ratio = map(float, found.groups())
    assert min(ours, theirs, ratio) > 0 and line.endswith("(medians of 3).")


def test_the_demo_begins_with_that_line(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "load_corpus", lambda: corpus)
    monkeypatch.setattr(train_gpt, "speed_line", lambda device: "how fast it is")
    monkeypatch.setattr(train_gpt, "train_small", lambda *arguments: print("training") or [])
    train_gpt.main(["--steps", "1", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-2:] == ["how fast it is", "training"]
