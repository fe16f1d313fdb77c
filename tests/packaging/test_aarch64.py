"""The library and the extension compile for aarch64, and compute there as the definition does.

A cross compiler and qemu's emulation of a process do it on any machine, which Debian has as g++-aarch64-linux-gnu and
qemu-user-static. What the extension needs besides, PyTorch and Python for aarch64, `make test-aarch64` puts into
build/aarch64. Nothing is downloaded here.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from build_support import aarch64, jobs, plan, toolchain
from build_support.aarch64 import CXX, QEMU
from build_support.archs import parse_archs
from build_support.graph import Edge
from build_support.toolchain import TorchInfo
from support.cross_compiled import KERNELS

SYSTEM = "/usr/aarch64-linux-gnu"  # the cross compiler's libraries, where Debian has them
TESTS = Path(__file__).resolve().parents[1]
CUDA_RUNTIME = aarch64.PACKAGES / "nvidia" / "cu13" / "lib"
GLUE = "_C.torch-2.11.cpython-311-aarch64-linux-gnu.so"
PTX_ONLY = "-gencode=arch=compute_90a,code=compute_90a"
EXPORTS = {"flash_attn_ext_kernels", "flash_attn_ext_kernels_facts"}

pytestmark = [
    pytest.mark.skipif(CXX is None, reason="no aarch64-linux-gnu-g++"),
    pytest.mark.skipif(QEMU is None, reason="no qemu-aarch64"),
    pytest.mark.xdist_group("aarch64"),
]
NVCC = toolchain.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")
needs_torch = pytest.mark.skipif(
    not (aarch64.PYTHON.exists() and (aarch64.PACKAGES / "torch" / "version.py").is_file()),
    reason=f"no PyTorch and Python for aarch64 in {aarch64.FOLDER}: run `make test-aarch64`",
)


def run(*command: object, cwd: Path = plan.ROOT) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def compile_all(edges: Iterable[Edge], folder: Path) -> list[Path]:
    """As ninja does, but that nothing may be warned of."""

    def compile_object(edge: Edge) -> Path:
        target = folder / edge.output.replace("/", ".")
        if edge.sources[0].endswith(".cu"):
            headers = NVCC.home / "include"  # the same for every machine that nvcc compiles for
            found = ("-ccbin", CXX, "-I", headers, "-isystem", headers / "cccl")
            # The machine code of a GPU is the same beside every host, and takes ptxas a third of the time.
            flags = [*(flag for flag in edge.flags if not flag.startswith("-gencode")), PTX_ONLY]
            said = run(NVCC.path, *found, *flags, "-c", *edge.sources, "-o", target)
        else:
            said = run(CXX, *edge.flags, "-c", *edge.sources, "-o", target)
        assert "warning" not in said, said
        return target

    with ThreadPoolExecutor(jobs.available_cores()) as pool:
        return list(pool.map(compile_object, edges))


def compile_and_run(program: Path, folder: Path, *linked: object) -> None:
    target = folder / program.stem
    run(CXX, "-std=c++20", "-O1", "-I", plan.ROOT / plan.INCLUDE_ROOT, program, *linked, "-o", target)
    library_path = linked[0].parent if linked else folder
    said = run(QEMU, "-L", SYSTEM, "-E", f"LD_LIBRARY_PATH={library_path}", target)
    assert not said, said


def symbols(library: Path, option: str) -> set[str]:
    listing = run("aarch64-linux-gnu-nm", "-D", option, library)
    return {line.split()[-1].partition("@")[0] for line in listing.splitlines()}


CPU_ONLY = plan.Plan(TorchInfo("", None, Path()), str(CXX), Path(), None, "CPU-only build: aarch64", [])


@pytest.fixture(scope="module")
def cpu_objects(tmp_path_factory) -> dict[str, Path]:
    """By their source."""
    edges = plan.library_objects(CPU_ONLY, plan.KERNELS_DIR)
    return dict(
        zip((edge.sources[0] for edge in edges), compile_all(edges, tmp_path_factory.mktemp("cpu")), strict=True)
    )


@pytest.fixture(scope="module")
def library(cpu_objects, tmp_path_factory) -> Path:
    """Without CUDA."""
    path = tmp_path_factory.mktemp("library") / plan.LIBRARY
    run(CXX, "-shared", *cpu_objects.values(), "-o", path, *plan.LIBRARY_LINK_FLAGS)
    return path


def test_conversions_of_16_bit_numbers(tmp_path):
    compile_and_run(TESTS / "mathematics" / "narrow_float.cpp", tmp_path)


def test_gemms_of_tiles(tmp_path):
    cpu = plan.ROOT / plan.INCLUDE_ROOT / "kernels/cpu"
    linked = (cpu / name for name in ("gemm/tile_gemm.cpp", "gemm/few_rows.cpp", "services.cpp"))
    compile_and_run(TESTS / "mathematics" / "microkernel.cpp", tmp_path, *linked)


def test_kernels_compute_as_the_definition_does(library, tmp_path):
    compile_and_run(Path(__file__).with_name("library_program.cpp"), tmp_path, library)


@pytest.fixture(scope="module")
def gpu_objects(tmp_path_factory) -> list[Path]:
    """Of the sources in KERNELS, and of the two files that know whether there is CUDA."""
    wanted = {f"csrc/{name}.cu" for name in KERNELS} | {"csrc/library/facts.cpp", "csrc/library/kernels.cpp"}
    made = CPU_ONLY._replace(nvcc=NVCC, archs=parse_archs("9.0a"))
    edges = [edge for edge in plan.library_objects(made, "build/kernels") if edge.sources[0] in wanted]
    assert len(edges) == len(wanted)
    return compile_all(edges, tmp_path_factory.mktemp("gpu"))


@pytest.mark.cross
@needs_nvcc
def test_kernels_for_gpus_compile(gpu_objects):
    for path in gpu_objects:
        assert "AArch64" in run("readelf", "-h", path)


@pytest.mark.cross
@needs_nvcc
@needs_torch
def test_a_library_with_kernels_for_gpus(cpu_objects, gpu_objects, tmp_path):
    """Of those that are compiled here: others have functions in their place, as in a fast build. It has a CUDA runtime
    inside, exports what that of another machine does, and its CPU kernels run where there is no GPU."""
    replaced = ("csrc/library/facts.cpp", "csrc/library/kernels.cpp")
    objects = [*gpu_objects, *(path for source, path in cpu_objects.items() if source not in replaced)]
    stubs = tmp_path / "stubs.o"
    run(sys.executable, "build_support/stubs.py", stubs, CXX, *objects)
    path = tmp_path / plan.LIBRARY
    flags = plan.library_link_flags(CPU_ONLY._replace(nvcc=NVCC))
    run(CXX, "-shared", *objects, stubs, "-o", path, f"-L{CUDA_RUNTIME}", *flags)
    assert symbols(path, "--defined-only") == EXPORTS
    foreign = re.compile(r"^_?Py|torch|c10|_ZN2at|^cuda|^__cuda|^cu[A-Z]|GOMP")
    assert not [name for name in symbols(path, "--undefined-only") if foreign.search(name)]
    compile_and_run(Path(__file__).with_name("library_program.cpp"), tmp_path, path)


@pytest.fixture(scope="module")
def package(library, tmp_path_factory) -> Path:
    """The folder in which the package is."""
    made = CPU_ONLY._replace(
        torch=toolchain.read_torch(aarch64.PACKAGES / "torch"), python_include=aarch64.PYTHON_INCLUDE
    )
    objects = compile_all(plan.glue_objects(made), tmp_path_factory.mktemp("glue"))
    folder = tmp_path_factory.mktemp("installed")
    without = shutil.ignore_patterns("*.so", "__pycache__")
    copy = shutil.copytree(plan.ROOT / "flash_attn_ext", folder / "flash_attn_ext", ignore=without)
    shutil.copy2(library, copy)
    run(CXX, "-shared", *objects, copy / plan.LIBRARY, "-o", copy / GLUE, *plan.glue_link_flags(made))
    return folder


def run_python(package: Path, *arguments: object) -> str:
    path = f"PYTHONPATH={package}:{aarch64.PACKAGES}"
    return run(QEMU, "-L", aarch64.SYSTEM, "-E", path, aarch64.PYTHON, "-B", *arguments, cwd=package)


@pytest.mark.cross
@needs_torch
def test_the_extension_links(package):
    """What it takes from elsewhere is of the library, PyTorch, Python and C++."""
    assert symbols(package / "flash_attn_ext" / GLUE, "--defined-only") >= {"PyInit__C"}
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", package / "flash_attn_ext" / GLUE))
    ours = {plan.LIBRARY, "libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"}
    assert ours <= set(needed)
    assert not [name for name in needed if "cuda" in name or "x86" in name]


@pytest.mark.cross
@needs_torch
def test_python_runs_it(package):
    said = run_python(package, "-m", "flash_attn_ext", "info")
    assert "self-test     passed" in said, said
    assert f"for torch {aarch64.TORCH}" in said
