"""Train a small byte-level GPT on the Python standard library, with our attention and with PyTorch's.

    python examples/train_gpt.py

Same seed, same data, same model: the only difference is the function that computes attention. Ends with both
validation losses, a generated sample, demo/loss.png with the two curves and demo/loss.json with the numbers; exits with
an error when the curves part or the model has learnt nothing.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, Attention, GPTConfig
from progress import Reporter
from stdlib_text import Corpus, load_corpus, nats_to_bits, random_windows
from torch import Tensor

from flash_attn_ext import scaled_dot_product_attention

MAX_RELATIVE_GAP = 0.01  # between the two final validation losses
MAX_SHARE_OF_UNIGRAM = 0.9  # a model that learnt more than letter frequencies is well below them


@dataclass(frozen=True)
class Training:
    steps: int = 1200
    batch: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    eval_every: int = 100
    eval_windows: int = 128
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


@dataclass
class Curve:
    """What one training run leaves behind; losses are nats a byte."""

    name: str
    train_losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    tokens_per_second: float = 0.0
    sample: str = ""

    @property
    def final(self) -> float:
        return self.validation[-1][1]


def train(name: str, attention: Attention, corpus: Corpus, training: Training, device: torch.device) -> Curve:
    torch.manual_seed(training.seed)
    model = GPT(GPTConfig(), attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    batches = torch.Generator().manual_seed(training.seed)
    length = model.config.context + 1
    held_out = random_windows(corpus.validation, training.eval_windows, length, torch.Generator().manual_seed(1))

    curve = Curve(name)
    reporter = Reporter(name)
    seconds = 0.0
    for step in reporter.track(range(training.steps)):
        start = time.perf_counter()
        windows = random_windows(corpus.train, training.batch, length, batches).to(device)
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate_at(step)
        with mixed_precision(device):
            loss = model.loss(windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.train_losses.append(loss.item())

        seconds += time.perf_counter() - start
        curve.tokens_per_second = (step + 1) * windows[:, 1:].numel() / seconds
        reporter.update(f"loss {curve.train_losses[-1]:.3f}  {curve.tokens_per_second:,.0f} tokens/s")
        if (step + 1) % training.eval_every == 0 or step + 1 == training.steps:
            curve.validation.append((step + 1, validation_loss(model, held_out, training.batch, device)))

    curve.sample = model.generate(b"def ", num_bytes=300).decode("utf-8", errors="replace")
    return curve


@torch.no_grad()
def validation_loss(model: GPT, windows: Tensor, batch: int, device: torch.device) -> float:
    with mixed_precision(device):
        losses = [model.loss(part.to(device)) * len(part) for part in windows.split(batch)]
    return float(sum(losses)) / len(windows)


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def choose_device() -> torch.device:
    """A GPU when our attention runs there, else the CPU."""
    if torch.cuda.is_available():
        q = torch.zeros(1, 1, 8, 32, device="cuda", dtype=torch.bfloat16)
        try:
            scaled_dot_product_attention(q, q, q, is_causal=True)
            return torch.device("cuda")
        except RuntimeError as error:
            print(f"Training on the CPU; on {torch.cuda.get_device_name()} our attention says: {error}\n")
    return torch.device("cpu")


def plot(curves: list[Curve], unigram: float, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print(f"no {path}: matplotlib is not installed. Run: pip install flash_attn_ext[demo]")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for curve, color, width in zip(curves, ("tab:blue", "tab:orange"), (4.0, 1.5), strict=True):
        steps, losses = zip(*curve.validation, strict=True)
        axes.plot(curve.train_losses, color=color, alpha=0.3, linewidth=width / 2)
        axes.plot(steps, losses, color=color, linewidth=width, label=f"{curve.name}: validation {losses[-1]:.4f}")
    axes.axhline(unigram, color="gray", linestyle=":", label=f"unigram entropy {unigram:.3f}")
    axes.set(xlabel="step", ylabel="loss, nats a byte", title="Byte-level GPT on the Python standard library, one seed")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"Curves: {path}")


def verdict(ours: Curve, pytorchs: Curve, unigram: float) -> list[str]:
    """What is wrong with the result; empty when all is well."""
    problems = []
    gap = abs(ours.final - pytorchs.final) / pytorchs.final
    if not gap <= MAX_RELATIVE_GAP:
        problems.append(f"the final validation losses differ by {gap:.2%}, allowed are {MAX_RELATIVE_GAP:.0%}")
    for curve in (ours, pytorchs):
        if not curve.final < MAX_SHARE_OF_UNIGRAM * unigram:
            problems.append(
                f"{curve.name}: validation loss {curve.final:.3f} is not clearly below the unigram entropy "
                f"{unigram:.3f} (wanted: less than {MAX_SHARE_OF_UNIGRAM:.0%} of it)"
            )
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Training.steps, help="optimiser steps of each run (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the plot and the numbers (%(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: allowed is a whole number of at least 1")

    device = choose_device()
    corpus = load_corpus()
    unigram = corpus.unigram_entropy()
    training = Training(steps=arguments.steps)
    print(
        f"Text: {corpus.num_files} files of the Python {sys.version.split()[0]} library, "
        f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out. Device: {device}."
    )
    start = time.monotonic()
    ours = train("flash_attn_ext", scaled_dot_product_attention, corpus, training, device)
    pytorchs = train("torch", F.scaled_dot_product_attention, corpus, training, device)
    minutes = (time.monotonic() - start) / 60

    print(f"\nA sample from the model trained with {ours.name}:\n{'-' * 72}\n{ours.sample}\n{'-' * 72}\n")
    for curve in (ours, pytorchs):
        bits = nats_to_bits(curve.final)
        speed = f"{curve.tokens_per_second:,.0f} tokens/s"
        print(f"{curve.name:15} validation loss {curve.final:.4f} nats ({bits:.3f} bits) a byte, {speed}")
    print(f"{'unigram entropy':15} {unigram:.4f} nats. Both runs took {minutes:.1f} minutes.")

    arguments.out.mkdir(parents=True, exist_ok=True)
    numbers = {
        "device": str(device),
        "torch": torch.__version__,
        "training": asdict(training),
        "unigram_entropy": unigram,
        "curves": [asdict(ours), asdict(pytorchs)],
    }
    (arguments.out / "loss.json").write_text(json.dumps(numbers, indent=1) + "\n")
    plot([ours, pytorchs], unigram, arguments.out / "loss.png")

    problems = verdict(ours, pytorchs, unigram)
    if problems:
        sys.exit("\nFAILED: " + "\nFAILED: ".join(problems))


if __name__ == "__main__":
    main()
