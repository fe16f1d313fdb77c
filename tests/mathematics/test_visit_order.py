"""The order in which tiles of keys add to dQ on Hopper, compiled for the host: complete, and free of deadlock."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
PLAN_FILES = ("sm90_backward.cpp", "sm90_backward_storing.cpp", "sm90_variant.cpp", "sm80_backward.cpp")
PLANS = [CSRC / "kernels" / "plan" / name for name in PLAN_FILES]


def test_nobody_waits_for_ever(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "visit_order"
    sources = ["-I", str(CSRC), str(HERE / "visit_order.cpp"), *map(str, PLANS)]
    subprocess.run([compiler, "-std=c++20", "-O1", "-fsanitize=undefined", *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
