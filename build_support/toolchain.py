"""Find torch, the C++ compiler, Python's headers, ninja and nvcc, and decide whether the CUDA sources are built.

Whatever is missing ends in a `BuildError` that says what was found and the exact command to run. Functions named
`find_*` look at the machine; the others are pure, so that the tests can feed them with made-up machines.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INSTALL_COMMAND = "pip install --no-build-isolation ."
MIN_TORCH = "2.11"  # pyproject.toml says the same to pip
MIN_GCC_MAJOR = 10  # the first whose -std=c++20 has designated initialisers, concepts and <bit>


class BuildError(Exception):
    """A build that cannot go on; the message is for the person at the terminal."""


@dataclass(frozen=True)
class TorchInfo:
    version: str  # "2.11.0+cu130"
    cuda: str | None  # CUDA version that torch was built with, None for a CPU-only torch
    root: Path

    @property
    def include_dirs(self) -> list[Path]:
        return [self.root / "include", self.root / "include/torch/csrc/api/include"]

    @property
    def lib_dir(self) -> Path:
        return self.root / "lib"


@dataclass(frozen=True)
class Nvcc:
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


@dataclass(frozen=True)
class CudaDecision:
    """Whether the CUDA sources are built, and the line that tells the user."""

    build: bool
    message: str
    warning: str | None = None


def parse_torch_version_file(text: str) -> tuple[str, str | None]:
    """(version, CUDA version or None) from the text of torch/version.py."""
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if version is None:
        raise BuildError(
            "torch/version.py names no version: this torch installation is broken. Run: "
            "pip install --force-reinstall torch"
        )
    cuda = re.search(r"^cuda\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return version.group(1), cuda.group(1) if cuda else None


def find_torch() -> TorchInfo:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(missing_torch_message(sys.executable, outside_sandbox=_torch_outside_sandbox()))
    root = Path(next(iter(spec.submodule_search_locations)))
    version, cuda = parse_torch_version_file((root / "version.py").read_text())
    check_torch_version(version)
    return TorchInfo(version, cuda, root)


def check_torch_version(version: str) -> None:
    """Refuse an old torch here, before pip would replace it with a newer one behind the back of the build."""
    numbers = [tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, MIN_TORCH)]
    if numbers[0] < numbers[1]:
        raise BuildError(
            f"found torch {version}; torch {MIN_TORCH} or later is needed.\n"
            f"Run:\n    pip install 'torch>={MIN_TORCH}'\n    {INSTALL_COMMAND}"
        )


def _torch_outside_sandbox() -> bool:
    """Whether this interpreter finds torch once pip's build sandbox (which works through PYTHONPATH) is left out."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([sys.executable, "-I", "-c", probe], capture_output=True).returncode == 0


def missing_torch_message(python: str, outside_sandbox: bool) -> str:
    if outside_sandbox:
        return (
            "flash_attn_ext compiles against the torch that you have, and pip's build sandbox hides it.\n"
            f"Run instead:\n    {INSTALL_COMMAND}"
        )
    return (
        f"flash_attn_ext compiles against the torch that you have, and {python} has none (or pip's build sandbox hides "
        f"it).\nRun:\n    pip install torch setuptools wheel ninja\n    {INSTALL_COMMAND}"
    )


def find_cxx(environ: Mapping[str, str] = os.environ) -> str:
    """The C++ compiler's path: $CXX, or g++."""
    name = environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        source = "CXX names it" if "CXX" in environ else "set CXX to use another"
        raise BuildError(
            f"no C++ compiler: `{name}` is not on the PATH ({source}).\n"
            "Run (Debian, Ubuntu):\n    sudo apt-get install g++\nor (Fedora, RHEL):\n    sudo dnf install gcc-c++"
        )
    banner = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    check_cxx_version(path, banner)
    return path


def check_cxx_version(path: str, banner: str) -> None:
    """Refuse a GCC that is too old for C++20; other compilers are left to speak for themselves."""
    found = re.match(r"[^\n(]*\([^)\n]*\) (\d+)\.\d+", banner)  # g++ (Debian 12.2.0-14) 12.2.0
    if found and int(found.group(1)) < MIN_GCC_MAJOR:
        raise BuildError(
            f"{path} is GCC {found.group(1)}; C++20 needs GCC {MIN_GCC_MAJOR} or later.\n"
            f"Run, for example:\n    sudo apt-get install g++-12\n    CXX=g++-12 {INSTALL_COMMAND}"
        )


