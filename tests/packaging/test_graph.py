"""The build graph: what is compiled with which flags, and what makes an object stale."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_support import graph, plan, toolchain
from build_support.archs import parse_archs
from build_support.toolchain import Nvcc, TorchInfo
from support.cross_compiled import KERNELS

CSRC = Path(__file__).parents[2] / "csrc"
NVCC = Nvcc(Path("/usr/local/cuda/bin/nvcc"), "13.0", "release 13.0, V13.0.88")
TORCH = TorchInfo("2.11.0+cu130", "13.0", Path("/venv/torch"))


def make_plan(cuda: bool = True, archs: str = "8.0;9.0a+PTX") -> plan.Plan:
    decided = (NVCC, "CUDA build", parse_archs(archs)) if cuda else (None, 'CPU-only build: the "reason"', [])
    return plan.Plan(TORCH, "/usr/bin/g++", Path("/py/include"), *decided)


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A small project; returns its csrc folder."""
    csrc = tmp_path / "csrc"
    files = {
        "bindings.cpp": '#include "host/a.h"\n',
        "host/a.h": "",
        "host/info.cpp": "",
        "library/facts.cpp": 'const char* archs = FLASH_ATTN_EXT_CUDA_ARCHS;  // "FLASH_ATTN_EXT_NOT_BUILT"\n',
        "kernels/common/sums/delta.cu": '#include "kernels/common/sums/delta.h"\n#include <cuda_fp16.h>\n',
        "kernels/common/sums/delta.h": '#include "../../../attention/params.h"\n',
        "attention/params.h": "struct Params {};\n",
        "kernels/sm90/forward.cu": '#include "attention/params.h"\n',
        "kernels/sm80/forward/instances/d64.cu": '#include "attention/params.h"\n',
        "kernels/sm80/backward/instances/d64.cu": '#include "attention/params.h"\n',
        "kernels/sm90/forward/instances/d64.cu": '#include "attention/params.h"\n',
        "kernels/cpu/forward/rows.cpp": "",
        "kernels/cpu/backward/rows.cpp": "",
        "unrelated.h": "",
    }
    for name, text in files.items():
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(text)
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    return csrc


def edges(made: plan.Plan) -> list[graph.Edge]:
    return [*plan.glue_objects(made), *plan.library_objects(made, "build/kernels")]


def objects(made: plan.Plan) -> dict[str, graph.Edge]:
    return {edge.sources[0]: edge for edge in edges(made)}


def test_each_source_has_one_edge(tree):
    made = edges(make_plan())
    assert {edge.sources[0]: edge.rule for edge in made} == {
        "csrc/bindings.cpp": "cxx",
        "csrc/host/info.cpp": "cxx",
        "csrc/library/facts.cpp": "cxx",
        "csrc/kernels/cpu/backward/rows.cpp": "cxx",
        "csrc/kernels/cpu/forward/rows.cpp": "cxx",
        "csrc/kernels/common/sums/delta.cu": "nvcc",
        "csrc/kernels/sm80/backward/instances/d64.cu": "nvcc",
        "csrc/kernels/sm80/forward/instances/d64.cu": "nvcc",
        "csrc/kernels/sm90/forward.cu": "nvcc",
        "csrc/kernels/sm90/forward/instances/d64.cu": "nvcc",
    }
    assert len(made) == 10


def test_files_of_one_name_have_objects_of_their_own(tree):
    """In whatever folder they are, and although these kernels have the same text."""
    assert len({edge.output for edge in edges(make_plan())}) == 10
    folders = ("forward", "backward")
    names = {kernel_name(tree, source=f"kernels/sm80/{folder}/instances/d64.cu") for folder in folders}
    assert {name.rsplit("-", 1)[0] for name in names} == {f"kernels.sm80.{folder}.instances.d64" for folder in folders}


def test_the_glue_has_an_object_for_each_folder(tree):
    (tree / "host" / "cache").mkdir()
    for name in ("host/calls.cpp", "host/cache/appended.cpp", "host/cache/values.cpp"):
        (tree / name).write_text("bool has_gpus = FLASH_ATTN_EXT_WITH_CUDA;")
    made = plan.glue_objects(make_plan())
    assert [[*edge.read, *edge.sources] for edge in made] == [
        ["csrc/bindings.cpp"],
        ["csrc/host/calls.cpp", "csrc/host/info.cpp"],
        ["csrc/host/cache/appended.cpp", "csrc/host/cache/values.cpp"],
    ]
    for edge in made:
        assert [edge.flags[i + 1] for i, flag in enumerate(edge.flags) if flag == "-include"] == list(edge.read)
        assert sum("WITH_CUDA" in flag for flag in edge.flags) == (edge is not made[0])


