"""Messages for users whose ``import flash_attn_ext`` fails: what was found, what there is, and one command."""

from __future__ import annotations

import platform
import shlex
import sys

from flash_attn_ext import _load


def explain_missing_extension(error: ImportError, version: str, torch_version: str) -> str:
    """One message for "not built", for "built for another torch or Python", and for what the loader refuses."""
    here = f"PyTorch {torch_version} and Python {platform.python_version()}"
    offered = _load.torch_versions()
    others = sorted(path.name for path in _load.PACKAGE.glob("_C.*.so"))
    if _load.glue_for(torch_version).is_file():
        situation = f"its C++ extension for {here} cannot be loaded. The loader says: {error}"
    elif offered:
        situation = f"there is no C++ extension for {here}, only for PyTorch {' and '.join(offered)} and this Python"
    elif others:
        situation = f"there is no C++ extension for {here}, only {', '.join(others)}"
    else:
        situation = f"its C++ extension is not built: there is no _C.*.so in {_load.PACKAGE}"
    copies = ", ".join(_load.other_copies())
    copies = f"Python's path has other copies: {copies}.\n" if copies else ""
    return (
        f"flash_attn_ext {version} cannot be imported from {_load.PACKAGE}: {situation}.\n"
        f"{copies}"
        f"Build it for {here}, in a checkout of the sources of {version}:\n"
        f"    {_command(reuses_kernels=not _load.glue_for(torch_version).is_file())}"
    )


def _command(reuses_kernels: bool) -> str:
    """The kernels of a whole installation need no compiling again. A checkout knows what of it is up to date."""
    install = f"{shlex.quote(sys.executable)} -m pip install --no-build-isolation"
    if (_load.PACKAGE.parent / "build_support").is_dir():
        return f"{install} -e ."
    library = _load.PACKAGE / _load.LIBRARY
    if not reuses_kernels or not library.is_file():
        return f"{install} ."
    return f"FLASH_ATTN_EXT_KERNEL_OBJECTS={shlex.quote(str(library))} {install} ."
