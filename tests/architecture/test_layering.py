"""Who may include or import whom. Each rule holds on the real tree, and catches a planted violation."""

import pytest

from architecture import cpp_rules, python_rules, rules

CPP_RULES = [
    cpp_rules.includes_go_down,
    cpp_rules.rooms_of_kernels_are_layered,
    cpp_rules.shared_tiles_know_no_backend,
    cpp_rules.include_graph_has_no_cycle,
    cpp_rules.kernels_are_free_of_torch,
    cpp_rules.cpu_builds_need_no_cuda,
    cpp_rules.asm_only_under_ptx,
    cpp_rules.code_of_one_processor_is_guarded,
    cpp_rules.nothing_prints,
]
PYTHON_RULES = [
    python_rules.imports_go_down,
    python_rules.imports_are_absolute,
    python_rules.private_names_of_torch_stand_in_one_module,
]


@pytest.mark.parametrize("rule", CPP_RULES, ids=lambda rule: rule.__name__)
def test_cpp_sources_keep(rule):
    assert list(rule(rules.cpp_sources())) == []


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python_sources_keep(rule):
    assert list(rule(rules.python_sources())) == []


def test_the_rules_see_the_sources():
    cpp, python = rules.cpp_sources(), rules.python_sources()
    assert {"bindings.cpp", "attention/visibility.h", "kernels/common/sums/delta.cu"} <= cpp.keys()
    assert {"flash_attn_ext/functional.py", "build_support/plan.py", "setup.py"} <= python.keys()


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (
            cpp_rules.includes_go_down,
            {"attention/a.h": '#include "host/checks.h"', "host/checks.h": ""},
        ),
        (cpp_rules.includes_go_down, {"tile/a.h": '#include "kernels/b.h"', "kernels/b.h": ""}),
        (cpp_rules.includes_go_down, {"host/a.h": '#include "vector"'}),
        (cpp_rules.includes_go_down, {"host/a.h": '#include "ptx/b.h"', "ptx/b.h": ""}),
        (
            cpp_rules.rooms_of_kernels_are_layered,
            {"kernels/sm90/a.cu": '#include "kernels/sm80/b.h"', "kernels/sm80/b.h": ""},
        ),
        (
            cpp_rules.rooms_of_kernels_are_layered,
            {"kernels/plan/a.cpp": '#include "kernels/sm80/b.h"', "kernels/sm80/b.h": ""},
        ),
        (cpp_rules.rooms_of_kernels_are_layered, {"kernels/attic/a.h": ""}),
        (
            cpp_rules.shared_tiles_know_no_backend,
            {"kernels/score/a.cuh": '#include "tile/sm80/b.h"', "tile/sm80/b.h": ""},
        ),
        (
            cpp_rules.include_graph_has_no_cycle,
            {"host/a.h": '#include "b.h"', "host/b.h": '#include "host/c.h"', "host/c.h": '#include "host/a.h"'},
        ),
        (cpp_rules.kernels_are_free_of_torch, {"kernels/sm80/a.h": "#include <ATen/ATen.h>"}),
        (
            cpp_rules.kernels_are_free_of_torch,
            {"library/a.cpp": '#include "b.h"', "library/b.h": "#include <Python.h>"},
        ),
        (cpp_rules.includes_go_down, {"library/a.h": '#include "host/b.h"', "host/b.h": ""}),
        (cpp_rules.cpu_builds_need_no_cuda, {"kernels/sm90/a.cpp": "#include <cuda_runtime_api.h>"}),
        (cpp_rules.cpu_builds_need_no_cuda, {"host/a.cpp": "#include <c10/cuda/CUDAStream.h>"}),
        (
            cpp_rules.cpu_builds_need_no_cuda,
            {"kernels/plan/a.cpp": '#include "kernels/b.h"', "kernels/b.h": "#include <cudaTypedefs.h>"},
        ),
        (
            cpp_rules.kernels_are_free_of_torch,
            {"kernels/x/a.cu": '#include "kernels/b.h"', "kernels/b.h": "# include <torch/types.h>"},
        ),
        (cpp_rules.asm_only_under_ptx, {"tile/a.h": 'inline void f() { asm volatile("bar.sync 0;"); }'}),
        (cpp_rules.code_of_one_processor_is_guarded, {"kernels/cpu/a.h": "#include <immintrin.h>"}),
        (cpp_rules.code_of_one_processor_is_guarded, {"kernels/cpu/a.h": "__m256 x = _mm256_setzero_ps();"}),
        (cpp_rules.nothing_prints, {"kernels/a.cu": 'void f() { printf("x"); }'}),
    ],
)
def test_a_planted_cpp_violation_is_found(rule, sources):
    assert list(rule(sources))


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (cpp_rules.includes_go_down, {"kernels/cpu/a.h": '#include "attention/b.h"', "attention/b.h": ""}),
        (cpp_rules.rooms_of_kernels_are_layered, {"host/a.h": '#include "kernels/cpu/b.h"', "kernels/cpu/b.h": ""}),
        (cpp_rules.kernels_are_free_of_torch, {"host/a.h": "#include <ATen/ATen.h>"}),
        (cpp_rules.asm_only_under_ptx, {"ptx/a.h": 'asm("x");', "tile/b.h": "// asm is elsewhere"}),
        (
            cpp_rules.code_of_one_processor_is_guarded,
            {"kernels/cpu/a.h": "#if defined(__x86_64__)\n#include <immintrin.h>\n#endif"},
        ),
        (cpp_rules.nothing_prints, {"host/a.h": 'auto f = std::snprintf; const char* s = "printf(";'}),
    ],
)
def test_what_is_allowed_passes(rule, sources):
    assert list(rule(sources)) == []


@pytest.mark.parametrize(
    "text",
    [
        "from flash_attn_ext import functional",
        "from flash_attn_ext.functional import attention",
        "import flash_attn_ext.cli.info",
        "from flash_attn_ext import attention",
        "def f():\n    import flash_attn_ext",
    ],
)
def test_a_planted_python_violation_is_found(text):
    assert list(python_rules.imports_go_down({"flash_attn_ext/autograd.py": text}))


def test_python_imports_downwards_pass():
    text = "import torch\nfrom flash_attn_ext import _C\nfrom flash_attn_ext._call.canonical import Problem\n"
    assert list(python_rules.imports_go_down({"flash_attn_ext/autograd.py": text})) == []


def test_a_new_python_module_needs_a_place():
    (violation,) = python_rules.imports_go_down({"flash_attn_ext/novel.py": ""})
    assert "novel has no place" in violation


def test_relative_imports_are_found():
    assert list(python_rules.imports_are_absolute({"flash_attn_ext/a.py": "from . import _C"}))


@pytest.mark.parametrize(
    "text", ["from torch._functorch import x", "from torch.cuda import _sleep", "torch._C._x()", "import torch._x"]
)
def test_private_names_of_torch_are_found(text):
    rule = python_rules.private_names_of_torch_stand_in_one_module
    assert list(rule({"flash_attn_ext/cli/a.py": text}))
    assert list(rule({python_rules.PRIVATE_NAMES_OF_TORCH: text, "tests/a.py": text})) == []
    allowed = "torch.__version__; torch.fx.wrap; self._x; from flash_attn_ext import _C"
    assert list(rule({"flash_attn_ext/a.py": allowed})) == []
