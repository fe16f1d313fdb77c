"""C++ of kernels and plans that needs no GPU, in programs that check it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"


DEVICE = CSRC.parent / "tests" / "mathematics" / "device"


def run_host_program(source: Path, folder: Path, *others: Path, options: tuple = ()) -> None:
    """Compiles `source`, with the `others` that it needs, into `folder`: the program has to end with 0 and without a
    word of the sanitizer. Skips without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = folder / source.stem
    options = ["-std=c++20", "-O1", "-fsanitize=undefined", *options, "-I", CSRC]
    subprocess.run([compiler, *options, source, *others, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr


def run_device_program(source: Path, folder: Path) -> None:
    """The same for a program of device code (mathematics/device/device.h)."""
    run_host_program(source, folder, options=("-include", DEVICE / "device.h", "-I", DEVICE))
