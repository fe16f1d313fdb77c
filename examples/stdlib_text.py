"""Real text that every Python brings along: the standard library's own sources and documentation strings."""

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Not the library itself: installed packages, and tests with tables of numbers and other languages' characters.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_EVERY = 10  # every tenth file is held out whole, so that validation text was never seen in training


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # int64 byte values
    validation: Tensor
    num_files: int

    def unigram_entropy(self) -> float:
        """Validation loss, in nats per byte, of a model that knows how frequent each byte is and nothing else."""
        counts = torch.bincount(self.train, minlength=256).double() + 1  # a byte never seen costs much, not infinitely
        held_out = torch.bincount(self.validation, minlength=256).double()
        return float(-(held_out / held_out.sum() * (counts / counts.sum()).log()).sum())


def load_corpus(root: Path | None = None) -> Corpus:
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    if len(files) < 2 * VALIDATION_EVERY:
        raise SystemExit(
            f"found {len(files)} Python sources under {root}: this Python comes without its library's sources"
        )
    validation = b"".join(path.read_bytes() for path in files[::VALIDATION_EVERY])
    train = b"".join(path.read_bytes() for i, path in enumerate(files) if i % VALIDATION_EVERY)
    return Corpus(_to_tensor(train), _to_tensor(validation), len(files))


def _to_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def random_windows(text: Tensor, num_windows: int, length: int, generator: torch.Generator) -> Tensor:
    """(num_windows, length) byte values from random places."""
    starts = torch.randint(len(text) - length, (num_windows, 1), generator=generator)
    return text[starts + torch.arange(length)]


def nats_to_bits(nats: float) -> float:
    return nats / math.log(2)
