"""The source distribution has what the repository has and builds without a network, and its wheel works."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from build_support.plan import make_plan

pytestmark = pytest.mark.xdist_group("delivery")  # one build for all of them
ROOT = Path(__file__).resolve().parents[2]
BUILD_SDIST = "import sys; from build_support import backend; print(backend.build_sdist(sys.argv[1]))"


def run(*command: object, cwd: Path) -> str:
    """Without the paths of this process: what is tested is what was installed, not this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
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


@pytest.fixture(scope="module")
def fresh_python(sdist, tmp_path_factory) -> Path:
    """An environment with torch and the wheel. The objects of this checkout's own build spare minutes of compiling."""
    plan = make_plan()
    built = [ROOT / plan.glue_dir, ROOT / plan.library_dir, ROOT / "build" / "kernels"]
    if not (built[0].is_dir() and built[1].is_dir()):
        pytest.skip(f"there are no objects in {built[0]} and {built[1]}")
    for folder in filter(Path.is_dir, built):
        shutil.copytree(folder, sdist / folder.relative_to(ROOT))
    folder = tmp_path_factory.mktemp("fresh")
    offline = ("--disable-pip-version-check", "--no-index")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", *offline, "--no-build-isolation", "--no-deps", "--wheel-dir", folder, sdist, cwd=folder)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(packages) / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (wheel,) = folder.glob("*.whl")
    run(*pip, "--python", python, "install", *offline, wheel, cwd=folder)
    return python


def test_the_wheel_verifies_in_a_fresh_environment(fresh_python):
    folder = fresh_python.parents[2]
    place = "import flash_attn_ext; print(flash_attn_ext.__file__)"
    assert Path(run(fresh_python, "-c", place, cwd=folder).strip()).is_relative_to(folder)
    assert "keep the rule" in run(fresh_python, "-m", "flash_attn_ext", "verify", "--device", "cpu", cwd=folder)
