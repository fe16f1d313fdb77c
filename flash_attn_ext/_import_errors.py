"""Messages for users whose ``import flash_attn_ext`` fails."""

from __future__ import annotations

from pathlib import Path

import torch

BUILD_COMMAND = "pip install --no-build-isolation -e ."


def explain_missing_extension(error: ImportError) -> str:
    """One message for "not built" and one for "built, but for something else", each with the command that helps."""
    package = Path(__file__).resolve().parent
    found = sorted(path.name for path in package.glob("_C.*.so")) + sorted(path.name for path in package.glob("_C.so"))
    if not found:
        situation = f"its C++ extension is not built: there is no _C*.so in {package}"
    else:
        situation = (
            f"its C++ extension cannot be loaded ({', '.join(found)} in {package}); most often it was built for "
            f"another version of PyTorch or Python. The loader says: {error}"
        )
    return _with_command(situation)


def explain_other_torch(built_for: str) -> str | None:
    """A message if PyTorch is not the version that the extension was built for. PyTorch promises no binary
    compatibility between minor versions, even if the extension happens to load."""
    if built_for.split(".")[:2] == torch.__version__.split(".")[:2]:
        return None
    return _with_command(f"its C++ extension was built for PyTorch {built_for}")


def _with_command(situation: str) -> str:
    return (
        f"flash_attn_ext cannot be imported: {situation}.\n"
        f"Build it against the PyTorch that is installed here ({torch.__version__}), in a checkout of the sources:\n"
        f"    {BUILD_COMMAND}"
    )