def test_nvcc_never_sees_torch_or_python(tree):
    for edge in objects(make_plan()).values():
        if edge.rule == "nvcc":
            assert not [flag for flag in edge.flags if "torch" in flag or "/py/" in flag]
            assert "-Icsrc" in edge.flags


def test_only_the_glue_sees_torch_and_python(tree):
    seen = {"/venv/torch/include", "/py/include"}
    for source, edge in objects(make_plan()).items():
        is_glue = source.startswith(("csrc/bindings.cpp", "csrc/host/"))
        assert seen & set(edge.flags) == (seen if is_glue else set()), source
        assert "-std=c++20" in edge.flags
        assert not [flag for flag in edge.flags if flag.startswith(("-march", "-mtune", "-mavx"))]


def test_the_glue_is_the_same_with_and_without_cuda(tree):
    """So one serves a torch of either kind, and a library of either kind."""
    assert plan.glue_objects(make_plan()) == plan.glue_objects(make_plan(cuda=False))


def test_the_library_is_the_same_for_every_torch(tree):
    other = make_plan()._replace(torch=TorchInfo("2.15.0", None, Path("/elsewhere/torch")))
    assert plan.library_objects(make_plan(), "build/kernels") == plan.library_objects(other, "build/kernels")
    assert make_plan().library_dir == other.library_dir
    assert make_plan().glue_dir != other.glue_dir
    assert (make_plan().glue_name[:13], other.glue_name[:13]) == ("_C.torch-2.11", "_C.torch-2.15")


def test_machines_that_share_a_checkout_build_in_folders_of_their_own(monkeypatch):
    folders = {make_plan().library_dir, make_plan().glue_dir}
    monkeypatch.setattr(plan.platform, "machine", lambda: "aarch64")
    assert not folders & {make_plan().library_dir, make_plan().glue_dir}


def test_cpu_only_build_has_no_cuda_in_it(tree):
    made = objects(make_plan(cuda=False))
    assert {edge.rule for edge in made.values()} == {"cxx"}
    flags = made["csrc/library/facts.cpp"].flags
    assert "-DFLASH_ATTN_EXT_NOT_BUILT=\"the 'reason'\"" in flags
    assert not [flag for flag in flags if "WITH_CUDA" in flag]


def test_only_the_file_that_reports_the_build_depends_on_the_architectures(tree):
    before, after = (objects(make_plan(archs=archs)) for archs in ("8.0", "8.6"))
    assert before["csrc/bindings.cpp"] == after["csrc/bindings.cpp"]
    assert before["csrc/library/facts.cpp"] != after["csrc/library/facts.cpp"]


def test_every_kernel_that_overlaps_with_the_one_before_has_the_instructions():
    """Where they are missing, nothing waits for the kernel before."""
    for source in sorted(CSRC.rglob("*.cu")):
        name = str(source.relative_to(CSRC.parent))
        uses = any(path.name == "dependent_launch.h" for path in graph.include_closure(source, CSRC))
        assert uses <= bool(plan.capabilities_of(name)), name


# Who lets the next kernel begin has waited already: in the kernel that these are part of, or by way of the kernel
# before, which let it begin behind its own wait.
WAITED_BEFORE = {
    "sm90/forward/scheduler.cuh": "sm90/forward/forward.cuh",
    "sm90/forward/single_tile/producer.cuh": "sm90/forward/single_tile/single_tile.cuh",
    "sm90/backward/key_stationary/statistics.cuh": "sm90/backward/key_stationary/key_tile_list.cu",
    "sm90/backward/key_stationary/key_stationary.cuh": "sm90/backward/key_stationary/key_tile_list.cu",
    "sm90/backward/query_stationary/query_stationary.cuh": "common/sums/delta.cu",
}


