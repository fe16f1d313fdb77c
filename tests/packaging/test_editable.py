"""An editable install is a folder on sys.path, where type checkers and editors find the package too.

setuptools' default is a finder that runs when Python starts: mypy and pyright run none, and see no package.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = """
[project]
name = "probe"
version = "1"
[tool.setuptools.packages.find]
include = ["probe*"]
"""
BUILD = """
import json, sys
sys.path.append(sys.argv[1])
from build_support import backend
print(backend.build_editable("dist", json.loads(sys.argv[2])))
"""


@pytest.mark.parametrize(("settings", "is_folder"), [("null", True), ('{"editable_mode": "strict"}', False)])
def test_what_an_editable_wheel_has(settings, is_folder, tmp_path):
    """Of a project with the layout of this one. Who asks for another mode gets it."""
    for folder in ("probe", "tests", "dist"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "probe" / "__init__.py").touch()
    command = [sys.executable, "-c", BUILD, ROOT, settings]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    with zipfile.ZipFile(tmp_path / "dist" / process.stdout.splitlines()[-1]) as wheel:
        (pth,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".pth"))
    assert (pth.strip() == str(tmp_path)) == is_folder
