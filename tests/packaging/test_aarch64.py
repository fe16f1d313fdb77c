"""The library's CPU part compiles for aarch64, and computes there as the definition does: with a cross compiler and
qemu's emulation of a process, which Debian has as g++-aarch64-linux-gnu and qemu-user-static."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from build_support import jobs, plan
from build_support.toolchain import TorchInfo

CXX = shutil.which("aarch64-linux-gnu-g++")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
ROOT = "/usr/aarch64-linux-gnu"  # of its libraries, where Debian has them
TESTS = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.skipif(CXX is None, reason="no aarch64-linux-gnu-g++"),
    pytest.mark.skipif(QEMU is None, reason="no qemu-aarch64"),
    pytest.mark.xdist_group("aarch64"),
]


def compile_and_run(program: Path, folder: Path, *linked: object) -> None:
    target = folder / program.stem
    include = ("-I", plan.ROOT / plan.INCLUDE_ROOT)
    subprocess.run([CXX, "-std=c++20", "-O1", *include, program, *linked, "-o", target], check=True)
    command = [QEMU, "-L", ROOT, "-E", f"LD_LIBRARY_PATH={folder}", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr


def test_conversions_of_16_bit_numbers(tmp_path):
    compile_and_run(TESTS / "mathematics" / "narrow_float.cpp", tmp_path)


def test_gemms_of_tiles(tmp_path):
    cpu = plan.ROOT / plan.INCLUDE_ROOT / "kernels/cpu"
    linked = (cpu / name for name in ("gemm/tile_gemm.cpp", "gemm/few_rows.cpp", "services.cpp"))
    compile_and_run(TESTS / "mathematics" / "microkernel.cpp", tmp_path, *linked)


def test_kernels_compute_as_the_definition_does(tmp_path):
    made = plan.Plan(TorchInfo("", None, Path()), str(CXX), Path(), None, "CPU-only build: aarch64", [])

    def compile_object(edge) -> str:
        target = str(tmp_path / edge.output.replace("/", "."))
        subprocess.run([CXX, *edge.flags, "-c", *edge.sources, "-o", target], cwd=plan.ROOT, check=True)
        return target

    with ThreadPoolExecutor(jobs.available_cores()) as pool:
        objects = list(pool.map(compile_object, plan.library_objects(made, plan.KERNELS_DIR)))
    library = tmp_path / plan.LIBRARY
    command = [CXX, "-shared", *objects, "-o", library, *plan.LIBRARY_LINK_FLAGS]
    subprocess.run(command, cwd=plan.ROOT, check=True)
    compile_and_run(Path(__file__).with_name("library_program.cpp"), tmp_path, library)
