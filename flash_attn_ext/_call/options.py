"""The keywords of ``attention``, ``attention_varlen`` and ``explain`` as a problem, and the checks of those that are no
tensors. Their ranges are checked in C++ (csrc/host/checks/checks.cpp)."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext._call.blocks import blocks_of
from flash_attn_ext._call.canonical import CANONICAL, OWN_NAMES, DenseForm, dense_form, operands_of, require_tensors
from flash_attn_ext._call.problem import Problem
from flash_attn_ext.masks import Intervals
from flash_attn_ext.types import Causal, Layout, MaxLogit, Window

_CAUSALITIES: tuple[Causal, ...] = ("top_left", "bottom_right")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def problem_of(*, window: Window | None, **given: Any) -> Problem:
    """The user's arguments as a problem, with its options checked and spelled as the extension takes them."""
    given["window_left"], given["window_right"] = window_pair(window)
    if isinstance(given.get("intervals"), Intervals):
        given["intervals"] = given["intervals"].tensor
    check_causal(given["causal"])
    check_backend(given["backend"])
    given["allow_tf32"] = check_flag("allow_tf32", given["allow_tf32"])
    given["softcap"] = check_number_or_none("softcap", given["softcap"])
    given["scale"] = check_number_or_none("scale", given["scale"])
    given["dropout_p"] = check_number("dropout_p", given["dropout_p"])
    if "cu_seqlens_q" in given:
        given["max_seqlen_q"] = check_length("max_seqlen_q", given["max_seqlen_q"])
        given["max_seqlen_k"] = check_length("max_seqlen_k", given["max_seqlen_k"])
    return Problem(**given)


def dense_problem(problem: Problem, layout: Layout, block_lists: Any = None) -> tuple[Problem, DenseForm, int]:
    """The problem in canonical form, how to restore the form of its results, and the kind of its operands."""
    q, k, v = problem[:3]
    operands = operands_of(q, k, v)
    if operands < CANONICAL:
        require_tensors(OWN_NAMES, (q, k, v))
        if not q.dim() == k.dim() == v.dim() >= 2:
            raise RuntimeError(
                "q, k and v must have the same number of dimensions, at least 2, got "
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: add dimensions of size 1"
            )
    if is_sequence_first(layout) and q.dim() > 2:
        q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
        problem = problem._replace(q=q, k=k, v=v, sequence_first=True)
    if block_lists is not None:
        problem = problem._replace(blocks=blocks_of(block_lists, q, k))
    return *dense_form(problem, operands), operands


def window_pair(window: Window | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    pair = entries_of(window)
    if pair is None:
        pair = (window, window)
    if len(pair) != 2:
        raise ValueError(f"window must be None, an int, or (left, right), got {window!r}")
    left, right = (check_integer("window", size, "be made of int or None") for size in pair)
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"window sizes must be >= 0, got {window!r}: None, not -1, means unbounded")
    return left, right


def entries_of(value: Any) -> tuple[Any, ...] | None:
    """The entries of a tuple, a list, a tensor or a NumPy array, as Python's numbers; None for a single number."""
    if isinstance(value, tuple | list):
        return tuple(value)
    if isinstance(value, int):  # torch.compile cannot read attributes of a number that varies
        return None
    listed = value.tolist() if hasattr(value, "tolist") else value
    return tuple(listed) if isinstance(listed, list) and len(listed) != 1 else None


def check_causal(causal: Any) -> Causal | None:
    if causal is None or (isinstance(causal, str) and causal in _CAUSALITIES):
        return causal
    if isinstance(causal, bool):
        raise ValueError(
            f"causal must be None, 'top_left' or 'bottom_right', got {causal}. "
            "'top_left' lets query i see keys 0..i (is_causal of torch's scaled_dot_product_attention); 'bottom_right' "
            "lines up the last query with the last key (flash_attn >= 2.1, decoding with a cache). They are the same "
            "when there are as many queries as keys; None is not causal"
        )
    raise ValueError(f"causal must be None, 'top_left' or 'bottom_right', got {causal!r}")


