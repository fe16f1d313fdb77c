"""The build as a ninja file: one edge per C++ object, one per kernel object that is not there yet, one link.

All files of a folder of the glue are compiled into one object, so PyTorch's headers are read once for each folder.
Ninja follows the headers of C++ objects. A kernel object is named by a hash of everything that goes into it (nvcc's
release, its flags, the source and every project header it includes), so that it can be carried to another machine with
the same nvcc.
"""

import hashlib
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from build_support.toolchain import Nvcc

_QUOTED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)

_RULES = """\
ninja_required_version = 1.8
builddir = {build_dir}
rule cxx
  command = {cxx} -MMD -MF $out.d $flags -c $in -o $out
  description = g++ $in
  depfile = $out.d
  deps = gcc
rule nvcc
  command = {python} build_support/run_nvcc.py $out {nvcc} $flags -c $in
  description = nvcc $in
rule stubs
  command = {python} build_support/stubs.py $out {cxx} $in
  description = stubs of kernels that are left out
rule link
  command = {cxx} -shared $in -o $out $flags
  description = link $out
"""


class Edge(NamedTuple):
    """Paths are relative to the repository's root, where ninja runs. An object that is there has no rule."""

    rule: str | None
    sources: Sequence[str]
    output: str
    flags: Sequence[str]
    read: Sequence[str] = ()  # what flags name, besides the sources


def ninja_text(edges: Iterable[Edge], build_dir: Path, cxx: str, nvcc: Nvcc | None) -> str:
    python, cxx, nvcc_path = (_shell([word]) for word in (sys.executable, cxx, str(nvcc.path) if nvcc else "nvcc"))
    blocks = [_RULES.format(build_dir=_escape(build_dir), cxx=cxx, nvcc=nvcc_path, python=python)]
    for rule, sources, output, flags, read in edges:
        if rule:
            inputs = " ".join([*map(_escape, sources), *(["|", *map(_escape, read)] if read else [])])
            blocks.append(f"build {_escape(output)}: {rule} {inputs}\n  flags = {_shell(flags)}\n")
    return "\n".join(blocks)


def _shell(words: Iterable[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def _escape(path: str | Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def include_closure(source: Path, include_root: Path) -> list[Path]:
    """`source` and every project file it includes with quotes, directly or not. Sorted."""
    found: set[Path] = set()
    pending = [source.resolve()]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            for name in _QUOTED_INCLUDE.findall(path.read_text(encoding="utf-8")):
                candidates = (path.parent / name, include_root / name)
                pending += [c.resolve() for c in candidates if c.is_file()][:1]
    return sorted(found)


def kernel_object_name(source: Path, include_root: Path, flags: Iterable[str], nvcc: Nvcc) -> str:
    """File name of the object, `<path with dots>-<hash of all that goes into it>.o`."""
    digest = hashlib.sha256("\0".join([nvcc.release, *flags]).encode())
    root = include_root.resolve()
    for path in include_closure(source, include_root):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    stem = ".".join(source.resolve().relative_to(root).with_suffix("").parts)
    return f"{stem}-{digest.hexdigest()[:16]}.o"


def prune_kernels(folder: Path, wanted: set[str]) -> None:
    """Delete older objects (and their logs) of the sources whose present object is in `wanted`."""
    stems = {name.rsplit("-", 1)[0] for name in wanted}
    for path in folder.glob("*-*.o"):
        if path.name not in wanted and path.name.rsplit("-", 1)[0] in stems:
            path.unlink()
            path.with_suffix(".log").unlink(missing_ok=True)
