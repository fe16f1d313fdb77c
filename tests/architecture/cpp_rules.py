"""Rules for csrc/. Each takes {path under csrc/: text} and yields violations, `path:line: what`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from architecture import cpp_text

Sources = Mapping[str, str]

SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
MAX_TEMPLATE_PARAMETERS = 3

# Layer -> the layers it may include besides itself. host -> library -> kernels -> tile -> ptx, kernels -> attention.
MAY_INCLUDE = {
    "bindings": {"host", "attention"},
    "host": {"library", "kernels", "attention"},
    "library": {"kernels", "attention"},
    "kernels": {"tile", "ptx", "attention"},
    "tile": {"ptx", "attention"},
    "ptx": set(),
    "attention": set(),
}
# Room of kernels/ -> the rooms it may include besides itself. Backends do not know each other.
_SHARED_ROOMS = {"config", "plan", "schedule", "score", "epilogue", "common"}
KERNEL_ROOMS = {
    "config": set(),
    "plan": {"config", "schedule"},
    "schedule": {"config"},
    "epilogue": {"config"},
    "score": {"config", "schedule"},
    "common": {"config", "plan", "schedule"},
    "derivatives": {"config", "score"},
    "cpu": {"config", "plan"},
    "sm80": _SHARED_ROOMS,
    "sm90": _SHARED_ROOMS,
}
TORCH_FREE_FOLDERS = ("library/", "kernels/", "tile/", "ptx/", "attention/")
# What both GPU backends share of tile/ does not know either's own part.
TILE_ROOMS = ("sm80", "sm90")
CUDA_HEADER = re.compile(r"^(cuda\w*|crt/.*)\.h$|^cooperative_groups|^cub/|^(c10|ATen|torch/csrc)/cuda/")
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
BINDINGS = "bindings.cpp"  # mirrors the user's keywords, so its parameter lists are as long as theirs


def layer(path: str) -> str:
    return "bindings" if path == BINDINGS else path.split("/")[0]


def resolve(path: str, name: str, sources: Sources) -> str | None:
    """The project file that `#include "name"` in `path` means."""
    for candidate in (str(PurePosixPath(path).parent / name), name):
        if candidate in sources:
            return candidate
    return None


def includes_go_down(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        for line, name, quoted in cpp_text.includes(text):
            target = resolve(path, name, sources) if quoted else None
            if quoted and target is None:
                yield f'{path}:{line}: "{name}" is no file of csrc/; system and library headers are included with <>'
            elif target and layer(target) not in {layer(path), *MAY_INCLUDE.get(layer(path), set())}:
                yield f"{path}:{line}: {layer(path)} must not include {target}"


def rooms_of_kernels_are_layered(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        own = _room(path)
        if own and own not in KERNEL_ROOMS:
            yield f"{path}:1: kernels/{own} has no rule; say in cpp_rules.py which rooms it may include"
        for line, name, quoted in cpp_text.includes(text):
            other = _room(resolve(path, name, sources) or "") if quoted else None
            if own and other and other not in {own, *KERNEL_ROOMS.get(own, set())}:
                yield f"{path}:{line}: kernels/{own} must not include {name}; what both need goes to a shared room"


def _room(path: str) -> str | None:
    match = re.match(r"kernels/(\w+)/", path)
    return match.group(1) if match else None


def shared_tiles_know_no_backend(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        shared = re.match(r"(tile/[^/]+$|kernels/(schedule|score|epilogue|common)/)", path)
        for line, name, quoted in cpp_text.includes(text):
            target = (resolve(path, name, sources) or "") if quoted else ""
            if shared and any(target.startswith(f"tile/{room}/") for room in TILE_ROOMS):
                yield f"{path}:{line}: what backends share must not include {name}"


def include_graph_has_no_cycle(sources: Sources) -> Iterator[str]:
    graph = {
        path: [t for _, name, quoted in cpp_text.includes(text) if quoted and (t := resolve(path, name, sources))]
        for path, text in sources.items()
    }
    finished: set[str] = set()

    def visit(path: str, trail: list[str]) -> Iterator[str]:
        if path in trail:
            yield f"{path}:1: include cycle: {' -> '.join([*trail[trail.index(path) :], path])}"
        elif path not in finished:
            for target in graph[path]:
                yield from visit(target, [*trail, path])
            finished.add(path)

    for path in graph:
        yield from visit(path, [])


def kernels_are_free_of_torch(sources: Sources) -> Iterator[str]:
    """Neither these folders nor anything that nvcc reads, directly or through a header, includes torch."""
    start = {path for path in sources if path.startswith(TORCH_FREE_FOLDERS) or path.endswith(".cu")}
    for path, line, name in _reached_includes(start, sources):
        if TORCH_HEADER.search(name):
            yield f"{path}:{line}: {name} is a torch header, and nvcc or a kernel reads this file"


def cpu_builds_need_no_cuda(sources: Sources) -> Iterator[str]:
    """A build without CUDA compiles every .cpp, and one glue serves a torch with CUDA and one without."""
    start = {path for path in sources if path.endswith(".cpp")}
    for path, line, name in _reached_includes(start, sources):
        if CUDA_HEADER.search(name):
            yield f"{path}:{line}: {name} is a CUDA header, and a .cpp of a build without CUDA reads it: name that .cu"


def _reached_includes(start: set[str], sources: Sources) -> Iterator[tuple[str, int, str]]:
    """(file, line, what it includes) for these files and all that they include."""
    reached, pending = set(start), list(start)
    while pending:
        path = pending.pop()
        for line, name, quoted in cpp_text.includes(sources[path]):
            yield path, line, name
            target = resolve(path, name, sources) if quoted else None
            if target and target not in reached:
                reached.add(target)
                pending.append(target)


def asm_only_under_ptx(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        if not path.startswith("ptx/"):
            for match in re.finditer(r"\b(asm|__asm__)\b", cpp_text.without_comments(text)):
                yield f"{path}:{cpp_text.line_of(text, match.start())}: asm belongs under ptx/"


def code_of_one_processor_is_guarded(sources: Sources) -> Iterator[str]:
    """What has instructions of x86 in it asks for x86 first, so that every file compiles for other processors."""
    for path, text in sources.items():
        code = cpp_text.without_comments(text)
        for match in re.finditer(
            r"\b_mm\d*_\w+|\b__m\d+\w?\b|\b__builtin_ia32_\w+|\w+intrin\.h|\btarget_clones\b", code
        ):
            if "defined(__x86_64__)" not in code[: match.start()]:
                yield f"{path}:{cpp_text.line_of(text, match.start())}: {match.group()} without #if defined(__x86_64__)"


def files_are_short(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES:
            yield f"{path}:1: {num_lines} lines, allowed are {MAX_FILE_LINES}"


def functions_are_small(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        for f in cpp_text.functions(cpp_text.without_comments(text)):
            if f.num_lines > MAX_FUNCTION_LINES:
                yield f"{path}:{f.first_line}: {f.name} has {f.num_lines} lines, allowed are {MAX_FUNCTION_LINES}"
            if f.num_parameters > MAX_PARAMETERS and path != BINDINGS:
                count = f.num_parameters
                yield f"{path}:{f.first_line}: {f.name} takes {count} parameters, allowed are {MAX_PARAMETERS}"


def templates_are_small(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        for line, parameters in cpp_text.template_lists(cpp_text.without_comments(text)):
            if len(parameters) > MAX_TEMPLATE_PARAMETERS:
                yield f"{path}:{line}: {len(parameters)} template parameters, allowed are {MAX_TEMPLATE_PARAMETERS}"


def nothing_prints(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        for match in re.finditer(r"\b(printf|fprintf|puts)\s*\(|\bstd::(cout|cerr)\b", cpp_text.without_comments(text)):
            yield f"{path}:{cpp_text.line_of(text, match.start())}: {match.group().strip('( ')} in a library"


_CODE_IN_COMMENT = re.compile(
    r"^(#\s*(include|define|if|endif|pragma)\b|(if|for|while|switch)\s*\(.*\)\s*[{;]?$|return\b[^.]*;$|"
    r"[\w:<>*&,\[\]\s.\->]+=.*;$|[\w:.>\-]+\(.*\);$|[{}]+$)"
)


def no_commented_out_code(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        for line, comment in cpp_text.comments(text):
            if _CODE_IN_COMMENT.search(comment):
                yield f"{path}:{line}: commented-out code: {comment}"
        for match in re.finditer(r"^[ \t]*#[ \t]*if[ \t]+0\b", text, re.MULTILINE):
            yield f"{path}:{cpp_text.line_of(text, match.start())}: code switched off with #if 0"


RULES = (
    includes_go_down,
    rooms_of_kernels_are_layered,
    shared_tiles_know_no_backend,
    include_graph_has_no_cycle,
    kernels_are_free_of_torch,
    cpu_builds_need_no_cuda,
    asm_only_under_ptx,
    code_of_one_processor_is_guarded,
    files_are_short,
    functions_are_small,
    templates_are_small,
    nothing_prints,
    no_commented_out_code,
)
