"""Find torch, the C++ compiler, Python's headers, ninja and nvcc, and decide whether the CUDA sources are built.

Whatever is missing ends in a `BuildError` that says what was found and the exact command to run.
"""

import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

INSTALL_COMMAND = "pip install --no-build-isolation ."
MIN_TORCH = "2.11"  # pyproject.toml says the same to pip
MIN_GCC_MAJOR = 10  # the first whose -std=c++20 has designated initialisers, concepts and <bit>


class BuildError(Exception):
    """A build that cannot go on: the problem, and the commands to run, for the person at the terminal."""

    def __init__(self, problem: str, *commands: str, run: str = "Run:") -> None:
        super().__init__("\n    ".join([f"{problem}\n{run}", *commands]) if commands else problem)


class TorchInfo(NamedTuple):
    version: str  # "2.11.0+cu130"
    cuda: str | None  # CUDA version that torch was built with, None for a CPU-only torch
    root: Path

    @property
    def minor(self) -> str:
        """ "2.11": what its C++ interface depends on."""
        return ".".join(self.version.split(".")[:2])


class Nvcc(NamedTuple):
    path: Path
    version: str  # "13.0"
    release: str  # the full line that identifies the build, part of every kernel object's key

    @property
    def home(self) -> Path:
        return self.path.resolve().parent.parent

    @property
    def include_dirs(self) -> list[Path]:
        """For g++. A distribution's own toolkit is in /usr/include, which must not be named: it would come first."""
        return [] if self.home == Path("/usr") else [self.home / "include"]


def find_torch() -> TorchInfo:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        ours = "flash_attn_ext compiles against the torch that you have, and"
        if _torch_outside_sandbox():
            raise BuildError(f"{ours} pip's build sandbox hides it.", INSTALL_COMMAND, run="Run instead:")
        problem = f"{ours} {sys.executable} has none (or pip's build sandbox hides it)."
        raise BuildError(problem, "pip install torch setuptools wheel ninja", INSTALL_COMMAND)
    return read_torch(Path(next(iter(spec.submodule_search_locations))))


def read_torch(root: Path) -> TorchInfo:
    """root: the folder of the package."""
    if not (root / "version.py").is_file():
        raise BuildError(f"there is no torch in {root}: it has no version.py.")
    facts = runpy.run_path(str(root / "version.py"))
    version = facts.get("__version__")
    if version is None:
        problem = f"{root}/version.py names no version: this torch installation is broken."
        raise BuildError(problem, "pip install --force-reinstall torch")
    # An old torch is refused here, before pip would replace it with a newer one behind the back of the build.
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < tuple(map(int, MIN_TORCH.split("."))):
        problem = f"found torch {version}; torch {MIN_TORCH} or later is needed."
        raise BuildError(problem, f"pip install 'torch>={MIN_TORCH}'", INSTALL_COMMAND)
    return TorchInfo(version, facts.get("cuda"), root)


def _torch_outside_sandbox() -> bool:
    """Whether this interpreter finds torch once pip's build sandbox (which works through PYTHONPATH) is left out."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([sys.executable, "-I", "-c", probe], capture_output=True).returncode == 0


def find_cxx(environ: Mapping[str, str] = os.environ) -> str:
    """The C++ compiler's path: $CXX, or g++. Of those that are too old for C++20 it knows GCC."""
    name = environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        source = "CXX names it" if "CXX" in environ else "set CXX to use another"
        raise _missing_package(f"no C++ compiler: `{name}` is not on the PATH ({source}).", "g++", "gcc-c++")
    found = re.match(r"[^\n(]*\([^)\n]*\) (\d+)\.\d+", output_of(path, "--version"))  # g++ (Debian 12.2.0-14) 12.2.0
    if found and int(found.group(1)) < MIN_GCC_MAJOR:
        problem = f"{path} is GCC {found.group(1)}; C++20 needs GCC {MIN_GCC_MAJOR} or later."
        raise BuildError(problem, "sudo apt-get install g++-12", f"CXX=g++-12 {INSTALL_COMMAND}", run="For example:")
    return path


def find_python_include() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        problem = f"Python.h is not in {include}: the C headers of {sys.executable} are not installed."
        raise _missing_package(problem, "python{}.{}-dev".format(*sys.version_info), "python3-devel")
    return include


