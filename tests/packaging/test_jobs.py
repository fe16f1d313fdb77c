"""The number of parallel compilers follows cores and memory."""

import pytest

from build_support import jobs
from build_support.jobs import GIB, num_jobs
from build_support.toolchain import BuildError


@pytest.mark.parametrize(
    ("cores", "memory", "per_job", "expected"),
    [
        (16, 128 * GIB, 2 * GIB, 16),  # cores bound it
        (16, 9 * GIB, 2 * GIB, 4),  # memory bounds it
        (2, 24 * GIB, jobs.NVCC_JOB_BYTES, 2),
        (8, 8 * GIB, jobs.NVCC_JOB_BYTES, 3),
        (8, 8 * GIB, jobs.CXX_JOB_BYTES, 5),
        (4, GIB // 2, 2 * GIB, 1),  # never none
    ],
)
def test_num_jobs(cores, memory, per_job, expected):
    assert num_jobs(cores, memory, per_job) == expected


def test_max_jobs_wins():
    assert num_jobs(2, GIB, 2 * GIB, max_jobs="7") == 7


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_max_jobs_is_checked(text):
    with pytest.raises(BuildError, match="MAX_JOBS"):
        num_jobs(2, GIB, GIB, max_jobs=text)


def machine(monkeypatch, **files: str) -> None:
    paths = {
        "meminfo": "/proc/meminfo",
        "memory_max": "/sys/fs/cgroup/memory.max",
        "memory_stat": "/sys/fs/cgroup/memory.stat",
        "memory_current": "/sys/fs/cgroup/memory.current",
        "cpu_max": "/sys/fs/cgroup/cpu.max",
    }
    contents = {paths[name]: text for name, text in files.items()}
    monkeypatch.setattr(jobs, "_read", lambda path: contents.get(path, ""))


MEMINFO = "MemTotal:       25165824 kB\nMemAvailable:   20971520 kB\n"


def test_memory_of_a_bare_machine(monkeypatch):
    machine(monkeypatch, meminfo=MEMINFO)
    assert jobs.available_memory() == 20 * GIB


def test_memory_of_a_limited_container(monkeypatch):
    current, cache = 3 * GIB, 2 * GIB
    machine(
        monkeypatch,
        meminfo=MEMINFO,
        memory_max=f"{8 * GIB}\n",
        memory_current=f"{current}\n",
        memory_stat=f"anon 1\ninactive_file {cache}\n",
    )
    assert jobs.available_memory() == 7 * GIB


def test_memory_of_an_unlimited_container(monkeypatch):
    machine(monkeypatch, meminfo=MEMINFO, memory_max="max\n", memory_current="5\n")
    assert jobs.available_memory() == 20 * GIB


def test_cores_follow_the_containers_quota(monkeypatch):
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    machine(monkeypatch, cpu_max="250000 100000\n")
    assert jobs.available_cores() == 2
    machine(monkeypatch, cpu_max="max 100000\n")
    assert jobs.available_cores() == 16
