"""C++ of kernels and plans that needs no GPU, in programs that check it."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"


DEVICE = CSRC.parent / "tests" / "mathematics" / "device"


def run_host_program(source: Path, folder: Path, *others: Path, options: tuple = ()) -> None:
    """Compiles `source`, with the `others` that it needs, into `folder`: the program has to end with 0 and without a
    word of the sanitizer. Skips without a compiler."""
    program = folder / source.stem
    _compile(*options, source, *others, "-o", program)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr


def compile_for_host_programs(sources: Iterable[Path], folder: Path) -> list[Path]:
    """Objects that several programs need, among the `others` of run_host_program."""
    objects = [folder / f"{source.parent.name}.{source.stem}.o" for source in sources]
    for source, target in zip(sources, objects, strict=True):
        _compile("-c", source, "-o", target)
    return objects


def _compile(*arguments: object) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    options = ["-std=c++20", "-O1", "-fsanitize=undefined"]
    # A device program's own headers are found before those that they stand for.
    subprocess.run([compiler, *options, *arguments, "-I", CSRC], check=True)


def run_device_program(source: Path, folder: Path) -> None:
    """The same for a program of device code (mathematics/device/device.h)."""
    run_host_program(source, folder, options=("-include", DEVICE / "device.h", "-I", DEVICE))
