"""PyTorch's ``F.multi_head_attention_forward`` with another scaled_dot_product_attention in it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from flash_attn_ext._frames import skip_code


def multi_head_attention_with(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the function whose global name scaled_dot_product_attention is ``sdpa``.

    A TorchFunctionMode cannot intercept that call in any other way: the active mode intercepts the function itself, and
    the body then runs without the mode. ``has_torch_function`` is False in the copy, so it is not intercepted again.
    """
    original = F.multi_head_attention_forward
    namespace = {**vars(F), "scaled_dot_product_attention": sdpa, "has_torch_function": lambda _tensors: False}
    code = original.__code__.replace()  # a copy: Dynamo stores its state of a function with its code
    skip_code(code)
    copy = types.FunctionType(code, namespace, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
