"""How many compilers run at a time: as many as the cores *and* the memory allow."""

import os
from pathlib import Path

from build_support.toolchain import BuildError

GIB = 1 << 30
CXX_JOB_BYTES = 3 * GIB // 2  # g++ on a file that includes torch
NVCC_JOB_BYTES = 5 * GIB // 2  # nvcc on a kernel, all architectures one after the other


def num_jobs(cores: int, memory_bytes: int, bytes_per_job: int, max_jobs: str | None = None) -> int:
    """Jobs for ninja. `max_jobs` is the environment's MAX_JOBS and wins over what was counted."""
    if max_jobs and not (max_jobs.isdigit() and int(max_jobs)):
        raise BuildError(f"MAX_JOBS={max_jobs!r}: allowed is a whole number of at least 1")
    return int(max_jobs) if max_jobs else max(1, min(cores, memory_bytes // bytes_per_job))


def available_cores() -> int:
    """Cores this process may use: its affinity, and the container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return min(cores, max(1, int(quota) // int(period))) if quota.isdigit() else cores


def available_memory() -> int:
    """Bytes that can be taken without swapping: the machine's, and what the container's limit leaves."""
    meminfo = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    available = int(meminfo.get("MemAvailable", "4194304 kB").split()[0]) * 1024
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    used = int(_read("/sys/fs/cgroup/memory.current") or 0) - int(stat.get("inactive_file", 0))
    return min(available, max(0, int(limit) - used)) if limit.isdigit() else available


def _read(path: str) -> str:
    return Path(path).read_text() if os.access(path, os.R_OK) else ""