def test_what_was_there_before_a_call_is_there_for_all_of_its_kernels():
    """Some read lengths before they wait: so the one before may let them begin only behind its own wait."""
    wait, allow = "ptx::wait_for_kernel_before();", "ptx::allow_dependent_launch();"
    kernels = CSRC / "kernels"
    found = {str(path.relative_to(kernels)) for path in kernels.rglob("*.cu*") if allow in path.read_text()}
    assert found > set(WAITED_BEFORE)
    for name in sorted(found - set(WAITED_BEFORE)):
        for kernel in (kernels / name).read_text().split("__global__")[1:]:
            if allow in kernel:
                assert wait in kernel.partition(allow)[0], name
    for name, waiting in WAITED_BEFORE.items():
        assert wait in (kernels / waiting).read_text(), name


def test_hopper_kernels_are_left_out_where_no_hopper_is_wanted(tree):
    assert not [source for source in objects(make_plan(archs="8.0")) if "/sm90/" in source]


def test_the_folder_of_the_checkout_decides_nothing(tree, tmp_path, monkeypatch):
    checkout = tmp_path / "sm90"
    checkout.mkdir()
    tree.rename(checkout / "csrc")
    monkeypatch.setattr(plan, "ROOT", checkout)
    for source, edge in objects(make_plan()).items():
        assert ("-gencode=arch=compute_90a,code=sm_90a" in edge.flags) == ("/sm90/" in source)


DELTA = "kernels/common/sums/delta.cu"


def kernel_name(tree: Path, flags: tuple[str, ...] = ("-O3",), nvcc: Nvcc = NVCC, source: str = DELTA) -> str:
    return graph.kernel_object_name(tree / source, tree, flags, nvcc)


def test_include_closure(tree):
    closure = graph.include_closure(tree / "kernels/common/sums/delta.cu", tree)
    names = [path.relative_to(tree.resolve()).as_posix() for path in closure]
    assert names == ["attention/params.h", "kernels/common/sums/delta.cu", "kernels/common/sums/delta.h"]


@pytest.mark.parametrize(
    "changed", ["kernels/common/sums/delta.cu", "kernels/common/sums/delta.h", "attention/params.h"]
)
def test_a_change_to_what_a_kernel_reads_names_a_new_object(tree, changed):
    before = kernel_name(tree)
    (tree / changed).write_text((tree / changed).read_text() + "// changed\n")
    assert kernel_name(tree) != before


def test_other_changes_do_not(tree):
    before = kernel_name(tree)
    (tree / "unrelated.h").write_text("struct New {};")
    (tree / "kernels/common/sums/delta.cu").touch()
    assert kernel_name(tree) == before
    assert kernel_name(tree, flags=("-O2",)) != before
    assert kernel_name(tree, nvcc=Nvcc(NVCC.path, "13.0", "release 13.0, V13.0.99")) != before


def test_a_kernel_object_that_is_there_is_not_compiled(tree):
    before = objects(make_plan())["csrc/kernels/common/sums/delta.cu"]
    (tree.parent / before.output).parent.mkdir(parents=True)
    (tree.parent / before.output).touch()
    after = objects(make_plan())["csrc/kernels/common/sums/delta.cu"]
    assert (before.rule, after.rule, after.output) == ("nvcc", None, before.output)
    assert "delta" not in graph.ninja_text([after], Path("build/x"), "g++", NVCC)


@pytest.mark.parametrize(
    ("source", "left_out"),
    [
        ("kernels/common/float64/float64_attention.cu", True),
        ("kernels/sm80/forward/instances/forward_f32.cu", True),
        ("kernels/sm80/forward/instances/forward_wide.cu", True),
        ("kernels/sm90/backward/two_pass/instances/two_pass_f16.cu", True),
        ("kernels/sm90/backward/two_pass/instances/two_pass_bf16.cu", False),
        ("kernels/sm80/forward/instances/forward.cu", False),
        ("kernels/sm80/sm80_backend.cu", False),
        ("library/gpu.cu", False),
    ],
)
def test_what_a_fast_build_leaves_out(source, left_out):
    assert (CSRC / source).is_file()
    fast = make_plan()._replace(fast=True)
    compiled = {edge.sources[0] for edge in plan.library_objects(fast, "build/kernels")}
    assert (f"csrc/{source}" not in compiled) == left_out
    assert fast.library_dir != make_plan().library_dir