def _missing_package(problem: str, debian: str, fedora: str) -> BuildError:
    commands = f"sudo apt-get install {debian}  # Debian, Ubuntu", f"sudo dnf install {fedora}  # Fedora, RHEL"
    return BuildError(problem, *commands, run="Run one of:")


def find_ninja() -> str:
    path = shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")
    if path is None:
        problem = f"ninja is neither beside {sys.executable} nor on the PATH."
        raise BuildError(problem, "pip install ninja", INSTALL_COMMAND)
    return path


def ninja_status(ninja: str) -> str:
    """What ninja writes before each step: how many are done and, where it can estimate it, how long the rest takes."""
    version = re.match(r"(\d+)\.(\d+)", output_of(ninja, "--version"))
    can_estimate = version is not None and (int(version.group(1)), int(version.group(2))) >= (1, 12)
    return "[%f of %t, %W left] " if can_estimate else "[%f of %t] "


def find_nvcc(environ: Mapping[str, str] = os.environ) -> Nvcc | None:
    """nvcc of $CUDA_HOME or $CUDA_PATH, else on the PATH, else in /usr/local/cuda; None when there is none."""
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    candidates = [f"{home}/bin/nvcc" for home in homes] or [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    path = next((path for path in candidates if path and os.access(path, os.X_OK)), None)
    if path is None:
        return None
    banner = output_of(path, "--version")
    release = re.search(r"release (\d+\.\d+), V[\d.]+", banner)
    if release is None:
        raise BuildError(f"cannot read a release from `{path} --version`, which printed:\n{banner}")
    # That of another machine has the same release, and its objects have host code of that machine.
    machine = "" if platform.machine() == "x86_64" else f" for {platform.machine()}"
    return Nvcc(Path(path), release.group(1), release.group(0) + machine)


def is_set(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a switch of the build is on."""
    if (value := environ.get(name, "")) not in ("", "0", "1"):
        raise BuildError(f"{name}={value!r}: allowed are 0, 1 or unset")
    return value == "1"


def decide_cuda(torch: TorchInfo, nvcc: Nvcc | None, wish: str | None) -> tuple[Nvcc | None, str]:
    """The nvcc to build with, or None for a CPU-only build, and what to tell the user. `wish`: FLASH_ATTN_EXT_CUDA."""
    if wish not in (None, "", "0", "1"):
        raise BuildError(f"FLASH_ATTN_EXT_CUDA={wish!r}: allowed are 0 (CPU only), 1 (require CUDA) or unset")
    cpu_only = f"FLASH_ATTN_EXT_CUDA=0 {INSTALL_COMMAND}"
    if wish == "0":
        reason, remedy = "FLASH_ATTN_EXT_CUDA=0", ""
    elif torch.cuda is None:
        reason = f"torch {torch.version} is built without CUDA"
        remedy = f"Install a torch built with CUDA, or run: {cpu_only}"
    elif nvcc is None:
        reason = "no nvcc found (looked in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)"
        remedy = f"Install the CUDA Toolkit {torch.cuda}, then: CUDA_HOME=/path/to/cuda {INSTALL_COMMAND}"
    else:
        found = f"nvcc {nvcc.version} at {nvcc.path}"
        built_with = f"torch {torch.version} was built with CUDA {torch.cuda}"
        major = torch.cuda.split(".")[0]
        if nvcc.version.split(".")[0] != major:
            other_home = (
                f"CUDA_HOME=/usr/local/cuda-{torch.cuda} {INSTALL_COMMAND}  # where a CUDA Toolkit {major}.x is"
            )
            problem = f"nvcc and torch disagree: found {found}, but {built_with}."
            raise BuildError(problem, other_home, f"{cpu_only}  # CPU only", run="Run one of:")
        warning = "" if nvcc.version == torch.cuda else f" (warning: {built_with}: same major, going on)"
        return nvcc, f"CUDA build: {found}, torch {torch.version}{warning}"
    if wish == "1":
        raise BuildError(f"FLASH_ATTN_EXT_CUDA=1 asks for a CUDA build, but {reason}.\n{remedy}")
    return None, f"CPU-only build: {reason}"


def shared_libstdcxx_flags(cxx: str) -> list[str]:
    """The shared C++ library also where only the static one is set up for linking: two copies crash in iostreams."""
    is_found = os.path.isabs(output_of(cxx, "-print-file-name=libstdc++.so").strip())
    return [] if is_found else ["-l:libstdc++.so.6"]


def output_of(*command: str | Path) -> str:
    """What it prints; nothing when it cannot be run or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
