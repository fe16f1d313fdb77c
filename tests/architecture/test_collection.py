"""Which tests are collected: without a GPU none of a GPU's, unless the command line asks for them."""

import subprocess
import sys
from pathlib import Path

from support.params import CUDA_TESTS, collects_gpu, needs_gpu

TESTS = Path(__file__).resolve().parents[1]


def test_cases_of_a_gpu_are_collected_where_there_is_one(request):
    assert collects_gpu(request.config) or not any(map(needs_gpu, request.session.items))


def test_cases_of_a_gpu_can_be_collected_without_one():
    """Nothing in a test needs a GPU to be collected."""
    asked = [CUDA_TESTS, TESTS / "features" / "test_causal.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--collect-gpu"]
    done = subprocess.run([*command, *asked], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert {Path(name).name for name in found} >= {path.name for path in CUDA_TESTS.glob("test_*.py")}
    for backend in ("cpu", "sm80", "sm90"):
        assert f"[{backend}" in done.stdout
