"""The recipe of docs/transformers.md runs as it stands, and the model learns."""

import re
from pathlib import Path

import pytest

from support.forks import run_forked

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
    process = run_forked(recipe + check, folder=tmp_path, environment={"HF_HUB_OFFLINE": "1"})
    assert process.returncode == 0, process.stderr
