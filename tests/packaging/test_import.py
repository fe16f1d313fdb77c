"""What `import flash_attn_ext` costs a program that has torch: time, and modules that it did not ask for."""

import os
import statistics
import subprocess
import sys

OPTIONAL = {
    "accelerate",
    "flash_attn",
    "matplotlib",
    "rich",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "transformers",
    "triton",
}
GOAL_MS = 60
REPETITIONS = 3

# CPU time, not that of the clock: it does not count what other processes of a busy machine do meanwhile.
MEASURE = """
import sys
import time
import torch
before = set(sys.modules)
start = time.process_time()
import flash_attn_ext
print((time.process_time() - start) * 1e3)
print(*sorted(set(sys.modules) - before))
"""


def measure() -> tuple[float, set[str]]:
    """Milliseconds, and what was imported. The first process leaves bytecode to the others, as an installation does."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", MEASURE]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    milliseconds, modules = process.stdout.splitlines()
    return float(milliseconds), set(modules.split())


def test_import_is_fast_and_brings_nothing_optional():
    _, modules = measure()
    assert "flash_attn_ext.functional" in modules
    assert modules & OPTIONAL == set()
    # Commands, and integrations of other packages, come with those who name them.
    late = ("cli", "integrations.flash_attn", "integrations.torch_backend", "integrations.transformers")
    assert [name for name in modules if name.startswith(tuple(f"flash_attn_ext.{part}" for part in late))] == []
    times = [measure()[0] for _ in range(REPETITIONS)]
    assert statistics.median(times) <= GOAL_MS, times
