"""The keywords of ``attention``, ``attention_varlen`` and ``explain`` as a problem."""

from __future__ import annotations

from typing import Any

from flash_attn_ext._canonical import CANONICAL, OWN_NAMES, DenseForm, dense_form, operands_of, require_tensors
from flash_attn_ext._options import (
    check_backend,
    check_causal,
    check_flag,
    check_length,
    check_number,
    check_number_or_none,
    is_sequence_first,
    window_pair,
)
from flash_attn_ext._problem import Problem
from flash_attn_ext.types import Layout, Window


def problem_of(*, window: Window | None, **given: Any) -> Problem:
    """The user's arguments as a problem, with its options checked and spelled as the extension takes them."""
    given["window_left"], given["window_right"] = window_pair(window)
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


def dense_problem(problem: Problem, layout: Layout) -> tuple[Problem, DenseForm, int]:
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
    return *dense_form(problem, operands), operands
