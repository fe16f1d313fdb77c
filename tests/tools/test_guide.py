"""The examples of docs/tools.md run as they stand, one after the other."""

import re
from pathlib import Path

from support.forks import run_forked

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tools.md"
# Compiling takes half a minute: test_aot_inductor.py does it once, for more than the example has.
COMPILED = "## Export and AOTInductor"


def examples() -> str:
    """Those of all sections but one."""
    sections = re.split(r"^(?=## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert any(section.startswith(COMPILED) for section in sections)
    kept = "".join(section for section in sections if not section.startswith(COMPILED))
    return "\n".join(re.findall(r"^```python\n(.*?)^```", kept, re.DOTALL | re.MULTILINE))


def test_examples(device, tmp_path):
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    # A group of one process for the section about DTensor.
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    script = tmp_path / "examples.py"  # a file: functions of an example are looked up by their source
    script.write_text(examples(), encoding="utf-8")
    process = run_forked(script, environment=hidden | group)
    assert process.returncode == 0, process.stderr
    printed = process.stdout.splitlines()
    assert "flash_attn_ext.attention_backward" in printed[0]
    assert "flash_attn_ext forward, " in printed[1] and "flash_attn_ext backward, " in printed[1]
    assert printed[2] == "(Shard(dim=1),) torch.Size([2, 4, 256, 64])"
