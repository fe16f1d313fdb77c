"""The bits that GPU kernels hide elements of a score tile by, compiled for the host, against brute force."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def test_bits_are_the_visible_elements(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "visible_columns"
    sources = ["-I", str(HERE.parents[1] / "csrc"), str(HERE / "visible_columns.cpp")]
    subprocess.run([compiler, "-std=c++20", "-O1", "-fsanitize=undefined", *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
