"""What is built, from what and with which flags; `build_library` does it."""

import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from build_support import archs, jobs, toolchain
from build_support.graph import Graph, kernel_object_name, prune_kernels
from build_support.toolchain import BuildError, CudaDecision, Nvcc, TorchInfo

ROOT = Path(__file__).resolve().parent.parent
INCLUDE_ROOT = "csrc"
KERNELS_DIR = "build/kernels"

WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
# -fopenmp: at::parallel_for is an inline template and runs serially without it. The math flags change no value; they
# let the compiler vectorise loops with square roots and comparisons. Nothing here depends on the machine that compiles:
# the SIMD variants are function multiversioning in the sources.
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
NVCC_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
NVCC_FLAGS += ["-Werror=cross-execution-space-call"]
# The embedded kernels of several architectures compress to a fraction of their size. -compress-mode=size would take a
# quarter off that, and 2 s a file.
NVCC_FLAGS += ["-Xfatbin=-compress-all"]


@dataclass(frozen=True)
class Plan:
    """Everything that was found and decided, before the first file is compiled."""

    torch: TorchInfo
    cxx: str
    python_include: Path
    cuda: CudaDecision
    nvcc: Nvcc | None
    archs: list[archs.Arch]

    @property
    def arch_list(self) -> str:
        return ";".join(str(arch) for arch in self.archs)

    @property
    def build_dir(self) -> Path:
        return Path("build") / f"{sys.implementation.cache_tag}-torch-{self.torch.version}"


def make_plan() -> Plan:
    torch = toolchain.find_torch()
    cxx = toolchain.find_cxx()
    python_include = toolchain.find_python_include()
    nvcc = toolchain.find_nvcc()
    cuda = toolchain.decide_cuda(torch, nvcc, os.environ.get("FLASH_ATTN_EXT_CUDA"))
    chosen: list[archs.Arch] = []
    if cuda.build and nvcc:
        wish = os.environ.get("FLASH_ATTN_EXT_ARCHS")
        chosen = archs.choose_archs(wish, [] if wish else archs.find_capabilities(), archs.find_supported(nvcc))
    return Plan(torch, cxx, python_include, cuda, nvcc, chosen)


def cxx_flags(plan: Plan, source: str) -> list[str]:
    flags = [*CXX_FLAGS, *WARNINGS, f"-I{INCLUDE_ROOT}"]
    system = [*plan.torch.include_dirs, plan.python_include]
    flags += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    if plan.cuda.build and plan.nvcc:
        flags += ["-DFLASH_ATTN_EXT_WITH_CUDA=1"]
        system += plan.nvcc.include_dirs
    if "FLASH_ATTN_EXT_CUDA_ARCHS" in (ROOT / source).read_text(encoding="utf-8"):
        flags += build_info_macros(plan)
    return flags + [word for path in system for word in ("-isystem", str(path))]


def build_info_macros(plan: Plan) -> list[str]:
    """String macros for build_info(); only the file that reports them gets them, so only it is rebuilt with them."""
    if not plan.cuda.build or plan.nvcc is None:
        reason = plan.cuda.message.removeprefix("CPU-only build: ").replace("\\", "/").replace('"', "'")
        return [f'-DFLASH_ATTN_EXT_NOT_BUILT="{reason}"']
    return [
        f'-DFLASH_ATTN_EXT_CUDA_VERSION="{plan.nvcc.version}"',
        f'-DFLASH_ATTN_EXT_CUDA_ARCHS="{plan.arch_list}"',
    ]


def link_flags(plan: Plan) -> list[str]:
    flags = ["-fopenmp", f"-L{plan.torch.lib_dir}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    flags += toolchain.shared_libstdcxx_flags(plan.cxx)
    if plan.cuda.build and plan.nvcc:
        # libcudart by soname: at run time it is the copy that `import torch` has already loaded.
        flags += ["-lc10_cuda", "-ltorch_cuda", f"-L{plan.nvcc.home / 'lib64'}", "-lcudart"]
    return flags


def make_graph(plan: Plan, kernels_dir: str) -> Graph:
    graph = Graph(plan.build_dir, plan.cxx, str(plan.nvcc.path) if plan.nvcc else "nvcc")
    for path in sorted((ROOT / INCLUDE_ROOT).rglob("*.cpp")):
        source = str(path.relative_to(ROOT))
        graph.add_cxx(source, cxx_flags(plan, source))
    if plan.cuda.build and plan.nvcc:
        for path in sorted((ROOT / INCLUDE_ROOT).rglob("*.cu")):
            only = 90 if "sm90" in path.parts else None
            gencode = archs.gencode_flags(plan.archs, only)
            if gencode:
                flags = [*NVCC_FLAGS, f"-I{INCLUDE_ROOT}", *gencode]
                name = kernel_object_name(path, ROOT / INCLUDE_ROOT, flags, plan.nvcc)
                graph.add_kernel(str(path.relative_to(ROOT)), f"{kernels_dir}/{name}", flags, ROOT)
    return graph


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """One build of a folder at a time: two ninjas in one folder would spoil each other's log."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build in {folder}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build_library() -> Path:
    """Bring the shared object up to date and return its path."""
    plan = make_plan()
    ninja = toolchain.find_ninja()
    say(plan.cuda.message + (f", for {plan.arch_list}" if plan.archs else ""))
    if plan.cuda.warning:
        say(f"warning: {plan.cuda.warning}")
    shared_kernels = os.environ.get("FLASH_ATTN_EXT_KERNEL_OBJECTS")
    library = plan.build_dir / "_C.so"
    with build_lock(ROOT / plan.build_dir):
        graph = make_graph(plan, shared_kernels or KERNELS_DIR)
        ninja_file = ROOT / plan.build_dir / "build.ninja"
        ninja_file.write_text(graph.to_ninja(str(library), link_flags(plan)))
        compiles_kernels = any(edge.rule == "nvcc" for edge in graph.edges)
        count = jobs.num_jobs(
            jobs.available_cores(),
            jobs.available_memory(),
            jobs.NVCC_JOB_BYTES if compiles_kernels else jobs.CXX_JOB_BYTES,
            os.environ.get("MAX_JOBS"),
        )
        command = [ninja, "-f", str(ninja_file.relative_to(ROOT)), "-j", str(count)]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise BuildError(f"compilation failed, see above. The commands: ninja -v -f {ninja_file.relative_to(ROOT)}")
        if not shared_kernels:
            prune_kernels(
                ROOT / KERNELS_DIR, [Path(name).name for name in graph.objects if name.startswith(KERNELS_DIR)]
            )
    return ROOT / library


def say(line: str) -> None:
    print(f"flash_attn_ext: {line}", flush=True)


def replace_if_different(source: Path, target: Path) -> None:
    if target.is_file() and filecmp.cmp(source, target, shallow=False):
        return
    partial = target.with_name(f"{target.name}.partial")
    shutil.copy2(source, partial)
    partial.replace(target)
