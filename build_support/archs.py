"""Which GPU architectures the kernels are compiled for, and the nvcc flags that say so."""

import math
import re
from typing import NamedTuple

from build_support.toolchain import INSTALL_COMMAND, BuildError, Nvcc, output_of

MIN_CAPABILITY = (8, 0)
DEFAULT_ARCHS = "8.0;9.0a+PTX"  # no GPU in sight: every data-centre part since Ampere, and PTX for what comes later


class Arch(NamedTuple):
    major: int
    minor: int
    ptx: bool = False

    @property
    def number(self) -> int:
        return 10 * self.major + self.minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}" + ("a" if self.number == 90 else "") + ("+PTX" if self.ptx else "")


def parse_archs(text: str) -> list[Arch]:
    """ "8.0;9.0a+PTX" -> [Arch(8, 0), Arch(9, 0, ptx=True)], sorted. 9.0 and 9.0a mean the same."""
    archs: dict[int, Arch] = {}
    for item in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d{1,2})\.(\d)(a?)(\+PTX)?", item)
        if match is None or (match.group(3) and item[:3] != "9.0"):
            problem = f"FLASH_ATTN_EXT_ARCHS={text!r}: cannot read {item!r}. Allowed: capabilities such as 8.0, 8.6 or "
            problem += "9.0a, each with +PTX or without, joined by ';'."
            raise BuildError(problem, f"FLASH_ATTN_EXT_ARCHS='{DEFAULT_ARCHS}' {INSTALL_COMMAND}", run="For example:")
        arch = Arch(int(match.group(1)), int(match.group(2)), bool(match.group(4)))
        if arch[:2] < MIN_CAPABILITY:
            too_old = f"{item} is too old, the kernels need 8.0 or later, such as '{DEFAULT_ARCHS}'"
            raise BuildError(f"FLASH_ATTN_EXT_ARCHS={text!r}: {too_old}")
        archs[arch.number] = arch
    return sorted(archs.values())


def choose_archs(wish: str | None, capabilities: list[tuple[int, int]], supported: set[int]) -> list[Arch]:
    """FLASH_ATTN_EXT_ARCHS, else the GPUs present, else the default list. `supported`: what nvcc knows, 80 for 8.0."""
    if wish:
        archs = parse_archs(wish)
        unknown = ", ".join(str(arch) for arch in archs if arch.number not in supported)
        if unknown:
            known = ", ".join(f"{n // 10}.{n % 10}" for n in sorted(supported) if n >= 80)
            raise BuildError(f"FLASH_ATTN_EXT_ARCHS={wish!r}: this nvcc cannot compile for {unknown}; it knows {known}")
        return archs
    usable = {Arch(*capability) for capability in capabilities if capability >= MIN_CAPABILITY}
    archs = sorted(arch for arch in usable or parse_archs(DEFAULT_ARCHS) if arch.number in supported)
    if len(archs) >= len(usable):
        return archs
    # A GPU newer than this nvcc: PTX, compiled by the driver when it is loaded, beside code for the newest below it.
    newest = max(number for number in supported if number < max(usable).number)
    return sorted([*(arch for arch in archs if arch.number != newest), Arch(newest // 10, newest % 10, ptx=True)])


def gencode_flags(archs: list[Arch], only: int | None = None, own_from: int | None = None) -> list[str]:
    """nvcc flags. `only`=90: just the architecture-specific 90a code (wgmma, TMA), nothing when 9.0 is not listed.

    All other kernels use what MIN_CAPABILITY has, so one PTX serves every architecture: writing it takes nvcc longer
    than making machine code of it, and it would differ in one conversion only. `own_from`=90: but for those whose code
    is another from 9.0 on.
    """
    if only is not None:
        return [f"-gencode=arch=compute_{a.number}a,code=sm_{a.number}a" for a in archs if a.number == only]
    first = 10 * MIN_CAPABILITY[0] + MIN_CAPABILITY[1]
    flags = []
    for begin, end in ((first, own_from or math.inf), (own_from or math.inf, math.inf)):
        these = [a for a in archs if begin <= a.number < end]
        codes = [f"sm_{a.number}" for a in these] + [f"compute_{begin}"] * any(a.ptx for a in these)
        if codes:
            flags.append(f"-gencode=arch=compute_{begin},code=[{','.join(codes)}]")
    return flags


def find_supported(nvcc: Nvcc) -> set[int]:
    return {int(number) for number in re.findall(r"sm_(\d+)$", output_of(nvcc.path, "--list-gpu-code"), re.MULTILINE)}


def find_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs present, without starting a CUDA context."""
    listing = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return [(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d)\s*$", listing, re.MULTILINE)]
