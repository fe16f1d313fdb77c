"""Tells Dynamo, the front end of torch.compile, to skip the package's inner functions.

Where Dynamo gives up a frame (for a graph break in a loop, say), Python runs it, and Dynamo compiles each function that
is called from there as a frame of its own. That includes what PyTorch calls from C++: overrides, kernels, the methods
of an autograd Function. Dynamo has no guard on the function that an override is asked about, so a compiled override
answers for the wrong one, and it cannot trace what kernels do. Functions that are skipped run in Python. Where Dynamo
compiles a caller of theirs, it inlines them as any others.
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
# What stands in a class for a function, and its attribute that is the function.
_KINDS = {staticmethod: "__func__", classmethod: "__func__", property: "fget", functools.cached_property: "func"}


def skip_functions_of(package: str) -> None:
    """Of a module and of those below it, as far as they are imported by now."""
    for name, module in list(sys.modules.items()):
        if (name == package or name.startswith(f"{package}.")) and name not in COMPILED_BY_USERS:
            for function in _functions_in(vars(module), name):
                skip_code(function.__code__)


def skip_code(code: types.CodeType) -> None:
    """Of a function, with the functions and comprehensions within it."""
    skip_frames_of(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            skip_code(constant)


def _functions_in(members: Mapping[str, Any], module: str) -> Iterator[types.FunctionType]:
    """All among the members that are defined in the module, methods and properties of its classes included. Not those
    that name another module: they stand for a function of it."""
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
