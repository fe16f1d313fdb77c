"""How many compilers run at a time: as many as the cores *and* the memory allow."""

import os
from pathlib import Path

from build_support.toolchain import BuildError

GIB = 1 << 30
CXX_JOB_BYTES = 3 * GIB // 2  # g++ on a file that includes torch
NVCC_JOB_BYTES = 5 * GIB // 2  # nvcc on a kernel, all architectures one after the other


def num_jobs(cores: int, memory_bytes: int, bytes_per_job: int, max_jobs: str | None = None) -> int:
    """Jobs for ninja. `max_jobs` is the environment's MAX_JOBS and wins over what was counted."""
    if max_jobs:
        if not max_jobs.isdigit() or int(max_jobs) == 0:
            raise BuildError(f"MAX_JOBS={max_jobs!r}: allowed is a whole number of at least 1")
        return int(max_jobs)
    return max(1, min(cores, memory_bytes // bytes_per_job))


def available_cores() -> int:
    """Cores this process may use: its affinity, and the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory() -> int:
    """Bytes that can be taken without swapping: the machine's, and what the container's limit leaves."""
    meminfo = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    available = int(meminfo.get("MemAvailable", "4194304 kB").split()[0]) * 1024
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
        reclaimable = int(stat.get("inactive_file", 0))
        used = int(_read("/sys/fs/cgroup/memory.current").strip() or 0) - reclaimable
        available = min(available, max(0, int(limit) - used))
    return available


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
