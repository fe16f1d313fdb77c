"""What is built, from what and with which flags; `build_into` does it."""

import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from build_support import archs, jobs, toolchain
from build_support.graph import Edge, kernel_object_name, ninja_text, prune_kernels
from build_support.toolchain import BuildError, Nvcc, TorchInfo

ROOT = Path(__file__).resolve().parent.parent
INCLUDE_ROOT = "csrc"
KERNELS_DIR = "build/kernels"

# -fopenmp: at::parallel_for is an inline template and runs serially without it. The math flags change no value; they
# let the compiler vectorise loops with square roots and comparisons. Nothing here depends on the machine that compiles:
# the SIMD variants are function multiversioning in the sources.
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += ["-Wall", "-Wextra", "-Wno-unused-parameter", f"-I{INCLUDE_ROOT}"]
CXX_FLAGS += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
# The embedded kernels of several architectures compress to a fraction of their size. -compress-mode=size would take a
# quarter off that, and 2 s a file.
NVCC_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
NVCC_FLAGS += ["-Werror=cross-execution-space-call", "-Xfatbin=-compress-all", f"-I{INCLUDE_ROOT}"]
# Sources outside sm90 with launches that overlap from compute capability 9.0 on (csrc/ptx/dependent_launch.h).
OVERLAPPING_LAUNCHES = (
    "kernels/sm80/forward/split/",
    "kernels/sm80/backward/instances/backward_fused",
    *(f"kernels/common/{name}" for name in ("sums/combine", "sums/delta", "sums/score_gradients", "masks/", "repair/")),
)


class Plan(NamedTuple):
    """Everything that was found and decided, before the first file is compiled."""

    torch: TorchInfo
    cxx: str
    python_include: Path
    nvcc: Nvcc | None  # None in a CPU-only build, whatever is installed
    message: str
    archs: list[archs.Arch]

    @property
    def build_dir(self) -> Path:
        return Path("build") / f"{sys.implementation.cache_tag}-torch-{self.torch.version}"


def make_plan() -> Plan:
    torch, cxx, python_include = toolchain.find_torch(), toolchain.find_cxx(), toolchain.find_python_include()
    nvcc, message = toolchain.decide_cuda(torch, toolchain.find_nvcc(), os.environ.get("FLASH_ATTN_EXT_CUDA"))
    if nvcc is None:
        return Plan(torch, cxx, python_include, None, message, [])
    wish = os.environ.get("FLASH_ATTN_EXT_ARCHS")
    chosen = archs.choose_archs(wish, [] if wish else archs.find_capabilities(), archs.find_supported(nvcc))
    return Plan(torch, cxx, python_include, nvcc, f"{message}, for {';'.join(map(str, chosen))}", chosen)


def cxx_flags(plan: Plan, source: str) -> list[str]:
    torch = plan.torch.root / "include"
    flags, system = list(CXX_FLAGS), [torch, torch / "torch/csrc/api/include", plan.python_include]
    if plan.nvcc:
        flags.append("-DFLASH_ATTN_EXT_WITH_CUDA=1")
        flags += ["-DFLASH_ATTN_EXT_WITH_SM90=1"] * any(arch.number == 90 for arch in plan.archs)
        system += plan.nvcc.include_dirs
        facts = {"CUDA_VERSION": plan.nvcc.version, "CUDA_ARCHS": ";".join(map(str, plan.archs))}
    else:
        facts = {"NOT_BUILT": plan.message.removeprefix("CPU-only build: ").replace("\\", "/").replace('"', "'")}
    # For build_info(). Only the file that reports these strings gets them, so only it is rebuilt with them.
    if "FLASH_ATTN_EXT_CUDA_ARCHS" in (ROOT / source).read_text(encoding="utf-8"):
        flags += [f'-DFLASH_ATTN_EXT_{name}="{text}"' for name, text in facts.items()]
    return flags + [word for path in system for word in ("-isystem", str(path))]


