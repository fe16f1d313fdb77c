"""How a line of tiles of keys is divided among blocks, and which parts an item has, compiled for the host."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"


def test_tiles_and_parts_belong_to_blocks(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "key_line"
    sources = ["-I", str(CSRC), str(HERE / "key_line.cpp")]
    subprocess.run([compiler, "-std=c++20", "-O1", "-fsanitize=undefined", *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
