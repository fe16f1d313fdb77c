"""`python -m build_support.wheels TORCH...`: one wheel in dist/ for this Python, with a glue for each torch.

A torch is a version, `newest`, or a folder in which there is one, such as a virtual environment. Only headers and
libraries to link with are used of it: it is unpacked without what it depends on, and not run.
"""

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

from build_support.plan import ROOT
from build_support.toolchain import BuildError, read_torch

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def torch_folder(wanted: str) -> Path:
    """The folder of the package."""
    if (folder := Path(wanted)).is_dir():
        places = (folder, *folder.glob("lib/python*/site-packages"))
        found = [place.absolute() / "torch" for place in places if (place / "torch" / "version.py").is_file()]
        if not found:
            raise BuildError(f"there is no torch in {folder.absolute()} or its lib/python*/site-packages.")
        return found[0]
    if (own := importlib.util.find_spec("torch")) and read_torch(Path(own.origin).parent).version.split("+")[
        0
    ] == wanted:
        return Path(own.origin).parent
    target = ROOT / "build" / "torch" / platform.machine() / sys.implementation.cache_tag / wanted
    if not (target / "torch" / "version.py").is_file():
        requirement = "torch" if wanted == "newest" else f"torch=={wanted}"
        subprocess.run([*PIP, "install", "--no-deps", "--target", str(target), requirement], check=True)
    return target / "torch"


def main(wanted: list[str]) -> None:
    folders = [torch_folder(torch) for torch in wanted]
    for folder in folders:
        print(f"flash_attn_ext: a glue for torch {read_torch(folder).version}", flush=True)
    environment = os.environ | {"FLASH_ATTN_EXT_TORCH_FOLDERS": os.pathsep.join(map(str, folders))}
    command = [*PIP, "wheel", "--no-build-isolation", "--no-index", "--no-deps", "--wheel-dir", "dist", "."]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BuildError as error:
        sys.exit(f"\nflash_attn_ext cannot be built: {error}\n")
