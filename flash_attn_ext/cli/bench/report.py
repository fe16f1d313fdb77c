"""The JSON file of a run. It is written after every row, so that a run that ends early loses nothing measured."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from flash_attn_ext.cli.machine import commit, machine, versions


class Report:
    def __init__(self, path: Path, device: str, command: str, method: str) -> None:
        """`command`: a command that measures the same rows on any machine. `method`: how times are taken."""
        self.path = path
        self.rows: list[dict] = []
        self.contents: dict[str, Any] = {
            "command": command,
            "commit": commit(),
            "method": method,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "rows": self.rows,
        }
        if device == "cuda":
            self.contents["machine"] |= _gpu_facts()
            self.contents["versions"]["cudnn"] = torch.backends.cudnn.version()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self._write()

    def _write(self) -> None:
        fresh = self.path.with_suffix(".json.new")
        fresh.write_text(json.dumps(self.contents, indent=1) + "\n")
        fresh.replace(self.path)


def _gpu_facts() -> dict[str, str]:
    """Facts from the driver, if its tool is installed."""
    names = ("driver_version", "power.limit", "clocks.max.sm")
    if shutil.which("nvidia-smi") is None:
        return {}
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid  # the tool may number GPUs differently
    query = [f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id=GPU-{gpu}"]
    try:
        answer = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, (value.strip() for value in answer.split(",")), strict=False))
