"""What the build says when something is missing or does not fit: what was found, and the exact command."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from build_support import aarch64, plan, toolchain
from build_support.toolchain import BuildError, Nvcc, TorchInfo

TORCH = TorchInfo("2.11.0+cu130", "13.0", Path("/venv/torch"))
CPU_TORCH = TorchInfo("2.11.0+cpu", None, Path("/venv/torch"))
BANNER = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.36424714_0
"""


def nvcc(version: str) -> Nvcc:
    return Nvcc(Path("/usr/local/cuda/bin/nvcc"), version, f"release {version}, V{version}.88")


def make_tool(folder: Path, name: str, says: str) -> Path:
    """An executable that prints `says`, whatever it is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / name
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    tool.chmod(0o755)
    return tool


def test_matching_nvcc_builds_the_cuda_sources():
    chosen, message = toolchain.decide_cuda(TORCH, nvcc("13.0"), None)
    assert chosen == nvcc("13.0")
    assert message == "CUDA build: nvcc 13.0 at /usr/local/cuda/bin/nvcc, torch 2.11.0+cu130"


def test_another_minor_version_is_a_warning():
    chosen, message = toolchain.decide_cuda(TORCH, nvcc("13.2"), None)
    assert chosen == nvcc("13.2")
    assert "nvcc 13.2" in message
    assert "warning: torch 2.11.0+cu130 was built with CUDA 13.0" in message


@pytest.mark.parametrize("wish", [None, "", "1"])
def test_another_major_version_is_an_error_that_says_what_to_run(wish):
    with pytest.raises(BuildError) as error:
        toolchain.decide_cuda(TORCH, nvcc("12.8"), wish)
    message = str(error.value)
    assert "nvcc 12.8 at /usr/local/cuda/bin/nvcc" in message
    assert "torch 2.11.0+cu130 was built with CUDA 13.0" in message
    assert "CUDA_HOME=/usr/local/cuda-13.0 pip install --no-build-isolation ." in message
    assert "FLASH_ATTN_EXT_CUDA=0 pip install --no-build-isolation ." in message


def test_a_mismatch_does_not_matter_to_a_cpu_only_build():
    assert toolchain.decide_cuda(TORCH, nvcc("12.8"), "0") == (None, "CPU-only build: FLASH_ATTN_EXT_CUDA=0")


@pytest.mark.parametrize(
    ("torch", "found", "reason"),
    [(TORCH, None, "no nvcc found"), (CPU_TORCH, nvcc("13.0"), "torch 2.11.0+cpu is built without CUDA")],
)
def test_without_cuda_the_build_is_cpu_only_and_says_so_in_one_line(torch, found, reason):
    chosen, message = toolchain.decide_cuda(torch, found, None)
    assert chosen is None
    assert message.startswith(f"CPU-only build: {reason}")
    assert "\n" not in message
    with pytest.raises(BuildError, match="FLASH_ATTN_EXT_CUDA=1 asks for a CUDA build, but " + re.escape(reason)):
        toolchain.decide_cuda(torch, found, "1")


def test_an_unknown_wish_is_an_error():
    with pytest.raises(BuildError, match="FLASH_ATTN_EXT_CUDA='yes': allowed are 0"):
        toolchain.decide_cuda(TORCH, None, "yes")


@pytest.fixture
def torch_of(tmp_path, monkeypatch):
    """Gives the interpreter another torch, by the text of its version.py; None for no torch at all."""

    def make(text: str | None) -> None:
        (tmp_path / "version.py").write_text(text or "")
        spec = None if text is None else SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: spec)

    return make


def test_versions_are_read_from_torchs_own_file(torch_of):
    torch_of("from typing import Optional\n__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n")
    assert toolchain.find_torch()[:2] == ("2.11.0+cu130", "13.0")
    torch_of("__version__ = '2.11.0+cpu'\ncuda: str | None = None\n")
    assert toolchain.find_torch()[:2] == ("2.11.0+cpu", None)
    torch_of("")
    with pytest.raises(BuildError, match="names no version"):
        toolchain.find_torch()


def test_versions_agree_with_the_torch_that_runs():
    import torch

    found = toolchain.find_torch()
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
    assert (found.root / "include/ATen/ATen.h").is_file()


def test_missing_torch_in_a_build_sandbox_names_the_one_command(torch_of, monkeypatch):
    torch_of(None)
    monkeypatch.setattr(toolchain, "_torch_outside_sandbox", lambda: True)
    with pytest.raises(BuildError, match="sandbox hides it") as error:
        toolchain.find_torch()
    assert str(error.value).endswith("Run instead:\n    pip install --no-build-isolation .")


def test_missing_torch_names_the_interpreter_and_both_commands(torch_of, monkeypatch):
    torch_of(None)
    monkeypatch.setattr(toolchain, "_torch_outside_sandbox", lambda: False)
    with pytest.raises(BuildError) as error:
        toolchain.find_torch()
    message = str(error.value)
    assert sys.executable in message
    assert "    pip install torch" in message
    assert message.endswith("    pip install --no-build-isolation .")


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.0a0+git123", "3.0.0"])
def test_torch_that_will_do(version, torch_of):
    torch_of(f"__version__ = '{version}'\n")
    assert toolchain.find_torch().version == version


@pytest.mark.parametrize("version", ["2.10.1+cu128", "2.9.0", "1.13.1"])
def test_an_old_torch_is_refused_before_pip_replaces_it(version, torch_of):
    torch_of(f"__version__ = '{version}'\n")
    with pytest.raises(BuildError) as error:
        toolchain.find_torch()
    assert f"found torch {version}; torch 2.11 or later" in str(error.value)
    assert "pip install 'torch>=2.11'\n    pip install --no-build-isolation ." in str(error.value)


def test_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=r"`g\+\+` is not on the PATH(?s:.*)apt-get install g\+\+"):
        toolchain.find_cxx({})
    with pytest.raises(BuildError, match="`clang-99` is not on the PATH"):
        toolchain.find_cxx({"CXX": "clang-99"})


@pytest.mark.parametrize(
    "banner",
    [
        "g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.",
        "g++-10 (GCC) 10.1.0",
        "clang version 9.0.1",
    ],
)
def test_compilers_that_will_do(banner, tmp_path):
    path = str(make_tool(tmp_path, "some-g++", banner))
    assert toolchain.find_cxx({"CXX": path}) == path


@pytest.mark.parametrize(
    "banner",
    ["g++ (Ubuntu 9.4.0-1ubuntu1~20.04.2) 9.4.0\nCopyright (C) 2019", "g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0)"],
)
def test_a_compiler_without_cpp20_is_refused(banner, tmp_path):
    path = str(make_tool(tmp_path, "old-g++", banner))
    with pytest.raises(BuildError, match=r"old-g\+\+ is GCC [89]; C\+\+20 needs GCC 10"):
        toolchain.find_cxx({"CXX": path})


def test_missing_python_headers_name_the_package(monkeypatch):
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: "/nowhere")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(BuildError, match=rf"Python\.h is not in /nowhere(?s:.*)apt-get install python{version}-dev"):
        toolchain.find_python_include()


def test_missing_ninja_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name, path=None: None)
    with pytest.raises(BuildError, match="pip install ninja"):
        toolchain.find_ninja()


def test_ninja_beside_python_comes_first(monkeypatch, tmp_path):
    ninja = make_tool(tmp_path / "venv", "ninja", "")
    make_tool(tmp_path / "path", "ninja", "")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(toolchain.sys, "executable", str(ninja.with_name("python")))
    assert toolchain.find_ninja() == str(ninja)


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("1.13.0", "[%f of %t, %W left] "),
        ("1.12.1", "[%f of %t, %W left] "),
        ("1.11.1.git.kitware.jobserver-1", "[%f of %t] "),
        ("1.8.2", "[%f of %t] "),
    ],
)
def test_the_build_says_how_long_it_takes_where_ninja_can_estimate_it(tmp_path, version, status):
    ninja = make_tool(tmp_path, "ninja", version)
    assert toolchain.ninja_status(str(ninja)) == status


def test_cuda_home_wins_over_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    binary = make_tool(tmp_path / "bin", "nvcc", BANNER)
    assert toolchain.find_nvcc({"CUDA_HOME": str(tmp_path)}) == Nvcc(binary, "13.0", "release 13.0, V13.0.88")
    assert toolchain.find_nvcc({"CUDA_HOME": str(tmp_path / "elsewhere")}) is None


def test_objects_of_another_machine_have_other_names(tmp_path, monkeypatch):
    """The release is part of their names, and folders of objects are copied between machines."""
    make_tool(tmp_path / "bin", "nvcc", BANNER)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "aarch64")
    assert toolchain.find_nvcc({"CUDA_HOME": str(tmp_path)}).release == "release 13.0, V13.0.88 for aarch64"


def test_tools_for_aarch64_that_are_missing_are_named(monkeypatch, capsys):
    for tool in ("CXX", "QEMU"):
        monkeypatch.setattr(aarch64, tool, None)
    monkeypatch.setattr(aarch64, "find_nvcc", lambda: None)
    with pytest.raises(SystemExit) as end:
        aarch64.require_tools()
    assert end.value.code == aarch64.TOOL_IS_MISSING
    said = capsys.readouterr().err
    assert "apt-get install g++-aarch64-linux-gnu qemu-user-static\nno nvcc in CUDA_HOME" in said


def test_ci_leaves_out_aarch64_only_without_its_tools():
    """Another failure of the check ends CI."""
    assert f"\n  {aarch64.TOOL_IS_MISSING}) echo" in (plan.ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", ["test-aarch64", "test-cross"])
def test_targets_for_aarch64_are_refused_without_their_tools(target):
    makefile = (plan.ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}: .*\n\t\$\(PY\) -m build_support\.aarch64\b", makefile, re.MULTILINE)


def test_a_banner_that_cannot_be_read_is_shown(tmp_path):
    make_tool(tmp_path / "bin", "nvcc", "Segmentation fault")
    with pytest.raises(BuildError, match=r"cannot read a release(?s:.*)Segmentation fault"):
        toolchain.find_nvcc({"CUDA_HOME": str(tmp_path)})