def link_flags(plan: Plan) -> list[str]:
    flags = ["-fopenmp", f"-L{plan.torch.root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    if plan.nvcc:
        # libcudart by soname: at run time it is the copy that `import torch` has already loaded.
        flags += ["-lc10_cuda", "-ltorch_cuda", f"-L{plan.nvcc.home / 'lib64'}", "-lcudart"]
    return flags + toolchain.shared_libstdcxx_flags(plan.cxx)


def capabilities_of(source: str) -> dict[str, int]:
    """What gencode_flags has to know of a kernel's source."""
    if "sm90" in Path(source).parts:
        return {"only": 90}
    return {"own_from": 90} if any(name in source for name in OVERLAPPING_LAUNCHES) else {}


def make_objects(plan: Plan, kernels_dir: str) -> list[Edge]:
    """An object for every source under csrc/, however deep. Those of files of one name differ by their folders."""
    edges = []
    for path in sorted((ROOT / INCLUDE_ROOT).rglob("*")):
        source = str(path.relative_to(ROOT))
        if path.suffix == ".cpp":
            output = plan.build_dir / "objects" / f"{source}.o"
            edges.append(Edge("cxx", [source], str(output), cxx_flags(plan, source)))
        elif path.suffix == ".cu" and plan.nvcc:
            gencode = archs.gencode_flags(plan.archs, **capabilities_of(source))
            flags = [*NVCC_FLAGS, *gencode]
            output = f"{kernels_dir}/{kernel_object_name(path, ROOT / INCLUDE_ROOT, flags, plan.nvcc)}"
            is_there = (ROOT / output).is_file()  # and its name says that it is the right one
            if gencode:
                edges.append(Edge(None if is_there else "nvcc", [source], output, flags))
    return edges


def build_library() -> Path:
    """Bring the shared object up to date and return its path."""
    plan, ninja = make_plan(), toolchain.find_ninja()
    print(f"flash_attn_ext: {plan.message}", flush=True)
    library, ninja_file = plan.build_dir / "_C.so", plan.build_dir / "build.ninja"
    (ROOT / plan.build_dir).mkdir(parents=True, exist_ok=True)
    with open(ROOT / plan.build_dir / ".lock", "w") as lock:  # two ninjas in one folder would spoil each other's log
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"flash_attn_ext: waiting for another build in {ROOT / plan.build_dir}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        shared_kernels = os.environ.get("FLASH_ATTN_EXT_KERNEL_OBJECTS")
        edges = make_objects(plan, shared_kernels or KERNELS_DIR)
        objects = [edge.output for edge in edges]
        link = Edge("link", objects, str(library), link_flags(plan))
        (ROOT / ninja_file).write_text(ninja_text([*edges, link], plan.build_dir, plan.cxx, plan.nvcc))
        job_bytes = jobs.NVCC_JOB_BYTES if any(edge.rule == "nvcc" for edge in edges) else jobs.CXX_JOB_BYTES
        machine = jobs.available_cores(), jobs.available_memory()
        num_jobs = str(jobs.num_jobs(*machine, job_bytes, os.environ.get("MAX_JOBS")))
        environment = {"NINJA_STATUS": toolchain.ninja_status(ninja)} | os.environ
        if subprocess.run([ninja, "-f", str(ninja_file), "-j", num_jobs], cwd=ROOT, env=environment).returncode != 0:
            raise BuildError(f"compilation failed, see above. The commands: ninja -v -f {ninja_file}")
        if not shared_kernels:
            prune_kernels(ROOT / KERNELS_DIR, {Path(name).name for name in objects})
    return ROOT / library


def build_into(target: Path) -> None:
    """Bring the shared object up to date and copy it to `target`, or end the process and say why."""
    try:
        replace_if_different(build_library(), target)
    except BuildError as error:
        sys.exit(f"\nflash_attn_ext cannot be built: {error}\n")


def replace_if_different(source: Path, target: Path) -> None:
    if not (target.is_file() and filecmp.cmp(source, target, shallow=False)):
        partial = target.with_name(f"{target.name}.partial")
        shutil.copy2(source, partial)
        partial.replace(target)