def test_a_fast_build_leaves_kernels_out_of_all_cuda_files(tree):
    """Headers of launches do, whose names the sources do not show."""
    flag = "-DFLASH_ATTN_EXT_FAST_BUILD=1"
    fast = {edge.sources[0] for edge in edges(make_plan()._replace(fast=True)) if flag in edge.flags}
    assert fast == {f"csrc/{path.relative_to(tree)}" for path in tree.rglob("*.cu")}
    assert not any(flag in edge.flags for edge in edges(make_plan()))


def test_stubs_stand_for_the_functions_that_are_missing(tmp_path):
    """They return an error, and hide no function that is there."""
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("no g++ or no nm")
    (tmp_path / "a.cpp").write_text(
        "namespace flash_attn_ext { int there(double) { return 7; } int missing(int); int missing(double); }\n"
        'extern "C" int sum() { using namespace flash_attn_ext; return there(1) + missing(1) + missing(1.0); }\n'
    )
    objects = [str(tmp_path / "a.o"), str(tmp_path / "stubs.o")]
    subprocess.run([compiler, "-fPIC", "-c", tmp_path / "a.cpp", "-o", objects[0]], check=True)
    script = Path(graph.__file__).with_name("stubs.py")
    subprocess.run([sys.executable, script, objects[1], compiler, objects[0]], check=True)
    subprocess.run([compiler, "-shared", *objects, "-Wl,--no-undefined", "-o", tmp_path / "a.so"], check=True)
    assert ctypes.CDLL(str(tmp_path / "a.so")).sum() == 7 + 801 + 801


def test_prune_removes_older_objects_of_the_same_sources_only(tmp_path):
    for name in ("a.b-1.o", "a.b-1.log", "a.b-2.o", "a.b-2.log", "c-1.o"):
        (tmp_path / name).touch()
    graph.prune_kernels(tmp_path, {"a.b-2.o"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b-2.log", "a.b-2.o", "c-1.o"]


def test_a_switch_is_on_off_or_an_error():
    assert [toolchain.is_set("X", {"X": value}) for value in ("", "0", "1")] == [False, False, True]
    assert not toolchain.is_set("X", {})
    with pytest.raises(toolchain.BuildError, match="X='yes': allowed are 0, 1 or unset"):
        toolchain.is_set("X", {"X": "yes"})


def test_ninja_text_quotes_what_the_shell_would_split():
    compiled = graph.Edge("cxx", ["csrc/a b.cpp"], "build/x/objects/csrc/a b.cpp.o", ['-DX="it costs $5"'])
    linked = graph.Edge("link", [compiled.output], "build/x/c.so", ["-shared"])
    text = graph.ninja_text([compiled, linked], Path("build/x"), "/usr/bin/g++", None)
    assert "build build/x/objects/csrc/a$ b.cpp.o: cxx csrc/a$ b.cpp" in text
    assert """'-DX="it costs $$5"'""" in text
    assert "build build/x/c.so: link build/x/objects/csrc/a$ b.cpp.o" in text


SCRIPT = Path(graph.__file__).with_name("run_nvcc.py")


@pytest.mark.parametrize(
    ("says", "status", "made"),
    [
        ("ptxas info : used 40 registers", 0, True),
        ("error: no", 3, False),
        ("Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...", 0, False),
    ],
)
def test_run_nvcc_leaves_an_object_only_when_all_is_well(tmp_path, says, status, made):
    fake = tmp_path / "nvcc"
    fake.write_text(f"#!/bin/sh\necho '{says}'\nfor last; do :; done\ntouch \"$last\"\nexit {status}\n")
    fake.chmod(0o755)
    target = tmp_path / "kernels" / "a-1.o"
    done = subprocess.run([sys.executable, SCRIPT, target, fake, "-c", "a.cu"], capture_output=True, text=True)
    assert says in done.stdout
    assert (done.returncode == 0) == made
    assert sorted(path.name for path in target.parent.iterdir()) == (["a-1.log", "a-1.o"] if made else ["a-1.log"])


def test_a_kernel_of_every_folder_is_compiled_for_another_cpu():
    folders = {Path(source).parent for source in plan.sources(".cu", of_glue=False)}
    assert folders == {Path("csrc", name).parent for name in KERNELS}
