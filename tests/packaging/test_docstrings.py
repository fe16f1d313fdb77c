"""Every public function, which docs/api.md names, has an example in its docstring that runs as it stands.

Examples take torch and flash_attn_ext as imported, and leave the process as it was.
"""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import flash_attn_ext

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public_functions() -> dict:
    """By the names that users import them by."""
    found, module = {}, ""
    for directive, name in re.findall(r"^\.\. (currentmodule|autofunction):: ([\w.]+)$", API.read_text(), re.MULTILINE):
        if directive == "currentmodule":
            module = name
        else:
            found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    return found


def examples_of(name: str, documented: object) -> list[doctest.DocTest]:
    """Names that an example may take as given are those of the test."""
    namespace = dict(torch=torch, flash_attn_ext=flash_attn_ext)
    found = doctest.DocTestFinder(recurse=False).find(documented, name, globs=namespace)
    return [test for test in found if test.examples]


def run(tests: list[doctest.DocTest]) -> str:
    """What went wrong, as doctest says it."""
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for test in tests:
        runner.run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", public_functions())
def test_the_example_of_a_function_runs(name):
    if ".transformers" in name:
        pytest.importorskip("transformers")
    tests = examples_of(name, public_functions()[name])
    assert tests, f"{name} has no example"
    assert run(tests) == ""


@pytest.mark.parametrize(
    "documented",
    [flash_attn_ext.types, flash_attn_ext.masks, flash_attn_ext.masks.Intervals],
    ids=lambda it: it.__name__,
)
def test_the_example_of_what_is_no_function_runs(documented):
    tests = examples_of(documented.__name__, documented)
    assert tests and run(tests) == ""


def test_what_an_example_gets_wrong_is_found():
    def function():
        """
        >>> torch.zeros(2).shape
        torch.Size([3])
        """

    assert "torch.Size([2])" in run(examples_of("function", function))


def test_every_public_function_has_a_line_in_the_reference():
    integrations = [f"flash_attn_ext.integrations.{name}" for name in ("flash_attn", "torch_backend", "transformers")]
    documented = [inspect.unwrap(function) for function in public_functions().values()]
    own = ["flash_attn_ext", "flash_attn_ext.masks", "flash_attn_ext.reference"]
    for module in map(importlib.import_module, [*own, *integrations]):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            assert not inspect.isfunction(value) or value in documented, f"{module.__name__}.{name}"