def check_backend(backend: Any) -> str | None:
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be None or a name, got {type(backend).__name__}")
    return backend


def check_number_or_none(name: str, value: Any) -> float | None:
    return None if value is None else check_number(name, value)


def check_number(name: str, value: Any) -> float:
    """Returns a Python number as it is, and others as float. The range is checked in C++."""
    if type(value) is float:
        return value
    if isinstance(value, (int, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]  # under torch.compile a symbol stands for a number
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # NumPy scalars
        return float(value)
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.requires_grad:
            raise TypeError(
                f"{name} must be a number, got a tensor of shape {tuple(value.shape)} with "
                f"requires_grad={value.requires_grad}: it would get no gradient. Multiply the tensors by it instead"
            )
        if value.dtype == torch.bool or value.is_complex():
            raise TypeError(f"{name} must be a number, got a tensor of dtype {value.dtype}")
        return float(value)
    raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def check_length(name: str, value: Any) -> int | None:
    """Returns a Python number as it is, and others as int. The range is checked in C++."""
    return check_integer(name, value, "be an int or None")


def is_sequence_first(layout: object) -> bool:
    if layout == "bhsd":
        return False
    if layout == "bshd":
        return True
    raise ValueError(
        f"layout must be 'bhsd' (..., heads, sequence, head dim) or 'bshd' (..., sequence, heads, head dim), "
        f"got {layout!r}"
    )


def check_integer(name: str, value: Any, expected: str) -> int | None:
    """Takes whatever Python takes for an index, and one-element integer tensors, because integers have no gradients."""
    if value is None or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]  # under torch.compile a symbol stands for a number
    if type(value) is int:
        if -(2**63) <= value < 2**63:
            return value
        raise ValueError(f"{name} has {value}, expected integers of at most 64 bits: None means no bound")
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.dtype in _INTEGERS:
            return int(value)
        got = f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    else:
        if not isinstance(value, bool):
            try:
                return operator.index(value)
            except TypeError:
                pass
        got = f"{value!r} of type {type(value).__name__}"
    raise TypeError(f"{name} must {expected}, got {got}")


def check_flag(name: str, value: Any) -> bool:
    """Returns Python's bool as it is, and NumPy's as a bool of Python."""
    if not is_flag(value):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
    return bool(value)


def is_flag(value: Any) -> bool:
    """Whether it is a bool of Python or of NumPy."""
    if isinstance(value, bool):
        return True
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")  # of NumPy 2 and of NumPy 1


def check_max_logit(value: Any) -> MaxLogit | None:
    """What ``return_max_logit`` asks for; None for nothing."""
    if isinstance(value, str):
        if value in ("head", "row"):
            return value  # type: ignore[return-value]  # mypy does not narrow a str
        raise ValueError(
            f"return_max_logit must be False, True, 'head' or 'row', got {value!r}: True and 'head' give the largest "
            "score of each head, 'row' that of each head and query"
        )
    if not is_flag(value):
        raise TypeError(
            f"return_max_logit must be False, True, 'head' or 'row', got {value!r} of type {type(value).__name__}"
        )
    return "head" if value else None


def results_of(
    results: tuple[Tensor, Tensor, Tensor | None], return_lse: bool, max_logit: MaxLogit | None
) -> Tensor | tuple[Tensor, ...]:
    """What a public function returns of (out, lse, row_max)."""
    out, lse, row_max = results
    wanted = (out, lse) if return_lse else (out,)
    if max_logit is not None:
        assert row_max is not None  # the problem wants it
        wanted = (*wanted, row_max if max_logit == "row" else _largest_of_heads(row_max))
    return wanted if len(wanted) > 1 else out


def _largest_of_heads(row_max: Tensor) -> Tensor:
    """(heads,) of (..., heads, queries), or () of (queries,)."""
    dims = [dim for dim in range(row_max.dim()) if dim != row_max.dim() - 2]
    return row_max.amax(dims) if row_max.numel() else row_max.new_full(row_max.shape[-2:-1], -torch.inf)
