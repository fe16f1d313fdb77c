"""What is built, from what and with which flags; build.py does it.

The library has all kernels and their plans and depends on neither torch nor Python. The glue has what handles tensors,
and there is one for each minor version of torch and each Python.
"""

import ctypes
import hashlib
import itertools
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from build_support import archs, toolchain
from build_support.graph import Edge, include_closure, kernel_object_name
from build_support.toolchain import BuildError, Nvcc, TorchInfo

ROOT = Path(__file__).resolve().parent.parent
INCLUDE_ROOT = "csrc"
KERNELS_DIR = "build/kernels"
LIBRARY = "libflash_attn_ext_kernels.so"
HEADER = "library/kernels.h"  # between the library and the glue
WRITES_PLANS = ("kernels/plan/report.h", "kernels/plan/report.cpp")  # as JSON, for the Python package
GLUE_SOURCES = ("bindings.cpp", "host/")  # the rest of the sources is the library's

# The math flags change no value; they let the compiler vectorise loops with square roots and comparisons. Nothing here
# depends on the machine that compiles: the SIMD variants are function multiversioning in the sources.
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += ["-Wall", "-Wextra", "-Wno-unused-parameter", f"-I{INCLUDE_ROOT}"]
LIBRARY_CXX_FLAGS = [*CXX_FLAGS, "-fopenmp-simd"]
# -fopenmp: at::parallel_for is an inline template and runs serially without it.
GLUE_CXX_FLAGS = [*CXX_FLAGS, "-fopenmp", "-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
# The embedded kernels of several architectures compress to a fraction of their size. -compress-mode=size would take a
# quarter off that, and 2 s a file.
NVCC_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
NVCC_FLAGS += ["-Werror=cross-execution-space-call", "-Xfatbin=-compress-all", f"-I{INCLUDE_ROOT}"]
# Sources outside sm90 with launches that overlap from compute capability 9.0 on (csrc/ptx/dependent_launch.h).
OVERLAPPING_LAUNCHES = (
    "kernels/sm80/forward/split/",
    "kernels/sm80/backward/instances/backward_fused",
    *(f"kernels/sm80/{name}/instances/{name}_bias_stationary" for name in ("forward", "backward")),
    *(f"kernels/sm80/{name}/instances/{name}_short_bias" for name in ("forward", "backward")),
    *(f"kernels/sm80/backward/instances/{name}_over_batch" for name in ("dbias", "relative_dbias")),
    *(
        f"kernels/common/{name}"
        for name in ("sums/combine", "sums/delta", "sums/dbias_from_keys", "sums/score_gradients", "masks/", "repair/")
    ),
)
# A symbol that is missing is an error at once: when the library is linked, and when the glue is loaded, whose Python is
# not linked. Symbols of static libraries stay inside.
LIBRARY_LINK_FLAGS = [f"-Wl,-soname,{LIBRARY}", "-Wl,--no-undefined", "-Wl,--exclude-libs,ALL"]
EXPORTS = f"{INCLUDE_ROOT}/library/exports.map"
LIBRARY_LINK_FLAGS += [f"-Wl,--version-script={EXPORTS}"]
# libtorch.so brings CUDA's part of torch, where there is one, though no symbol here needs it. The folder of
# the glue is an old-style RPATH, which comes before LD_LIBRARY_PATH: that may have another installation's library.
GLUE_LINK_FLAGS = ["-fopenmp", "-Wl,-z,now", "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags", "-Wl,--no-as-needed"]


# The largest head dim of a fast build is in this header. Sources that match the pattern have only other types or larger
# head dims, and are not compiled. In all others the macro FLASH_ATTN_EXT_FAST_BUILD leaves kernels out.
FAST_BUILD_HEADER = "csrc/kernels/config/fast_build.h"
LEFT_OUT_OF_FAST_BUILDS = re.compile(r"_(f16|f32|wide)|/float64")


class Plan(NamedTuple):
    """Everything that was found and decided, before the first file is compiled."""

    torch: TorchInfo
    cxx: str
    python_include: Path
    nvcc: Nvcc | None  # None in a CPU-only build, whatever is installed
    message: str
    archs: list[archs.Arch]
    fast: bool = False  # FLASH_ATTN_EXT_FAST_BUILD: some kernels are left out

    @property
    def library_dir(self) -> Path:
        cuda = f"cuda-{self.nvcc.version}" if self.nvcc else "cpu"
        return Path("build") / f"library-{platform.machine()}-{cuda}{'-fast' if self.fast else ''}"

    @property
    def glue_dir(self) -> Path:
        return Path("build") / f"glue-{platform.machine()}-{sys.implementation.cache_tag}-torch-{self.torch.version}"

    @property
    def glue_name(self) -> str:
        """As flash_attn_ext/_load.py looks for it."""
        return f"_C.torch-{self.torch.minor}{sysconfig.get_config_var('EXT_SUFFIX')}"


def make_plans() -> list[Plan]:
    """One for each torch that gets a glue. They have the library of the first one."""
    torches = find_torches()
    first = make_plan(torches[0])
    return [first, *(first._replace(torch=torch) for torch in torches[1:])]


def find_torches() -> list[TorchInfo]:
    """Those of FLASH_ATTN_EXT_TORCH_FOLDERS, or that of the running Python."""
    folders = os.environ.get("FLASH_ATTN_EXT_TORCH_FOLDERS")
    if not folders:
        return [toolchain.find_torch()]
    return [toolchain.read_torch(Path(folder)) for folder in folders.split(os.pathsep)]


def make_plan(torch: TorchInfo) -> Plan:
    cxx, python_include = toolchain.find_cxx(), toolchain.find_python_include()
    if library := reused_library():
        return Plan(torch, cxx, python_include, None, f"kernels of {library}", [])
    nvcc, message = toolchain.decide_cuda(torch, toolchain.find_nvcc(), os.environ.get("FLASH_ATTN_EXT_CUDA"))
    if nvcc is None:
        return Plan(torch, cxx, python_include, None, message, [])
    wish = os.environ.get("FLASH_ATTN_EXT_ARCHS")
    chosen = archs.choose_archs(wish, [] if wish else archs.find_capabilities(), archs.find_supported(nvcc))
    fast = toolchain.is_set("FLASH_ATTN_EXT_FAST_BUILD")
    message += f", for {';'.join(map(str, chosen))}"
    message += f", bfloat16 and head dims up to {fast_build_head_dim()} only" if fast else ""
    return Plan(torch, cxx, python_include, nvcc, message, chosen, fast)


def fast_build_head_dim() -> int:
    return int(
        re.search(r"kFastBuildHeadDim = (\d+);", (ROOT / FAST_BUILD_HEADER).read_text(encoding="utf-8")).group(1)
    )


def reused_library() -> Path | None:
    """A library that is built already, if FLASH_ATTN_EXT_KERNEL_OBJECTS names one instead of a folder of objects."""
    path = Path(os.environ.get("FLASH_ATTN_EXT_KERNEL_OBJECTS", ""))
    if path.suffix != ".so":
        return None
    if not path.is_file():
        raise BuildError(f"FLASH_ATTN_EXT_KERNEL_OBJECTS={str(path)!r}: there is no such library.")
    interface, _, _, cuda_version, _ = facts_of(path)
    if cuda_version is None and toolchain.is_set("FLASH_ATTN_EXT_CUDA"):
        problem = (
            f"FLASH_ATTN_EXT_CUDA=1, and FLASH_ATTN_EXT_KERNEL_OBJECTS={str(path)!r}: the library has no kernels for "
        )
        raise BuildError(problem + "GPUs. Name another library, or unset FLASH_ATTN_EXT_CUDA.")
    if interface != interface_digest():
        problem = f"FLASH_ATTN_EXT_KERNEL_OBJECTS={str(path)!r}: the library has the interface {interface}, and these "
        problem += f"sources, of version {version()}, have {interface_digest()}. Take the sources of its version, or "
        raise BuildError(problem + "unset the variable, so that the kernels are compiled.")
    return path.absolute()


class LibraryFacts(NamedTuple):
    """What a library says of itself: the first fields of Facts in csrc/library/kernels.h. None: it has no CUDA."""

    interface: str
    version: str
    compiler: str
    cuda_version: str | None
    cuda_archs: str | None


def facts_of(library: Path) -> LibraryFacts:
    """A library needs neither torch nor a GPU to be loaded."""

    class Facts(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_char_p) for name in LibraryFacts._fields)

    try:
        function = ctypes.CDLL(str(library.absolute())).flash_attn_ext_kernels_facts
    except (OSError, AttributeError) as error:
        raise BuildError(f"{library} is no library of kernels: {error}") from None
    function.restype = ctypes.POINTER(Facts)
    texts = (getattr(function().contents, name) for name in LibraryFacts._fields)
    return LibraryFacts(*(text and text.decode() for text in texts))