def find_python_include() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise BuildError(
            f"Python.h is not in {include}: the C headers of {sys.executable} are not installed.\n"
            f"Run (Debian, Ubuntu):\n    sudo apt-get install {package}\nor (Fedora, RHEL):\n    "
            "sudo dnf install python3-devel"
        )
    return include


def find_ninja() -> str:
    beside_python = Path(sys.executable).parent / "ninja"
    path = str(beside_python) if beside_python.is_file() else shutil.which("ninja")
    if path is None:
        raise BuildError(
            f"ninja is neither beside {sys.executable} nor on the PATH.\n"
            f"Run:\n    pip install ninja\n    {INSTALL_COMMAND}"
        )
    return path


def find_nvcc(environ: Mapping[str, str] = os.environ) -> Nvcc | None:
    """nvcc of $CUDA_HOME or $CUDA_PATH, else on the PATH, else in /usr/local/cuda; None when there is none."""
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    candidates = [f"{home}/bin/nvcc" for home in homes] or [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            banner = subprocess.run([candidate, "--version"], capture_output=True, text=True).stdout
            return Nvcc(Path(candidate), *parse_nvcc_banner(banner))
    return None


def parse_nvcc_banner(banner: str) -> tuple[str, str]:
    """("13.0", the identifying line) from what `nvcc --version` prints."""
    release = re.search(r"release (\d+\.\d+), (V[\d.]+)", banner)
    if release is None:
        raise BuildError(f"cannot read a release from `nvcc --version`, which printed:\n{banner}")
    return release.group(1), release.group(0)


def decide_cuda(torch: TorchInfo, nvcc: Nvcc | None, wish: str | None) -> CudaDecision:
    """Whether to build the CUDA sources. `wish` is FLASH_ATTN_EXT_CUDA: "0" never, "1" must, unset when possible."""
    if wish not in (None, "", "0", "1"):
        raise BuildError(f"FLASH_ATTN_EXT_CUDA={wish!r}: allowed are 0 (CPU only), 1 (require CUDA) or unset")
    if wish == "0":
        return CudaDecision(False, "CPU-only build: FLASH_ATTN_EXT_CUDA=0")
    if torch.cuda is None:
        return _without_cuda(
            f"torch {torch.version} is built without CUDA",
            f"Install a torch built with CUDA, or run: FLASH_ATTN_EXT_CUDA=0 {INSTALL_COMMAND}",
            wish,
        )
    if nvcc is None:
        return _without_cuda(
            "no nvcc found (looked in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)",
            f"Install the CUDA Toolkit {torch.cuda}, then: CUDA_HOME=/path/to/cuda {INSTALL_COMMAND}",
            wish,
        )
    if nvcc.version.split(".")[0] != torch.cuda.split(".")[0]:
        raise BuildError(cuda_mismatch_message(torch, nvcc))
    warning = None
    if nvcc.version != torch.cuda:
        warning = (
            f"nvcc is {nvcc.version} and torch {torch.version} was built with CUDA {torch.cuda}: same major, going on"
        )
    return CudaDecision(True, f"CUDA build: nvcc {nvcc.version} at {nvcc.path}, torch {torch.version}", warning)


def _without_cuda(reason: str, remedy: str, wish: str | None) -> CudaDecision:
    if wish == "1":
        raise BuildError(f"FLASH_ATTN_EXT_CUDA=1 asks for a CUDA build, but {reason}.\n{remedy}")
    return CudaDecision(False, f"CPU-only build: {reason}")


def cuda_mismatch_message(torch: TorchInfo, nvcc: Nvcc) -> str:
    major = torch.cuda.split(".")[0] if torch.cuda else ""
    return (
        f"nvcc and torch disagree: found nvcc {nvcc.version} at {nvcc.path}, but torch {torch.version} was built with "
        f"CUDA {torch.cuda}.\nRun one of:\n"
        f"    CUDA_HOME=/usr/local/cuda-{torch.cuda} {INSTALL_COMMAND}  # where a CUDA Toolkit {major}.x is\n"
        f"    FLASH_ATTN_EXT_CUDA=0 {INSTALL_COMMAND}  # CPU only"
    )


def shared_libstdcxx_flags(cxx: str) -> list[str]:
    """What makes g++ link the shared C++ library where only the static one is set up for linking.

    A second, static copy beside torch's would have facets of its own, and printing a number in an error would crash.
    """
    found = subprocess.run([cxx, "-print-file-name=libstdc++.so"], capture_output=True, text=True, check=True).stdout
    return [] if os.path.isabs(found.strip()) else ["-l:libstdc++.so.6"]
