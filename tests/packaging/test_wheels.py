"""Which glue a wheel has, and kernels that are taken from a library instead of being compiled."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import flash_attn_ext
from build_support import plan, wheels
from build_support.toolchain import BuildError, TorchInfo
from flash_attn_ext import _load

LIBRARY = _load.PACKAGE / _load.LIBRARY


def torch_in(folder: Path, version: str, cuda: str | None = None) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    return folder / "torch"


def test_a_build_has_a_glue_for_each_torch_that_is_named(monkeypatch, tmp_path):
    folders = [torch_in(tmp_path / version, version) for version in ("2.12.1", "2.14.0")]
    monkeypatch.setenv("FLASH_ATTN_EXT_TORCH_FOLDERS", os.pathsep.join(map(str, folders)))
    first, second = plan.make_plans()
    assert (first.torch, second.torch) == (TorchInfo("2.12.1", None, folders[0]), TorchInfo("2.14.0", None, folders[1]))
    assert first.library_dir == second.library_dir
    assert [made.glue_name for made in (first, second)] == [f"_C.torch-{v}{_load.SUFFIX}" for v in ("2.12", "2.14")]


def test_the_glue_of_a_build_is_the_one_that_is_loaded(monkeypatch):
    monkeypatch.delenv("FLASH_ATTN_EXT_TORCH_FOLDERS", raising=False)
    (made,) = plan.make_plans()
    assert made.glue_name == _load.glue_for(torch.__version__).name


def test_a_folder_without_torch_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASH_ATTN_EXT_TORCH_FOLDERS", str(tmp_path))
    with pytest.raises(BuildError, match=rf"no torch in {tmp_path}"):
        plan.make_plans()


def test_where_make_wheels_finds_torch(tmp_path):
    own = Path(torch.__file__).parent
    assert wheels.torch_folder(torch.__version__.split("+")[0]) == own
    assert wheels.torch_folder(str(own.parent)) == own
    folder = torch_in(tmp_path / "lib" / "python3.11" / "site-packages", "2.12.0")
    assert wheels.torch_folder(str(tmp_path)) == folder
    with pytest.raises(BuildError, match="no torch in"):
        wheels.torch_folder(str(tmp_path / "lib" / "python3.11" / "site-packages" / "torch"))


def test_kernels_of_a_library_need_no_nvcc(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL_OBJECTS", str(LIBRARY))
    (made,) = plan.make_plans()
    assert made.nvcc is None and made.message == f"kernels of {LIBRARY}"


def test_a_library_without_cuda_is_refused_where_cuda_is_asked_for(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL_OBJECTS", str(LIBRARY))
    monkeypatch.setenv("FLASH_ATTN_EXT_CUDA", "1")
    facts = plan.facts_of(LIBRARY)
    monkeypatch.setattr(plan, "facts_of", lambda path: facts._replace(cuda_version=None))
    with pytest.raises(BuildError, match="no kernels for GPUs"):
        plan.make_plans()


@pytest.mark.parametrize("contents", [b"", b"other"], ids=["missing", "not a library"])
def test_what_is_no_library_is_refused(contents, monkeypatch, tmp_path):
    path = tmp_path / _load.LIBRARY
    if contents:
        path.write_bytes(contents)
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL_OBJECTS", str(path))
    with pytest.raises(BuildError, match="no library of kernels" if contents else "no such library"):
        plan.make_plans()


def test_a_library_of_other_sources_is_refused(monkeypatch, tmp_path):
    path = tmp_path / _load.LIBRARY
    shutil.copy2(LIBRARY, path)
    path.write_bytes(path.read_bytes().replace(plan.interface_digest().encode(), b"0123456789abcdef"))
    monkeypatch.setenv("FLASH_ATTN_EXT_KERNEL_OBJECTS", str(path))
    with pytest.raises(BuildError, match="has the interface 0123456789abcdef") as error:
        plan.make_plans()
    assert flash_attn_ext.__version__ in str(error.value)
