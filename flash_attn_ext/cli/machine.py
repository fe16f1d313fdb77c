"""What this machine is, which versions run on it, and which device can compute."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import flash_attn_ext
from flash_attn_ext import _C, _load
from flash_attn_ext._explanation import Explanation
from flash_attn_ext.functional import explain


def versions() -> dict[str, str | None]:
    return {
        "flash_attn_ext": flash_attn_ext.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


COMMIT_VARIABLE = "FLASH_ATTN_EXT_COMMIT"  # names the commit where git cannot, as in a copy without its history


def commit(package: Path = Path(flash_attn_ext.__file__).parent) -> str | None:
    """The commit of the checkout that this package is in, with "-dirty" if tracked files were changed. None if neither
    git nor the variable tells it."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    # The package may lie in an environment inside another repository, which does not track it.
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    return tracked and _git(package, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# The CPU's flags that decide which matrix products and vector loops run.
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16")


def machine() -> dict[str, str | int | list[str] | None]:
    cpu = _cpu_facts()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_family": _number(cpu.get("cpu family")),
        "cpu_model": _number(cpu.get("model")),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in cpu.get("flags", "").split()],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def installation() -> dict[str, str | list[str]]:
    """Which files run, what else there is, and which versions of torch have an extension here, for this Python."""
    return {
        "library": str(_load.PACKAGE / _load.LIBRARY),
        "extension": str(_load.glue_for(torch.__version__)),
        "torch_versions": _load.torch_versions(),
        "other_copies": _load.other_copies(),
    }


def explain_on(device: str, dtype: torch.dtype = torch.bfloat16) -> Explanation:
    """The explanation of a small call on that device."""
    q = torch.zeros(1, 1, 1, 64, dtype=dtype, device=device)
    return explain(q, q, q)


def gpu_verdict() -> str:
    """One sentence: what the GPU of this machine can run of this library."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return f"no GPU that torch (which is {built}) can use"
    major, minor = torch.cuda.get_device_capability()
    gpu = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    explanation = explain_on("cuda")
    if explanation.backend:
        code = _C.gpu_code((major, minor), _C.build_info()["cuda_archs"] or "")
        return f"{gpu}: runs on backend {explanation.backend}, from {code or 'no code of this library'}"
    why = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in explanation.reasons.items())
    not_built = _C.build_info().get("cuda_not_built")
    return f"{gpu}: no backend can run on it ({why})" + (
        f". CUDA sources were not built: {not_built}" if not_built else ""
    )


def choose_device(wanted: str | None) -> tuple[str, str | None]:
    """(device, None), or (device, why it cannot run). The default is the GPU if a backend runs on it."""
    if wanted == "cpu":
        return "cpu", None
    runs = torch.cuda.is_available() and explain_on("cuda").backend is not None
    if wanted == "cuda":
        return "cuda", None if runs else f"--device cuda: {gpu_verdict()}"
    return ("cuda" if runs else "cpu"), None


def _cpu_facts(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Facts about the first core from Linux. The names are those of x86, and other architectures lack some."""
    try:
        first = path.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _number(text: str | None) -> int | None:
    return int(text) if text else None
