"""Which tiles of scores the backward pass of large head dims stores on Hopper, and reads, compiled for the host."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"


def test_what_is_read_was_stored(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "score_tiles"
    sources = ["-I", str(CSRC), str(HERE / "score_tiles.cpp")]
    subprocess.run([compiler, "-std=c++20", "-O1", "-fsanitize=undefined", *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
