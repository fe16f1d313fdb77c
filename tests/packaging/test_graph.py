"""The build graph: what is compiled with which flags, and what makes an object stale."""

import subprocess
import sys
from pathlib import Path

import pytest

from build_support import graph, plan
from build_support.archs import parse_archs
from build_support.toolchain import CudaDecision, Nvcc, TorchInfo

NVCC = Nvcc(Path("/usr/local/cuda/bin/nvcc"), "13.0", "release 13.0, V13.0.88")
TORCH = TorchInfo("2.11.0+cu130", "13.0", Path("/venv/torch"))


def make_plan(cuda: bool = True, archs: str = "8.0;9.0a+PTX") -> plan.Plan:
    decision = CudaDecision(cuda, "CUDA build" if cuda else 'CPU-only build: the "reason"')
    return plan.Plan(TORCH, "/usr/bin/g++", Path("/py/include"), decision, NVCC, parse_archs(archs) if cuda else [])


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A small project; returns its csrc folder."""
    csrc = tmp_path / "csrc"
    files = {
        "bindings.cpp": '#include "host/a.h"\n',
        "host/a.h": "",
        "host/info.cpp": 'const char* archs = FLASH_ATTN_EXT_CUDA_ARCHS;  // "FLASH_ATTN_EXT_NOT_BUILT"\n',
        "kernels/common/delta.cu": '#include "kernels/common/delta.h"\n#include <cuda_fp16.h>\n',
        "kernels/common/delta.h": '#include "../../attention/params.h"\n',
        "attention/params.h": "struct Params {};\n",
        "kernels/sm90/forward.cu": '#include "attention/params.h"\n',
        "unrelated.h": "",
    }
    for name, text in files.items():
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(text)
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    return csrc


def edges(made: graph.Graph) -> dict[str, graph.Edge]:
    return {edge.source: edge for edge in made.edges}


def test_each_source_has_one_edge(tree):
    made = plan.make_graph(make_plan(), "build/kernels")
    assert {edge.source: edge.rule for edge in made.edges} == {
        "csrc/bindings.cpp": "cxx",
        "csrc/host/info.cpp": "cxx",
        "csrc/kernels/common/delta.cu": "nvcc",
        "csrc/kernels/sm90/forward.cu": "nvcc",
    }
    assert len(made.objects) == 4


def test_nvcc_never_sees_torch_or_python(tree):
    for edge in plan.make_graph(make_plan(), "build/kernels").edges:
        if edge.rule == "nvcc":
            assert not [flag for flag in edge.flags if "torch" in flag or "/py/" in flag]
            assert "-Icsrc" in edge.flags


def test_cpp_files_see_torch_and_python(tree):
    flags = edges(plan.make_graph(make_plan(), "build/kernels"))["csrc/bindings.cpp"].flags
    assert {"/venv/torch/include", "/py/include", "-DFLASH_ATTN_EXT_WITH_CUDA=1", "-std=c++20"} <= set(flags)
    assert not [flag for flag in flags if flag.startswith(("-march", "-mtune", "-mavx"))]


def test_cpu_only_build_has_no_cuda_in_it(tree):
    made = plan.make_graph(make_plan(cuda=False), "build/kernels")
    assert not [edge for edge in made.edges if edge.rule == "nvcc"]
    flags = edges(made)["csrc/host/info.cpp"].flags
    assert "-DFLASH_ATTN_EXT_NOT_BUILT=\"the 'reason'\"" in flags
    assert not [flag for flag in flags if "WITH_CUDA" in flag]


def test_only_the_file_that_reports_the_build_depends_on_the_architectures(tree):
    before, after = (edges(plan.make_graph(make_plan(archs=archs), "build/kernels")) for archs in ("8.0", "8.6"))
    assert before["csrc/bindings.cpp"] == after["csrc/bindings.cpp"]
    assert before["csrc/host/info.cpp"] != after["csrc/host/info.cpp"]


def test_hopper_kernels_are_left_out_where_no_hopper_is_wanted(tree):
    made = plan.make_graph(make_plan(archs="8.0"), "build/kernels")
    assert "csrc/kernels/sm90/forward.cu" not in edges(made)


def kernel_name(tree: Path, flags: tuple[str, ...] = ("-O3",), nvcc: Nvcc = NVCC) -> str:
    return graph.kernel_object_name(tree / "kernels/common/delta.cu", tree, flags, nvcc)


def test_include_closure(tree):
    closure = graph.include_closure(tree / "kernels/common/delta.cu", tree)
    names = [path.relative_to(tree.resolve()).as_posix() for path in closure]
    assert names == ["attention/params.h", "kernels/common/delta.cu", "kernels/common/delta.h"]


@pytest.mark.parametrize("changed", ["kernels/common/delta.cu", "kernels/common/delta.h", "attention/params.h"])
def test_a_change_to_what_a_kernel_reads_names_a_new_object(tree, changed):
    before = kernel_name(tree)
    (tree / changed).write_text((tree / changed).read_text() + "// changed\n")
    assert kernel_name(tree) != before


def test_other_changes_do_not(tree):
    before = kernel_name(tree)
    (tree / "unrelated.h").write_text("struct New {};")
    (tree / "kernels/common/delta.cu").touch()
    assert kernel_name(tree) == before
    assert kernel_name(tree, flags=("-O2",)) != before
    assert kernel_name(tree, nvcc=Nvcc(NVCC.path, "13.0", "release 13.0, V13.0.99")) != before


def test_a_kernel_object_that_is_there_is_not_compiled(tree):
    name = next(o for o in plan.make_graph(make_plan(), "build/kernels").objects if "delta" in o)
    (tree.parent / name).parent.mkdir(parents=True)
    (tree.parent / name).touch()
    made = plan.make_graph(make_plan(), "build/kernels")
    assert "csrc/kernels/common/delta.cu" not in edges(made)
    assert name in made.objects


def test_prune_removes_older_objects_of_the_same_sources_only(tmp_path):
    for name in ("a.b-1.o", "a.b-1.log", "a.b-2.o", "a.b-2.log", "c-1.o"):
        (tmp_path / name).touch()
    graph.prune_kernels(tmp_path, ["a.b-2.o"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b-2.log", "a.b-2.o", "c-1.o"]


def test_ninja_text_quotes_what_the_shell_would_split():
    made = graph.Graph(Path("build/x"), "/usr/bin/g++")
    made.add_cxx("csrc/a b.cpp", ['-DX="it costs $5"'])
    text = made.to_ninja("build/x/_C.so", ["-shared"])
    assert "build build/x/objects/csrc/a$ b.cpp.o: cxx csrc/a$ b.cpp" in text
    assert """'-DX="it costs $$5"'""" in text


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
