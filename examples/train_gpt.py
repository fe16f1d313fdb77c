"""Train a small byte-level GPT on the Python standard library, with our attention and with PyTorch's.

    python examples/train_gpt.py

Begins with five seconds of attention alone at 2048 tokens (speed.py). Then it trains: same seed, same data, same model;
the only difference is the function that computes attention. Ends with both validation losses, a generated sample,
demo/loss.png with the two curves and demo/loss.json with the numbers; exits with an error when the curves part or the
model has learnt nothing.

    python examples/train_gpt.py --large

times whole steps of a larger model at a long context instead (large.py).
"""

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, Attention, GPTConfig
from large import LARGE, train_large
from progress import Reporter
from speed import speed_line
from stdlib_text import Corpus, load_corpus, nats_to_bits, random_windows
from torch import Tensor
from training import MAX_RELATIVE_GAP, Schedule, Trainee, choose_device, mixed_precision, relative_gap

from flash_attn_ext import scaled_dot_product_attention

EVAL_EVERY = 100
EVAL_WINDOWS = 128
SAMPLE_BYTES = 300
WHAT_CURVES_MEAN = """
Blue: the loss of the model whose attention flash_attn_ext computes.
Orange: the loss of the same model, from the same seed and on the same text, with PyTorch's attention; where it covers
the blue one, either attention can take the other's place.
A context of {context} tokens leaves attention little to do. The line above the training is about a longer one."""
MAX_SHARE_OF_UNIGRAM = 0.9  # a model that learnt more than letter frequencies is well below them


@dataclass
class Curve:
    """What one training run leaves behind; losses are nats per byte."""

    name: str
    train_losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    tokens_per_second: float = 0.0
    sample: str = ""

    @property
    def final(self) -> float:
        return self.validation[-1][1]


def train(name: str, attention: Attention, corpus: Corpus, schedule: Schedule, device: torch.device) -> Curve:
    config = GPTConfig()
    trainee = Trainee(config, attention, schedule, device)
    batches = torch.Generator().manual_seed(schedule.seed)
    held_out = random_windows(corpus.validation, EVAL_WINDOWS, config.context + 1, torch.Generator().manual_seed(1))

    curve = Curve(name)
    reporter = Reporter(name)
    seconds = 0.0
    for step in reporter.track(range(schedule.steps)):
        start = time.perf_counter()
        windows = random_windows(corpus.train, schedule.batch, config.context + 1, batches).to(device)
        curve.train_losses.append(trainee.step(step, windows))

        seconds += time.perf_counter() - start
        curve.tokens_per_second = (step + 1) * windows[:, 1:].numel() / seconds
        reporter.update(f"loss {curve.train_losses[-1]:.3f}  {curve.tokens_per_second:,.0f} tokens/s")
        if (step + 1) % EVAL_EVERY == 0 or step + 1 == schedule.steps:
            curve.validation.append((step + 1, validation_loss(trainee.model, held_out, schedule.batch, device)))

    curve.sample = trainee.model.generate(b"def ", num_bytes=SAMPLE_BYTES).decode("utf-8", errors="replace")
    return curve


@torch.no_grad()
def validation_loss(model: GPT, windows: Tensor, batch: int, device: torch.device) -> float:
    with mixed_precision(device):
        losses = [model.loss(part.to(device)) * len(part) for part in windows.split(batch)]
    return float(sum(losses)) / len(windows)