def interface_digest() -> str:
    """Of what the library and the package have to agree on: the header between them with all that it includes, and the
    text of the two files that write plans as JSON."""
    root = ROOT / INCLUDE_ROOT
    digest = hashlib.sha256()
    for path in [*include_closure(root / HEADER, root), *(root / name for name in WRITES_PLANS)]:
        digest.update(f"\0{path.relative_to(root.resolve())}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def version() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "(.*)"$', text, re.MULTILINE).group(1)


def define_flags(plan: Plan, source: str) -> list[str]:
    """An object gets those that its files name, so only these objects are rebuilt with them. Whether the build is fast
    is for all CUDA files, because headers of launches leave kernels out."""
    text = (ROOT / source).read_text(encoding="utf-8")
    facts = {"INTERFACE": lambda: _quoted(interface_digest()), "VERSION": lambda: _quoted(version())}
    if plan.nvcc:
        facts |= {"WITH_CUDA": lambda: "1"}
        facts |= {"WITH_SM90": lambda: "1"} if any(arch.number == 90 for arch in plan.archs) else {}
        facts |= {"FAST_BUILD": lambda: "1"} if plan.fast else {}
        facts |= {"CUDA_VERSION": lambda: _quoted(plan.nvcc.version)}
        facts |= {"CUDA_ARCHS": lambda: _quoted(";".join(map(str, plan.archs)))}
    else:
        facts |= {"NOT_BUILT": lambda: _quoted(plan.message.removeprefix("CPU-only build: "))}
    names = {*re.findall(r"\bFLASH_ATTN_EXT_(\w+)", text), *(["FAST_BUILD"] if source.endswith(".cu") else [])}
    return [f"-DFLASH_ATTN_EXT_{name}={value()}" for name, value in facts.items() if name in names]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "/").replace('"', "'") + '"'


