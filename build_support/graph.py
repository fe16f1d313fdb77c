"""The build as a ninja file: one edge per C++ object, one per kernel object that is not there yet, one link.

C++ objects depend on torch and Python, so they live in a folder named after both and ninja follows their headers
through the compiler's depfiles. Kernel objects depend on neither: each is named by a hash of everything that goes
into it (nvcc's release, its flags, the source and every project header it includes), so that it can be carried to
another machine with the same nvcc, whatever happened to the time stamps on the way.
"""

import hashlib
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

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

rule link
  command = {cxx} -shared $in -o $out $flags
  description = link $out
"""


@dataclass(frozen=True)
class Edge:
    rule: str
    source: str
    output: str
    flags: tuple[str, ...]


@dataclass
class Graph:
    """Paths are relative to the repository's root, where ninja runs."""

    build_dir: Path
    cxx: str
    nvcc: str = "nvcc"
    edges: list[Edge] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)

    def add_cxx(self, source: str, flags: Iterable[str]) -> None:
        output = str(self.build_dir / "objects" / f"{source}.o")
        self.edges.append(Edge("cxx", source, output, tuple(flags)))
        self.objects.append(output)

    def add_kernel(self, source: str, output: str, flags: Iterable[str], root: Path) -> None:
        """A kernel object; no edge when it is already there, since its name says that it is the right one."""
        self.objects.append(output)
        if not (root / output).is_file():
            self.edges.append(Edge("nvcc", source, output, tuple(flags)))

    def to_ninja(self, library: str, link_flags: Iterable[str]) -> str:
        rules = _RULES.format(
            build_dir=_escape(str(self.build_dir)),
            cxx=_shell([self.cxx]),
            nvcc=_shell([self.nvcc]),
            python=_shell([sys.executable]),
        )
        blocks = [_block(e.rule, [e.source], e.output, e.flags) for e in self.edges]
        blocks.append(_block("link", self.objects, library, link_flags))
        return "\n".join([rules, *blocks, f"default {_escape(library)}", ""])


def _block(rule: str, inputs: Iterable[str], output: str, flags: Iterable[str]) -> str:
    sources = " ".join(_escape(path) for path in inputs)
    return f"build {_escape(output)}: {rule} {sources}\n  flags = {_shell(flags)}\n"


def _shell(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in words).replace("$", "$$")


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def include_closure(source: Path, include_root: Path) -> list[Path]:
    """`source` and every project file it includes with quotes, directly or not. Sorted."""
    found: set[Path] = set()
    pending = [source.resolve()]
    while pending:
        path = pending.pop()
        if path in found:
            continue
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
        digest.update(f"\0{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    stem = ".".join(source.resolve().relative_to(root).with_suffix("").parts)
    return f"{stem}-{digest.hexdigest()[:16]}.o"


def prune_kernels(folder: Path, keep: Iterable[str]) -> None:
    """Delete older objects (and their logs) of the sources whose present object is in `keep`."""
    keep = set(keep)
    stems = {name.rsplit("-", 1)[0] for name in keep}
    for path in folder.glob("*-*.o"):
        if path.name not in keep and path.name.rsplit("-", 1)[0] in stems:
            path.unlink()
            path.with_suffix(".log").unlink(missing_ok=True)
