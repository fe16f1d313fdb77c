"""The recipe of docs/transformers.md runs as it stands, and the model learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"


def test_fine_tuning_with_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install accelerate")
    section = PAGE.read_text(encoding="utf-8").partition("## Fine-tune a model")[2]
    recipe = re.search(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE).group(1)
    check = """
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert losses[-1] < 0.3 * losses[0], losses
assert model.config._attn_implementation == "fused_ext"
"""
    environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.run(
        [sys.executable, "-c", recipe + check], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
