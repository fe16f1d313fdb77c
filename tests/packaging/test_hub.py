"""The layout that Hugging Face's package `kernels` loads from, made of a wheel."""

import json
import platform
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

import flash_attn_ext
from build_support import hub, plan
from build_support.toolchain import BuildError
from flash_attn_ext import _load
from support.forks import run_forked


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """Of what is installed here, as wheels have it, and of a torch and a Python that there is no glue for."""
    folder = tmp_path_factory.mktemp("hub")
    own = _load.glue_for(torch.__version__).name
    others = ("_C.torch-99.0" + _load.SUFFIX, "_C.torch-99.0.cpython-39-x86_64-linux-gnu.so")
    for number, added in enumerate(others):
        with zipfile.ZipFile(folder / f"{number}.whl", "w") as wheel:
            for path in _load.PACKAGE.rglob("*"):
                if path.suffix in (".py", ".pyi", ".typed") or path.name in (_load.LIBRARY, own):
                    wheel.write(path, Path("flash_attn_ext") / path.relative_to(_load.PACKAGE))
            wheel.writestr(f"flash_attn_ext/{added}", "")
            wheel.writestr("flash_attn_ext-0.dist-info/RECORD", "")
    hub.main(sorted(folder.glob("*.whl")), folder / "hub")
    return folder / "hub"


def name_of(torch_version: str, backend: str) -> str:
    return f"torch{torch_version.replace('.', '')}-cxx11-{backend}-{platform.machine()}-linux"


def backends() -> list[str]:
    cuda = plan.facts_of(_load.PACKAGE / _load.LIBRARY).cuda_version
    return [*([f"cu{cuda.replace('.', '')}"] if cuda else []), "cpu"]


def test_each_version_of_torch_has_its_glue_alone(repository):
    own = _load.minor_version(torch.__version__)
    names = {name_of(version, backend) for version in (own, "99.0") for backend in backends()}
    assert {path.name for path in (repository / "build").iterdir()} == names
    for version, count in ((own, 1), ("99.0", 2)):
        package = repository / "build" / name_of(version, "cpu") / "flash_attn_ext"
        glues = [path.name for path in package.glob("_C.torch-*")]
        assert len(glues) == count and all(name.startswith(f"_C.torch-{version}.") for name in glues)
        assert (package / _load.LIBRARY).is_file()


def test_metadata(repository):
    for backend in backends():
        variant = repository / "build" / name_of("99.0", backend)
        facts = json.loads((variant / "metadata.json").read_text())
        assert facts["name"] == "flash-attn-ext" and facts["backend"]["type"] == ("cpu" if backend == "cpu" else "cuda")
        assert ("archs" in facts["backend"]) == (backend != "cpu")


def test_no_wheel_is_an_error(tmp_path):
    with pytest.raises(BuildError, match="there is no wheel of flash_attn_ext"):
        hub.main([], tmp_path)


USE = """
import torch
q = torch.randn(1, 2, 5, 8)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
torch.testing.assert_close(module.scaled_dot_product_attention(q, q, q), expected)
print(module.attention.__module__, module.__version__, __import__("flash_attn_ext").__file__)
"""
IMPORT = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("another_name", Path(sys.argv[1]) / "__init__.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def run(program: str, argument: Path, folder: Path) -> subprocess.CompletedProcess:
    return run_forked(program, argument, folder=folder)


def test_a_variant_is_imported_under_any_name(repository, tmp_path):
    variant = repository / "build" / name_of(_load.minor_version(torch.__version__), "cpu")
    process = run(IMPORT + USE, variant, tmp_path)
    assert process.returncode == 0, process.stderr
    module, version, file = process.stdout.split()
    assert (module, version) == ("flash_attn_ext.functional", flash_attn_ext.__version__)
    assert Path(file).is_relative_to(variant)


def test_a_second_copy_is_refused(repository, tmp_path):
    variant = repository / "build" / name_of(_load.minor_version(torch.__version__), "cpu")
    program = f"import sys; sys.path.insert(0, {str(_load.PACKAGE.parent)!r}); import flash_attn_ext\n" + IMPORT
    process = run(program, variant, tmp_path)
    assert process.returncode != 0
    assert f"is imported already, from {flash_attn_ext.__file__}" in process.stderr


def test_the_package_kernels_loads_it(repository, tmp_path):
    """`make test-hub` installs it. On a torch with CUDA it takes the variant of the library's CUDA version."""
    pytest.importorskip("kernels")
    load = "import sys, kernels; from pathlib import Path; module = kernels.get_local_kernel(Path(sys.argv[1]))\n"
    process = run(load + USE, repository, tmp_path)
    assert process.returncode == 0, process.stderr
    assert Path(process.stdout.split()[-1]).is_relative_to(repository / "build")
