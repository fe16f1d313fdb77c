"""Rules for the Python side. Each takes {path: text} and yields violations, `path:line: what`."""

import ast
from collections.abc import Iterator, Mapping

Sources = Mapping[str, str]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
PACKAGE = "flash_attn_ext"
PRIVATE_NAMES_OF_TORCH = f"{PACKAGE}/_torch_private.py"

# The package from top to bottom: a module imports only from what stands below it. The reference is the specification,
# so it stands below the binding and imports nothing of the package but the types of options, and with them masks.
ORDER = (
    "__main__",
    "cli",
    "__init__",
    "integrations",
    "functional",
    "varlen",
    "kv_cache",
    "_explanation",
    "_sdpa",
    "_flops",
    "_table_attention",
    "ops",
    "autograd",
    "derivatives",
    "_call",
    "_import_errors",
    "_load",
    "_copy_log",
    "_frames",
    "_torch_private",
    "_C",
    "reference",
    "types",
    "bias_tables",
    "masks",
)

# These mirror the user's keywords or the binding's flat schema, whatever their number.
MIRROR_THE_USER = ("functional.py", "varlen.py", "kv_cache.py", "reference.py", "ops.py", "integrations/")


def imports_go_down(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        module = _module(path)
        if module is None:
            continue
        if module not in ORDER:
            yield f"{path}:1: {module} has no place in ORDER, in tests/architecture/python_rules.py"
            continue
        for line, target in _package_imports(ast.parse(text)):
            if target != module and (target not in ORDER or ORDER.index(target) < ORDER.index(module)):
                yield f"{path}:{line}: {module} must not import {target}, which stands above it"


def _module(path: str) -> str | None:
    """ "functional" for flash_attn_ext/functional.py, "cli" for anything under flash_attn_ext/cli/."""
    folder, _, rest = path.partition("/")
    return rest.split("/")[0].removesuffix(".py") if folder == PACKAGE else None


def _package_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module of this package) for each import of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names = [f"{PACKAGE}.{alias.name}" if alias.name in ORDER else PACKAGE for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            root, *inner = name.split(".")
            if root == PACKAGE:
                yield node.lineno, inner[0] if inner else "__init__"


def imports_are_absolute(sources: Sources) -> Iterator[str]:
    """One spelling of an import, which the rule above reads."""
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{path}:{node.lineno}: relative import"


def private_names_of_torch_stand_in_one_module(sources: Sources) -> Iterator[str]:
    """A release of PyTorch may change what begins with an underscore: each such name has a test, and stands there."""
    for path, text in sources.items():
        if not path.startswith(f"{PACKAGE}/") or path == PRIVATE_NAMES_OF_TORCH:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            for name in names:
                root, *parts = name.split(".")
                if root == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                    yield f"{path}:{node.lineno}: {name} belongs into {PRIVATE_NAMES_OF_TORCH}, with a test"


def files_are_short(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES:
            yield f"{path}:1: {num_lines} lines, allowed are {MAX_FILE_LINES}"


def functions_are_small(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
                if num_lines > MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines, allowed are {MAX_FUNCTION_LINES}"


def parameter_lists_are_short(sources: Sources) -> Iterator[str]:
    """Tests are left out: pytest passes a case's axes and fixtures as parameters."""
    for path, text in sources.items():
        if path.startswith("tests/") or _mirrors_the_user(path):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                count = len([a for a in _parameters(node) if a.arg not in ("self", "cls")])
                if count > MAX_PARAMETERS:
                    yield f"{path}:{node.lineno}: {node.name} takes {count} parameters, allowed are {MAX_PARAMETERS}"


def _docstring_lines(node: ast.FunctionDef) -> int:
    """What a public function tells its users counts as documentation, not as code to be held in the head."""
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def _parameters(node: ast.FunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _mirrors_the_user(path: str) -> bool:
    return path.startswith(tuple(f"{PACKAGE}/{name}" for name in MIRROR_THE_USER))


RULES = (
    imports_go_down,
    imports_are_absolute,
    private_names_of_torch_stand_in_one_module,
    files_are_short,
    functions_are_small,
    parameter_lists_are_short,
)
