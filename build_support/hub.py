"""`python -m build_support.hub`: makes a repository for Hugging Face's package `kernels` of dist's wheels.

That package takes a folder build/torch…-cxx11-cu…-…-linux for each minor version of torch and each platform. Ours has
the whole package inside, with a glue for each Python of the wheels. One folder serves a torch with nvcc's CUDA version
or a later one of the same major version, another one a torch for CPUs.
"""

import json
import os
import platform
import re
import shutil
import sys
import zipfile
from pathlib import Path

from build_support.plan import LIBRARY, ROOT, LibraryFacts, facts_of, version
from build_support.toolchain import BuildError

GLUE = re.compile(r"flash_attn_ext/_C\.torch-(\d+)\.(\d+)\.")


def main(wheels: list[Path], repository: Path) -> list[Path]:
    """Returns the folders of variants."""
    if not wheels:
        raise BuildError(f"there is no wheel of flash_attn_ext {version()} in dist.", "make wheel", "make hub")
    shutil.rmtree(repository, ignore_errors=True)
    unpacked = repository / "unpacked"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith("flash_attn_ext/")])
    facts = facts_of(unpacked / "flash_attn_ext" / LIBRARY)
    files = sorted(path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file())
    torches = sorted({match.groups() for path in files if (match := GLUE.match(path.as_posix()))})
    cuda = [f"cu{facts.cuda_version.replace('.', '')}"] if facts.cuda_version else []
    variants = []
    for major, minor in torches:
        for backend in [*cuda, "cpu"]:
            variant = repository / "build" / f"torch{major}{minor}-cxx11-{backend}-{platform.machine()}-linux"
            for path in files:
                glue = GLUE.match(path.as_posix())
                if glue is None or glue.groups() == (major, minor):
                    (variant / path).parent.mkdir(parents=True, exist_ok=True)
                    os.link(unpacked / path, variant / path)
            shutil.copy2(Path(__file__).with_name("hub_init.py"), variant / "__init__.py")
            (variant / "metadata.json").write_text(json.dumps(metadata(facts, backend), indent=2) + "\n")
            variants.append(variant)
    shutil.rmtree(unpacked)
    return variants


def metadata(facts: LibraryFacts, backend: str) -> dict:
    kind = {"type": "cpu"}
    if backend != "cpu":
        # Beside code for 9.0a, PTX is of an architecture that later GPUs take (archs.py).
        kind = {"type": "cuda", "archs": facts.cuda_archs.replace("a+PTX", "+PTX").split(";")}
    return {
        "id": f"_flash_attn_ext_{backend}_{version().replace('.', '_')}",
        "name": "flash-attn-ext",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": kind,
    }


if __name__ == "__main__":
    try:
        for folder in main(sorted((ROOT / "dist").glob(f"flash_attn_ext-{version()}-*.whl")), ROOT / "build" / "hub"):
            print(folder.relative_to(ROOT))
    except BuildError as error:
        sys.exit(f"\nno repository was made: {error}\n")