def glue_flags(plan: Plan, included: Sequence[str], last: str) -> list[str]:
    """Of an object that has the included files before its last one."""
    torch = plan.torch.root / "include"
    system = [torch, torch / "torch/csrc/api/include", plan.python_include]
    include = [word for path in system for word in ("-isystem", str(path))]
    defines = dict.fromkeys(flag for file in (*included, last) for flag in define_flags(plan, file))
    return [*GLUE_CXX_FLAGS, *defines, *include, *(word for file in included for word in ("-include", file))]


def library_link_flags(plan: Plan) -> list[str]:
    flags = list(LIBRARY_LINK_FLAGS)
    if plan.nvcc:
        # A CUDA runtime of its own: the library runs beside a torch with any other, or with none.
        flags += [f"-L{plan.nvcc.home / folder}" for folder in ("lib64", "lib")]
        flags += ["-l:libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
    return flags + toolchain.shared_libstdcxx_flags(plan.cxx)


def glue_link_flags(plan: Plan) -> list[str]:
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    libraries += toolchain.shared_libstdcxx_flags(plan.cxx)
    return [*GLUE_LINK_FLAGS, f"-L{plan.torch.root / 'lib'}", *libraries]


def capabilities_of(source: str) -> dict[str, int]:
    """What gencode_flags has to know of a kernel's source."""
    if "sm90" in Path(source).parts:
        return {"only": 90}
    return {"own_from": 90} if any(name in source for name in OVERLAPPING_LAUNCHES) else {}


def sources(*suffixes: str, of_glue: bool) -> list[str]:
    """Under csrc/, however deep."""
    found = sorted(path for path in (ROOT / INCLUDE_ROOT).rglob("*") if path.suffix in suffixes)
    names = [path.relative_to(ROOT / INCLUDE_ROOT).as_posix() for path in found]
    return [f"{INCLUDE_ROOT}/{name}" for name in names if name.startswith(GLUE_SOURCES) == of_glue]


def glue_objects(plan: Plan) -> list[Edge]:
    """One object for each folder, because reading PyTorch's headers takes most of the time."""
    edges = []
    by_folder = sorted(sources(".cpp", of_glue=True), key=os.path.dirname)
    for folder, of_folder in itertools.groupby(by_folder, os.path.dirname):
        *included, last = of_folder
        output = str(plan.glue_dir / "objects" / f"{folder}.o")
        edges.append(Edge("cxx", [last], output, glue_flags(plan, included, last), included))
    return edges


def library_objects(plan: Plan, kernels_dir: str) -> list[Edge]:
    """Those of files of one name differ by their folders."""
    edges = []
    for source in sources(".cpp", ".cu", of_glue=False):
        if plan.fast and LEFT_OUT_OF_FAST_BUILDS.search(source):
            continue
        if source.endswith(".cpp"):
            output = str(plan.library_dir / "objects" / f"{source}.o")
            edges.append(Edge("cxx", [source], output, [*LIBRARY_CXX_FLAGS, *define_flags(plan, source)]))
        elif plan.nvcc and (gencode := archs.gencode_flags(plan.archs, **capabilities_of(source))):
            flags = [*NVCC_FLAGS, *define_flags(plan, source), *gencode]
            name = kernel_object_name(ROOT / source, ROOT / INCLUDE_ROOT, flags, plan.nvcc)
            is_there = (ROOT / kernels_dir / name).is_file()  # and its name says that it is the right one
            edges.append(Edge(None if is_there else "nvcc", [source], f"{kernels_dir}/{name}", flags))
    if plan.fast:
        edges.append(Edge("stubs", [edge.output for edge in edges], str(plan.library_dir / "objects" / "stubs.o"), []))
    return edges
