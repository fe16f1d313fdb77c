"""Every name of PyTorch that is used here and that its documentation does not promise, with its purpose.

A release of PyTorch may change them. tests/torch_integration/test_torch_private.py has a test for each name, and a rule
of tests/architecture keeps such names out of all other modules.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
import torch._functorch.utils
import torch._subclasses.functional_tensor
import torch.fx.experimental.proxy_tensor
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy


def data_address(tensor: Tensor) -> int:
    """The address of a tensor's first element. ``Tensor.data_ptr()`` would copy a lazily cloned tensor."""
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]  # PyTorch's stubs lack it
    return address + int(tensor.storage_offset()) * tensor.element_size()


sleep_on_gpu = torch.cuda._sleep
"""Keeps a GPU busy for some cycles, while the timed kernels are launched."""

# Modes and overrides in Python.

num_function_modes = torch._C._len_torch_function_stack
"""How many TorchFunctionModes this thread is in."""

function_mode_at = torch._C._get_function_stack_at
"""One of them, from the outermost on, so that a replacement finds its own."""

DisableTorchFunction = torch._C.DisableTorchFunction
"""A context whose calls neither modes nor overriding classes see."""

register_torchscript_builtin = torch.jit._builtins._register_builtin
"""Has TorchScript compile a call of a function as one of an operator, as it compiles the function that we replace."""


def jagged_class() -> Any:
    """The class of nested tensors of layout torch.jagged. It takes long to import."""
    from torch.nested._internal.nested_tensor import NestedTensor

    return NestedTensor


overloaded_args = torch.overrides._get_overloaded_args
"""Those of a list whose classes override calls, in the order in which PyTorch asks them: subclasses first."""


def replace_engine(run: Callable[..., Any]) -> Callable[..., Any]:
    """Has Tensor.backward, torch.autograd.backward and torch.autograd.grad start PyTorch's engine by `run`, which
    enters modes for it. Returns the function that they called before."""
    autograd: Any = torch.autograd
    before: Callable[..., Any] = autograd._engine_run_backward
    autograd._engine_run_backward = run
    return before


def engine() -> Any:
    """The function that `replace_engine` replaces, as it is now."""
    autograd: Any = torch.autograd
    return autograd._engine_run_backward


def run_by_dynamo(function: Any) -> Any:
    """Has Dynamo run the function when it traces a call. torch.compiler.assume_constant_result does the same, but
    imports Dynamo for it."""
    function._dynamo_marked_constant = True
    return function


# Kernels of operators.

DispatchKeySet = torch._C.DispatchKeySet
"""The kernels that a call has yet to go through. A kernel of autograd gets this set, and passes it on."""

AFTER_AUTOGRAD = torch._C._after_autograd_keyset
"""The set of all kernels below those of autograd."""

AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
"""A context whose calls go to these."""

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether this build of PyTorch has a kernel that we may replace."""


def keys_of(name: str) -> torch._C.DispatchKeySet:
    """The set of one key, "CUDA" say, by which a kernel that we replaced is called."""
    return DispatchKeySet(torch._C.DispatchKey.__members__[name])


def forget_choices_of_kernels(operator: torch._ops.OpOverloadPacket) -> None:
    """Clears the kernels that traces have cached for each dispatch key of an operator. PyTorch does not clear them when
    kernels come or go."""
    for overload in operator.overloads():
        getattr(operator, overload)._dispatch_cache.clear()


def parameters_of(operator: torch._ops.OpOverload) -> list[str]:
    """The names of an operator's parameters, in order."""
    return [argument.name for argument in operator._schema.arguments]


def destroy(library: torch.library.Library) -> None:
    """Removes a library's kernels now, not when Python collects it."""
    library._destroy()


def schema_infos_of(dtensor: Any) -> dict[Any, Any]:
    """For torch.distributed.tensor.DTensor, by operator: the arguments that its cache of shardings depends on."""
    infos: dict[Any, Any] = dtensor._op_dispatcher.sharding_propagator.op_to_schema_info
    return infos


# torch.func and forward mode.

are_functorch_transforms_active = torch._C._are_functorch_transforms_active
"""Whether torch.func transforms calls of this thread, so that they must go through a Function."""


def is_within_a_functorch_level() -> bool:
    """Whether a transform of torch.func has handed a call on, so that Functions of all levels are recorded already."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)


SingleLevelFunction = torch.autograd.function._SingleLevelFunction
"""The Function of one level of torch.func, where a level calls an operator's kernel of autograd."""

enable_single_level_autograd_function = torch._functorch.utils.enable_single_level_autograd_function
"""A context in which such a Function may be applied."""

is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
"""Whether forward mode records, which a Function switches off for the levels below."""

set_fwd_grad_enabled = torch.autograd.forward_ad._set_fwd_grad_enabled
"""A context in which it records or does not."""

# Compilers.


def skip_frames_of(code: types.CodeType) -> None:
    """Has Dynamo skip frames of the code, as torch._dynamo.eval_frame.skip_code does, but not those that they call."""
    frames = torch._C._dynamo.eval_frame  # C++: torch._dynamo takes longer to import than all of this package
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(code, skip)


assert_later = torch._assert_async
"""Fails when a tensor turns out to be false, without waiting for its device, within compiled functions too."""

FunctionalTensorMode = torch._subclasses.functional_tensor.FunctionalTensorMode
"""The mode of AOTAutograd that sees operators first."""

ProxyTorchDispatchMode = torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode
"""The mode that makes the nodes of a traced graph."""


def activation_memory_budget() -> float:
    """Which share of the activations a partitioner may save."""
    return torch._functorch.config.activation_memory_budget


@contextlib.contextmanager
def nodes_with_policy(policy: CheckpointPolicy) -> Iterator[None]:
    """Notes the policy at nodes that are made within, where selective checkpoints note theirs for partitioners."""
    with traceback.preserve_node_meta():  # which restores current_meta
        traceback.current_meta["recompute"] = policy
        yield