def plot(curves: list[Curve], unigram: float, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print(f"no {path}: matplotlib is not installed. Run: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for curve, color, width in zip(curves, ("tab:blue", "tab:orange"), (4.0, 1.5), strict=True):
        steps, losses = zip(*curve.validation, strict=True)
        axes.plot(curve.train_losses, color=color, alpha=0.3, linewidth=width / 2)
        axes.plot(steps, losses, color=color, linewidth=width, label=f"{curve.name}: validation {losses[-1]:.4f}")
    axes.axhline(unigram, color="gray", linestyle=":", label=f"unigram entropy {unigram:.3f}")
    axes.set(
        xlabel="step", ylabel="loss, nats per byte", title="Byte-level GPT on the Python standard library, one seed"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"Curves: {path}")


def verdict(ours: Curve, pytorchs: Curve, unigram: float) -> list[str]:
    """What is wrong with the result; empty when all is well."""
    problems = []
    gap = relative_gap(ours.final, pytorchs.final)
    if not gap <= MAX_RELATIVE_GAP:
        problems.append(f"the final validation losses differ by {gap:.2%}, allowed are {MAX_RELATIVE_GAP:.0%}")
    for curve in (ours, pytorchs):
        if not curve.final < MAX_SHARE_OF_UNIGRAM * unigram:
            problems.append(
                f"{curve.name}: validation loss {curve.final:.3f} is not clearly below the unigram entropy "
                f"{unigram:.3f} (wanted: less than {MAX_SHARE_OF_UNIGRAM:.0%} of it)"
            )
    return problems


def train_small(corpus: Corpus, schedule: Schedule, device: torch.device, out: Path) -> list[str]:
    """Trains with both, one after the other; prints, draws and writes. Returns what is wrong with the result."""
    unigram = corpus.unigram_entropy()
    start = time.monotonic()
    ours = train("flash_attn_ext", scaled_dot_product_attention, corpus, schedule, device)
    pytorchs = train("torch", F.scaled_dot_product_attention, corpus, schedule, device)
    minutes = (time.monotonic() - start) / 60

    print(f"\nA sample from the model trained with {ours.name}:\n{'-' * 72}\n{ours.sample}\n{'-' * 72}\n")
    for curve in (ours, pytorchs):
        bits = nats_to_bits(curve.final)
        speed = f"{curve.tokens_per_second:,.0f} tokens/s"
        print(f"{curve.name:15} validation loss {curve.final:.4f} nats ({bits:.3f} bits) a byte, {speed}")
    print(f"{'unigram entropy':15} {unigram:.4f} nats. Both runs took {minutes:.1f} minutes.")

    out.mkdir(parents=True, exist_ok=True)
    numbers = {
        "device": str(device),
        "torch": torch.__version__,
        "training": asdict(schedule),
        "unigram_entropy": unigram,
        "curves": [asdict(ours), asdict(pytorchs)],
    }
    (out / "loss.json").write_text(json.dumps(numbers, indent=1) + "\n")
    plot([ours, pytorchs], unigram, out / "loss.png")
    print(WHAT_CURVES_MEAN.format(context=GPTConfig().context))
    return verdict(ours, pytorchs, unigram)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, help=f"optimiser steps of each run ({Schedule.steps}; --large: {LARGE.schedule.steps})"
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for plots and numbers (%(default)s)")
    parser.add_argument(
        "--large",
        action="store_true",
        help=f"whole steps of a GPT of {LARGE.model.num_parameters / 1e6:.0f}M parameters at context "
        f"{LARGE.model.context} on a GPU of 80 GB, both alternate",
    )
    parser.add_argument("--compile", action="store_true", help="with --large: torch.compile both models")
    parser.add_argument("--json", type=Path, help="with --large: file for its numbers (large.json in --out)")
    options = parser.parse_args(arguments)
    least = LARGE.untimed_steps + 1 if options.large else 1
    if options.steps is not None and options.steps < least:
        parser.error(f"--steps {options.steps}: allowed is a whole number of at least {least}")
    if not options.large and (options.compile or options.json is not None):
        parser.error("--compile and --json go with --large only: add --large, or leave them out")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    device = choose_device()
    if options.large and device.type != "cuda":
        sys.exit("--large: allowed is a CUDA GPU that flash_attn_ext runs on, here there is none. Leave --large out")
    corpus = load_corpus()
    print(
        f"Text: {corpus.num_files} files of the Python {sys.version.split()[0]} library, "
        f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out. Device: {device}."
    )
    if options.large:
        schedule = dataclasses.replace(LARGE.schedule, steps=options.steps or LARGE.schedule.steps)
        path = options.json or options.out / "large.json"
        problems = train_large(dataclasses.replace(LARGE, schedule=schedule), corpus, device, options.compile, path)
    else:
        print(speed_line(device), flush=True)
        problems = train_small(corpus, Schedule(steps=options.steps or Schedule.steps), device, options.out)
    if problems:
        sys.exit("\nFAILED: " + "\nFAILED: ".join(problems))


if __name__ == "__main__":
    main()
