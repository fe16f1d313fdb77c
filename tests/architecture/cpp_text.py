"""Just enough reading of C++ text for the rules: comments, includes, function definitions, parameter lists."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMMENT_OR_STRING = re.compile(
    r"""//[^\n]*
    | /\*.*?\*/
    | R"(?P<tag>[^\s()\\]*)\(.*?\)(?P=tag)"
    | "(?:\\.|[^"\\\n])*"
    | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'  # a character, not the separator in 1'000
    """,
    re.DOTALL | re.VERBOSE,
)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*([\"<])([^\">]+)[\">]", re.MULTILINE)
_NOT_A_FUNCTION = {"if", "for", "while", "switch", "catch", "return", "sizeof", "alignof", "decltype", "constexpr"}
# What may stand between a parameter list and the body of a function.
_TRAILER = re.compile(
    r"(?:\s*(?:const|noexcept|override|final|mutable|&&?|->\s*[\w:<>,\s*&()]+?|requires\s[^{;]+))*\s*$"
)
_INITIALISERS = re.compile(r"\s*(?:noexcept\s*)?:(?!:)")


@dataclass(frozen=True)
class Function:
    name: str
    first_line: int
    num_lines: int
    num_parameters: int


def without_comments(text: str) -> str:
    """Comments and the insides of strings blanked, line numbers and columns kept."""

    def blank(match: re.Match) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return _COMMENT_OR_STRING.sub(blank, text)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """(line, text without the slashes) of each // comment."""
    for match in _COMMENT_OR_STRING.finditer(text):
        if match.group().startswith("//"):
            yield line_of(text, match.start()), match.group()[2:].strip()


def includes(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, name, whether in quotes) of each #include."""
    for match in _INCLUDE.finditer(text):
        yield line_of(text, match.start()), match.group(2), match.group(1) == '"'


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def matching(text: str, start: int, opening: str, closing: str) -> int:
    """Offset of the bracket that closes the one at `start`; the end of the text when none does."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == opening:
            depth += 1
        elif text[i] == closing:
            depth -= 1
            if depth == 0:
                return i
    return len(text) - 1


def split_arguments(text: str) -> list[str]:
    """The comma-separated items of a parameter list, commas inside brackets left alone."""
    items, depth, current = [], 0, ""
    for character in text.replace("->", "  "):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            items.append(current)
            current = ""
        else:
            current += character
    items.append(current)
    return [item.strip() for item in items if item.strip() and item.strip() != "void"]


def template_lists(code: str) -> Iterator[tuple[int, list[str]]]:
    """(line, parameters) of each `template <...>`; `code` has no comments."""
    for match in re.finditer(r"\btemplate\s*<", code):
        end = matching(code, match.end() - 1, "<", ">")
        yield line_of(code, match.start()), split_arguments(code[match.end() : end])


def functions(code: str) -> Iterator[Function]:
    """Function definitions, members included and lambdas not; `code` has no comments."""
    code = re.sub(
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group()), code, flags=re.MULTILINE
    )
    for match in re.finditer(r"(~?\b[A-Za-z_]\w*|\boperator\s*[^\s\w(]+|\boperator\s*\(\s*\))\s*\(", code):
        name = match.group(1)
        opening = match.end() - 1
        if name in _NOT_A_FUNCTION or _is_call(code, match.start()):
            continue
        closing = matching(code, opening, "(", ")")
        body = _body(code, closing + 1)
        if body is None:
            continue
        end = matching(code, body, "{", "}")
        first, last = line_of(code, match.start()), line_of(code, end)
        yield Function(name, first, last - first + 1, len(split_arguments(code[opening + 1 : closing])))


def _is_call(code: str, start: int) -> bool:
    """Whether what precedes a name shows that it is called, not defined: an operator, a bracket, a comma."""
    before = code[:start].rstrip()
    if re.search(r"\b(public|protected|private)\s*:$", before):
        return False
    return before.endswith((".", "->", "(", ",", "=", "!", "?", "+", "-", "return", "[", "|", "{", "<")) or (
        before.endswith(":") and not before.endswith("::")
    )


def _body(code: str, start: int) -> int | None:
    """Offset of the brace that opens the body of a function whose parameter list ends before `start`; None: no body."""
    initialisers = _INITIALISERS.match(code, start)
    if initialisers:
        start = initialisers.end()
        while item := re.compile(r"\s*[\w:<>,\s]*?\w\s*([({])").match(code, start):
            bracket = item.group(1)
            start = matching(code, item.end() - 1, bracket, ")" if bracket == "(" else "}") + 1
            start += len(code[start:]) - len(code[start:].lstrip(" \n,."))
        return start if code[start : start + 1] == "{" else None
    brace = code.find("{", start)
    return brace if brace >= 0 and _TRAILER.match(code[start:brace]) else None
