"""The source distribution has what the repository has and builds without a network, and its wheel works."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from build_support.plan import LIBRARY, make_plans
from support.readme import readme_program

pytestmark = pytest.mark.xdist_group("delivery")  # one build for all of them
ROOT = Path(__file__).resolve().parents[2]
BUILD_SDIST = "import sys; from build_support import backend; print(backend.build_sdist(sys.argv[1]))"


def run(*command: object, cwd: Path, **variables: str) -> str:
    """Without the paths of this process: what is tested is what was installed, not this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    process = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    try:
        names = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no git checkout: {error}")
    return [name for name in names.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tracked, tmp_path_factory) -> Path:
    """Unpacked. Made from a copy, since setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked:
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "checkout" / name)
    archive = run(sys.executable, "-c", BUILD_SDIST, folder, cwd=folder / "checkout").splitlines()[-1]
    shutil.unpack_archive(folder / archive, folder)
    return folder / archive.removesuffix(".tar.gz")


def test_the_source_distribution_has_every_file(sdist, tracked):
    assert [name for name in tracked if not (sdist / name).is_file()] == []


PIP = (sys.executable, "-m", "pip")
OFFLINE = ("--disable-pip-version-check", "--no-index")


def without_network() -> tuple[str, ...]:
    """What starts a command in a network of its own, where the system lets users have one."""
    prefix = ("unshare", "--map-root-user", "--net")
    allowed = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if allowed else ()


def make_wheel(sdist: Path, folder: Path, **variables: str) -> str:
    """Returns pip's log, which has what the build prints."""
    options = (*OFFLINE, "--no-build-isolation", "--no-deps", "--wheel-dir", folder, "--log", folder / "log")
    run(*without_network(), *PIP, "wheel", *options, sdist, cwd=folder, **variables)
    return (folder / "log").read_text()


@pytest.fixture(scope="module")
def fresh_python(sdist, tmp_path_factory) -> Path:
    """An environment with torch and the wheel. The objects of this checkout's own build spare minutes of compiling."""
    plan = make_plans()[0]
    built = [ROOT / plan.glue_dir, ROOT / plan.library_dir, ROOT / "build" / "kernels"]
    if not (built[0].is_dir() and built[1].is_dir()):
        pytest.skip(f"there are no objects in {built[0]} and {built[1]}")
    for folder in filter(Path.is_dir, built):
        shutil.copytree(folder, sdist / folder.relative_to(ROOT))
    folder = tmp_path_factory.mktemp("fresh")
    make_wheel(sdist, folder)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(packages) / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (wheel,) = folder.glob("*.whl")
    run(*PIP, "--python", python, "install", *OFFLINE, wheel, cwd=folder)
    return python


def installed(python: Path) -> Path:
    place = "import flash_attn_ext; print(flash_attn_ext.__file__)"
    return Path(run(python, "-c", place, cwd=python.parents[2]).strip()).parent


def test_the_wheel_verifies_in_a_fresh_environment(fresh_python):
    folder = fresh_python.parents[2]
    assert installed(fresh_python).is_relative_to(folder)
    assert "keep the rule" in run(fresh_python, "-m", "flash_attn_ext", "verify", "--device", "cpu", cwd=folder)


def test_the_wheel_needs_nothing_on_the_path(fresh_python, tmp_path):
    """Neither a compiler nor nvcc nor any variable: the Python of README runs."""
    (tmp_path / "program.py").write_text(readme_program(), encoding="utf-8")
    nothing = {"PATH": str(tmp_path / "nothing"), "HF_HUB_OFFLINE": "1"}

    def run_python(*arguments: str) -> str:
        process = subprocess.run([fresh_python, *arguments], cwd=tmp_path, env=nothing, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout

    assert run_python("-c", "import shutil; print(shutil.which('g++'))") == "None\n"
    run_python("-B", "program.py")


def test_the_wheel_has_one_library_and_one_glue(fresh_python):
    names = sorted(path.name for path in installed(fresh_python).glob("*.so"))
    assert names == [make_plans()[0].glue_name, LIBRARY]


IMPORT_WITH_ANOTHER_TORCH = """
import torch
torch.__version__ = "99.0.0"
try:
    import flash_attn_ext
except ImportError as error:
    print(error)
"""


def test_a_torch_without_a_glue_is_told_which_there_are(fresh_python):
    """As after an upgrade of torch in place. The command reuses the kernels."""
    package = installed(fresh_python)
    message = run(fresh_python, "-c", IMPORT_WITH_ANOTHER_TORCH, cwd=package.parent.parent)
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"no C++ extension for PyTorch 99.0.0 and Python {platform.python_version()}" in message
    assert f"only for PyTorch {minor} and this Python" in message
    assert f"\n    FLASH_ATTN_EXT_KERNEL_OBJECTS={package / LIBRARY} {fresh_python} -m pip install" in message


WHICH_GLUE = """
import sys, torch
torch.__version__ = sys.argv[1]
import flash_attn_ext
print(flash_attn_ext._C.__file__)
"""


def test_an_upgrade_and_a_downgrade_of_torch_in_place(fresh_python):
    """Of an installation with a glue for both: each time that for the torch at hand is loaded."""
    package = installed(fresh_python)
    own = make_plans()[0].glue_name
    other = f"_C.torch-99.1{sysconfig.get_config_var('EXT_SUFFIX')}"
    os.link(package / own, package / other)
    try:
        for version, name in ((torch.__version__, own), ("99.1.0", other), (torch.__version__, own)):
            loaded = run(fresh_python, "-c", WHICH_GLUE, version, cwd=package.parent.parent).strip()
            assert loaded == str(package / name)
    finally:
        (package / other).unlink()


def test_a_source_install_takes_the_kernels_of_the_wheel(sdist, fresh_python, tmp_path):
    """It compiles the glue alone, whose objects are there already, and looks for no nvcc."""
    library = installed(fresh_python) / LIBRARY
    words = make_wheel(sdist, tmp_path, FLASH_ATTN_EXT_KERNEL_OBJECTS=str(library), CUDA_HOME="/none")
    assert f"flash_attn_ext: kernels of {library}" in words
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"flash_attn_ext/{LIBRARY}") == library.read_bytes()
        assert f"flash_attn_ext/{make_plans()[0].glue_name}" in archive.namelist()
