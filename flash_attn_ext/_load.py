"""Loads the extension module ``flash_attn_ext._C``: of those beside this file, that for the running torch and Python.

The kernels are in a library of their own, which depends on neither torch nor Python and which the module finds beside
itself. The module is the glue between both, so an installation may have one for each of several versions of torch.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LIBRARY = "libflash_attn_ext_kernels.so"
SUFFIX = EXTENSION_SUFFIXES[0]  # ".cpython-311-x86_64-linux-gnu.so"


def minor_version(torch_version: str) -> str:
    """ "2.11.0+cu130" -> "2.11". PyTorch promises no binary compatibility between these."""
    return ".".join(torch_version.split(".")[:2])


def glue_for(torch_version: str) -> Path:
    """build_support/plan.py gives the file this name."""
    return PACKAGE / f"_C.torch-{minor_version(torch_version)}{SUFFIX}"


def torch_versions() -> list[str]:
    """The minor versions of torch for which there is a module, for this Python."""
    names = (path.name for path in PACKAGE.glob(f"_C.torch-*{SUFFIX}"))
    found = [name.removeprefix("_C.torch-").removesuffix(SUFFIX) for name in names]
    return sorted(found, key=lambda version: [int(number) for number in re.findall(r"\d+", version)])


def other_copies() -> list[str]:
    """Folders of this package elsewhere on Python's path, one of which may be the one that was meant."""
    folders = {(Path(entry or ".") / str(__package__)).resolve() for entry in sys.path}
    return sorted(str(folder) for folder in folders - {PACKAGE} if (folder / "__init__.py").is_file())


def load_extension(torch_version: str) -> None:
    """Raises ImportError as the dynamic loader or the module words it."""
    name = f"{__package__}._C"
    path = glue_for(torch_version)
    if not path.is_file():
        raise ImportError(f"there is no {path.name} in {PACKAGE}")
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    vars(sys.modules[__package__])["_C"] = module  # as an import statement does
