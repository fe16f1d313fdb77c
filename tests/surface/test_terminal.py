"""What the commands write for a terminal, and that nothing of it is in a pipe."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from flash_attn_ext.cli import info, progress

FACTS = {
    "versions": {"flash_attn_ext": "1.2.3", "torch": "2.11.0", "torch_cuda": None},
    "machine": {"cpu": "a CPU", "cpu_capability": "AVX2", "cores": 2, "torch_threads": 1},
    "installation": {
        "library": "/package/kernels.so",
        "extension": "/package/_C.so",
        "torch_versions": ["2.11"],
        "other_copies": [],
    },
    "build": {
        "version": "1.2.3",
        "compiler": "GCC",
        "torch_version": "2.11.0",
        "cuda_version": None,
        "cuda_archs": None,
        "cuda_not_built": "no nvcc",
        "backends": ["cpu"],
    },
    "runs_on": {"cpu": "cpu"},
    "gpu": "no GPU",
    "portable": None,
    "self_test": {"passed": False, "cases": 3, "seconds": 0.1, "failures": ["full, [float32]: out off"]},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _a_terminal_of_colours(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def plain(text: str) -> list[str]:
    return [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]


def shown(monkeypatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stdout", stream)
    info._show(FACTS)
    return stream.getvalue()


def test_info_is_in_colour_on_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    text = shown(monkeypatch, Terminal())
    assert re.search(r"\x1b\[1;31m.*FAILED", text)
    assert plain(text) == plain(shown(monkeypatch, io.StringIO()))


def test_info_is_plain_in_a_pipe(monkeypatch):
    text = shown(monkeypatch, io.StringIO())
    assert "\x1b" not in text
    assert "CUDA sources  not built: no nvcc\n" in text


def test_info_is_plain_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert shown(monkeypatch, Terminal()) == shown(monkeypatch, io.StringIO())


def run_steps(monkeypatch, stream: io.StringIO) -> str:
    now = [100.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    steps = progress.Progress("verify", 3)
    for name in ("first", "second"):
        with steps.step(name):
            now[0] += 40
    with pytest.raises(KeyError), steps.step("last, with a long name " + 200 * "x"):
        raise KeyError
    return stream.getvalue()


def test_progress_has_the_time_left(monkeypatch):
    lines = run_steps(monkeypatch, Terminal()).split(progress.ERASE)
    assert lines[:5] == ["", "verify 1/3: first", "", "verify 2/3, 1 min 20 s left: second", ""]
    assert lines[5].startswith("verify 3/3, 40 s left: last") and len(lines[5]) == 119
    assert lines[6:] == [""]


def test_progress_is_silent_in_a_pipe(monkeypatch):
    assert run_steps(monkeypatch, io.StringIO()) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (245, "4 min 05 s"), (5400, "1 h 30 min")], ids=str
)
def test_duration(seconds, text):
    assert progress.duration(seconds) == text


FEW_CASES = """
import sys
import torch
from flash_attn_ext.__main__ import main
from flash_attn_ext.cli import verify
verify.CASES = verify.CASES[:2]
verify.DTYPES = (torch.float32,)
sys.exit(main(["verify", "--device", "cpu"]))
"""


def test_verify_shows_progress_on_a_terminal_only():
    """stderr is a terminal and stdout a file, as in `verify > report`."""
    ours, theirs = pty.openpty()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", FEW_CASES], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True
    )
    report, _ = process.communicate()
    os.close(theirs)
    watched = os.read(ours, 10_000).decode()
    os.close(ours)
    assert process.returncode == 0
    assert "verify 2/2" in watched and watched.endswith(progress.ERASE)
    assert "2 of 2 keep the rule" in report and "\x1b" not in report and "verify 2/2" not in report
