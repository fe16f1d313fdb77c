"""Tells Dynamo, the front end of torch.compile, to skip the package's inner functions.

If Dynamo gives up a frame (for a graph break in a loop, say), Python runs it, and Dynamo compiles each function that is
called from there as a frame of its own. That includes functions that PyTorch calls from C++: overrides, kernels, the
methods of an autograd Function. Dynamo has no guard on the function that an override is asked about, so a compiled
override answers for the wrong one. Dynamo cannot trace what kernels do either. Functions that are skipped run in
Python. If Dynamo compiles their caller, it inlines them like any others.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from flash_attn_ext._torch_private import skip_frames_of

# Users compile these functions, so Dynamo may take each as a frame of its own.
COMPILED_BY_USERS = tuple(f"flash_attn_ext.{name}" for name in ("functional", "varlen", "kv_cache", "reference"))
# The types that wrap a function in a class, and their attribute that is the function.
_KINDS = {staticmethod: "__func__", classmethod: "__func__", property: "fget", functools.cached_property: "func"}


def skip_functions_of(package: str) -> None:
    """Skips the functions of a module and of its submodules that are imported by now."""
    for name, module in list(sys.modules.items()):
        if (name == package or name.startswith(f"{package}.")) and name not in COMPILED_BY_USERS:
            for function in _functions_in(vars(module), name):
                skip_code(function.__code__)


def skip_code(code: types.CodeType) -> None:
    """Skips the code of a function, with the functions and comprehensions within it."""
    skip_frames_of(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            skip_code(constant)


def _functions_in(members: Mapping[str, Any], module: str) -> Iterator[types.FunctionType]:
    """Yields the functions among the members that are defined in the module, including methods and properties of its
    classes. Members that name another module are left out, because they stand for a function of it."""
    for member in members.values():
        if isinstance(member, type):
            if member.__module__ == module:
                yield from _functions_in(vars(member), module)
            continue
        for kind, function_of in _KINDS.items():
            if isinstance(member, kind):
                member = getattr(member, function_of)
        if callable(member):
            member = inspect.unwrap(member)
        if isinstance(member, types.FunctionType) and member.__module__ == module:
            yield member
