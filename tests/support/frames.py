"""What torch.compile does with a frame that it gives up, and which functions of ours it compiles meanwhile."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterator

import torch

import flash_attn_ext
from flash_attn_ext import _frames

FOLDER = os.path.dirname(flash_attn_ext.__file__)
# Users compile these, under the names of PyTorch's functions that they replace.
STAND_FOR_PYTORCHS = (
    ("integrations/torch_sdpa/install.py", "_sdpa_of_any_thread"),
    ("integrations/_fused_inference.py", "forward"),
)


def given_up(function: Callable) -> Callable:
    """`function` compiled, and given up by Dynamo at once, as for a graph break in a loop: Python runs it, and Dynamo
    sees what it calls."""
    code = function.__code__.replace()
    torch._dynamo.eval_frame.skip_code(code)
    skipped = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    return torch.compile(skipped, backend="eager")


def is_inner(code: types.CodeType) -> bool:
    """Of our modules, those that _frames.py marks: not what users compile or start."""
    path = os.path.relpath(code.co_filename, FOLDER)
    if (path, code.co_name) in STAND_FOR_PYTORCHS:
        return False
    module = path.removesuffix(".py").replace(os.sep, ".")
    if path.startswith("..") or f"flash_attn_ext.{module}" in _frames.COMPILED_BY_USERS:
        return False
    return not module.startswith(("cli.", "__main__", "integrations.flash_attn.", "integrations.transformers."))


@contextlib.contextmanager
def compiled_inner_functions() -> Iterator[list[str]]:
    """The names of our inner functions that Dynamo compiles as frames of their own."""
    import torch._dynamo.convert_frame as convert_frame

    names: list[str] = []

    def note(code: types.CodeType, _new_code: types.CodeType) -> None:
        if is_inner(code):
            names.append(f"{code.co_filename}: {code.co_name}")

    handle = convert_frame.register_bytecode_hook(note)
    try:
        yield names
    finally:
        handle.remove()


def attention_ranges(function: Callable) -> tuple[int, int]:
    """(ours, PyTorch's): how many forward passes of attention a call of `function` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    names = [event.name for event in profile.events()]
    ours = sum(name.startswith("flash_attn_ext forward") for name in names)
    return ours, names.count("aten::scaled_dot_product_attention")
