"""Whether two folders of kernel objects hold the same machine code, whatever its functions are called.

    python benchmarks/compare_kernels.py /tmp/kernels-before build/kernels

A change that renames or moves code must not change any kernel. For each kernel of each object file this compares
the instructions, the registers and the shared and constant memory; names and files do not count. It prints the kernels
that only one of the folders has, and its exit status is 1 when there is one.

cuobjdump is taken from PATH, else from the CUDA Toolkit or from the triton package, which comes with torch.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Kernel(NamedTuple):
    """The machine code of a kernel. Comparisons ignore `name`."""

    arch: str
    code: str  # a hash of the instructions, and of the resources that they need
    name: str


class Section(NamedTuple):
    name: str
    info: int
    content: bytes
    size: int


_NO_CONTENT = 8  # SHT_NOBITS of the ELF format


def find_cuobjdump() -> str:
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    for found in (shutil.which("cuobjdump"), *(shutil.which("cuobjdump", path=folder) for folder in folders)):
        if found:
            return found
    sys.exit("cuobjdump is neither on PATH nor in the CUDA Toolkit nor in the triton package: pip install triton")


def sections_of(elf: bytes) -> list[Section]:
    """The sections of a cubin, which is a little-endian 64-bit ELF file (System V ABI, chapter 4)."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    entries = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_bytes) for i in range(count)]
    names_at = entries[names_index][4]
    sections = []
    for name, kind, _, _, offset, size, _, info, _, _ in entries:
        end = elf.index(b"\0", names_at + name)
        content = b"" if kind == _NO_CONTENT else elf[offset : offset + size]
        sections.append(Section(elf[names_at + name : end].decode(), info, content, size))
    return sections


def kernels_of_cubin(path: Path) -> list[Kernel]:
    sections = sections_of(path.read_bytes())
    sizes = {section.name: section.size for section in sections}
    arch = path.name.split(".")[-2]
    kernels = []
    for section in sections:
        if section.name.startswith(".text."):
            name = section.name.removeprefix(".text.")
            registers = section.info >> 24
            needs = (registers, sizes.get(f".nv.shared.{name}", 0), sizes.get(f".nv.constant0.{name}", 0))
            digest = hashlib.sha256(section.content + repr(needs).encode()).hexdigest()
            kernels.append(Kernel(arch, digest, name))
    return kernels


def kernels_of_object(path: Path, cuobjdump: str) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xelf", "all", path.resolve()], cwd=folder, check=True, capture_output=True)
        return [kernel for cubin in Path(folder).glob("*.cubin") for kernel in kernels_of_cubin(cubin)]


def kernels_in(folder: Path, cuobjdump: str) -> list[Kernel]:
    objects = sorted(folder.glob("*.o"))
    if not objects:
        sys.exit(f"{folder} has no object files: name a folder such as build/kernels")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lists = pool.map(lambda path: kernels_of_object(path, cuobjdump), objects)
        return [kernel for kernels in lists for kernel in kernels]


def only_in(kernels: list[Kernel], others: list[Kernel]) -> list[Kernel]:
    left = collections.Counter(kernel[:2] for kernel in others)
    found = []
    for kernel in kernels:
        if left[kernel[:2]] > 0:
            left[kernel[:2]] -= 1
        else:
            found.append(kernel)
    return found


def demangled(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    filtered = subprocess.run([tool], input="\n".join(names), text=True, capture_output=True, check=True)
    return filtered.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    cuobjdump = find_cuobjdump()
    before, after = (kernels_in(folder, cuobjdump) for folder in (arguments.before, arguments.after))
    differing = [(arguments.before, only_in(before, after)), (arguments.after, only_in(after, before))]
    for folder, kernels in differing:
        for kernel, name in zip(kernels, demangled([kernel.name for kernel in kernels]), strict=True):
            print(f"only in {folder}, {kernel.arch}: {name}")
    num_equal = len(before) - len(differing[0][1])
    print(f"{len(before)} kernels before, {len(after)} after, {num_equal} with the same machine code")
    return 1 if any(kernels for _, kernels in differing) else 0


if __name__ == "__main__":
    sys.exit(main())
