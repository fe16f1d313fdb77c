"""The library of kernels needs neither torch nor Python, and `import flash_attn_ext` says what is wrong with a library
and an extension that do not fit."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn_ext
from build_support import build, plan
from flash_attn_ext import _load
from flash_attn_ext.cli.machine import installation as installation_of_this_process
from support.forks import run_forked
from support.host_programs import run_host_program

PACKAGE = Path(flash_attn_ext.__file__).parent
LIBRARY = PACKAGE / _load.LIBRARY
EXPORTS = {"flash_attn_ext_kernels", "flash_attn_ext_kernels_facts"}


def symbols(*options: str) -> list[str]:
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    listing = subprocess.run(["nm", "-D", *options, LIBRARY], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in listing.splitlines()]


def test_nothing_is_exported_but_the_interface():
    assert set(symbols("--defined-only")) == EXPORTS


def test_no_symbol_of_torch_python_or_the_cuda_runtime_is_needed():
    foreign = re.compile(r"^_?Py|torch|c10|_ZN2at|^cuda|^__cuda|^cu[A-Z]|GOMP")
    assert [name for name in symbols("--undefined-only") if foreign.search(name)] == []


def test_the_library_says_what_it_is():
    facts, info = plan.facts_of(LIBRARY), flash_attn_ext._C.build_info()
    assert facts.interface == plan.interface_digest()
    assert facts.version == flash_attn_ext.__version__ == info["version"]
    assert facts[2:] == (info["compiler"], info["cuda_version"], info["cuda_archs"])


def test_a_program_without_torch_runs_the_kernels(tmp_path):
    """It links with the library alone."""
    linked = (LIBRARY, f"-Wl,-rpath,{PACKAGE}")
    run_host_program(Path(__file__).with_name("library_program.cpp"), tmp_path, *linked)


def test_gpus_that_the_library_knows(tmp_path):
    """A failure to describe a GPU is not kept, no GPU waits for another one to be described, and a GPU without code is
    known before a launch."""
    run_host_program(Path(__file__).with_name("known_gpus.cpp"), tmp_path, options=("-pthread",))


def test_no_function_of_the_library_is_called_for_a_gpu_without_code(tmp_path):
    """The one way to a stream asks whether there is code, so it holds for every function that launches."""
    torch_folder = Path(torch.__file__).parent
    options = ("-isystem", torch_folder / "include", '-DFLASH_ATTN_EXT_INTERFACE="x"', '-DFLASH_ATTN_EXT_VERSION="x"')
    libraries = (f"-L{torch_folder / 'lib'}", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}")
    host = plan.ROOT / plan.INCLUDE_ROOT / "host" / "library" / "library.cpp"
    run_host_program(Path(__file__).with_name("launches.cpp"), tmp_path, host, *libraries, options=options)


@pytest.fixture
def installation(tmp_path) -> Path:
    """A copy of the package, so far as `import` gets before it fails."""
    copy = tmp_path / "flash_attn_ext"
    copy.mkdir()
    for name in ("__init__.py", "_import_errors.py", "_load.py"):
        shutil.copy2(PACKAGE / name, copy / name)
    return copy


def import_error(installation: Path) -> str:
    program = f"import sys; sys.path.insert(0, {str(installation.parent)!r}); import flash_attn_ext"
    process = run_forked(program)
    assert process.returncode != 0
    return process.stderr[process.stderr.rindex("ImportError: ") :]


GLUE = _load.glue_for(torch.__version__)
COMMAND = f"\n    {sys.executable} -m pip install --no-build-isolation ."


def test_an_installation_that_is_not_built(installation):
    message = import_error(installation)
    assert "its C++ extension is not built" in message
    assert f"PyTorch {torch.__version__}" in message and COMMAND in message


def test_other_copies_on_the_path_are_named(installation):
    assert f"Python's path has other copies: {PACKAGE}" in import_error(installation)


def test_other_copies_are_known_where_this_one_works(tmp_path, monkeypatch):
    """`info` lists them."""
    (tmp_path / "flash_attn_ext").mkdir()
    (tmp_path / "flash_attn_ext" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(tmp_path / "flash_attn_ext") in installation_of_this_process()["other_copies"]


def test_an_installation_for_other_versions_of_torch(installation):
    """It says which they are, in their order."""
    for version in ("9.10", "9.9"):
        (installation / GLUE.name.replace(_load.minor_version(torch.__version__), version)).touch()
    message = import_error(installation)
    assert f"no C++ extension for PyTorch {torch.__version__}" in message
    assert "only for PyTorch 9.9 and 9.10 and this Python" in message and COMMAND in message


def test_an_installation_for_another_python(installation):
    name = GLUE.name.replace(_load.SUFFIX, ".cpython-39-x86_64-linux-gnu.so")
    (installation / name).touch()
    assert f"only {name}" in import_error(installation)


def test_an_extension_without_its_library(installation):
    shutil.copy2(GLUE, installation)
    assert f"{_load.LIBRARY}: cannot open shared object file" in import_error(installation)


def test_the_library_beside_the_extension_comes_before_others(tmp_path):
    """Those in LD_LIBRARY_PATH too, which may have another installation."""
    (tmp_path / _load.LIBRARY).write_bytes(b"no library")
    program = "import torch, flash_attn_ext; print(flash_attn_ext.__file__)"
    environment = dict(os.environ, LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    process = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert process.stdout.strip() == str(PACKAGE / "__init__.py"), process.stderr


def test_an_extension_with_the_library_of_another_version(installation):
    shutil.copy2(GLUE, installation)
    digest = plan.interface_digest().encode()
    contents = LIBRARY.read_bytes()
    assert digest in contents
    (installation / _load.LIBRARY).write_bytes(contents.replace(digest, b"0123456789abcdef"))
    message = import_error(installation)
    assert "0123456789abcdef" in message and digest.decode() in message
    assert flash_attn_ext.__version__ in message and COMMAND in message


def test_a_build_removes_glues_that_its_library_would_refuse(tmp_path):
    """Those of earlier sources. One for another torch, of these sources, stays."""
    names = ("_C.torch-2.11.so", "_C.torch-2.12.so", "_C.torch-2.13.so", "_C.cpython-311-x86_64-linux-gnu.so")
    for name in names:
        (tmp_path / name).write_bytes(b"an older interface")
    (tmp_path / names[1]).write_bytes(b"..." + plan.interface_digest().encode())
    build.remove_unfit_glues(tmp_path, {names[0]})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[:2])
