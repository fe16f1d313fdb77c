"""Problems so small that every element can be perturbed: each feature alone, and in combinations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from support.backends import Backend
from support.cases import ALL_PATTERNS, Case, Inputs, make_inputs
from support.masks import attended
from support.packed import PackedCase, call_packed, make_packed
from support.runners import call_ours

SMALL = dict(sq=3, sk=4, d=2, batch=1, heads=2)
EVERYTHING = dict(bias="bhqk", alibi="bh", softcap=2.0, sink=True)
CASES = [
    Case(**SMALL),
    Case(**SMALL, causal="top_left"),
    Case(**SMALL, causal="bottom_right"),
    Case(**(SMALL | dict(sq=4, sk=3)), causal="bottom_right"),  # the first row sees nothing
    Case(**SMALL, window=(1, 1)),
    Case(**SMALL, window=(1, 0), causal="bottom_right"),
    Case(**SMALL, scale=-0.7),
    Case(**SMALL, scale=0.0),
    Case(**SMALL, mask="11qk", sink=True),
    Case(**SMALL, mask="bh1k"),
    Case(**SMALL, intervals="1h", num_intervals=2),
    Case(**(SMALL | dict(sk=66, d=1)), blocks="1h"),
    Case(**SMALL, softcap=0.8),
    Case(**SMALL, sink=True),
    Case(**SMALL, alibi="h"),
    Case(**SMALL, alibi="bh", causal="top_left"),
    Case(**(SMALL | dict(batch=2)), alibi="bh", causal="bottom_right"),
    Case(**SMALL, dropout_p=0.4),
    Case(**SMALL, dropout_p=0.4, sink=True, softcap=1.0, alibi="h"),
    Case(**(SMALL | dict(heads=4)), kv_heads=2),
    Case(**(SMALL | dict(heads=3)), kv_heads=1, bias="1hqk", causal="bottom_right"),
    Case(**SMALL, dv=3),
    Case(**SMALL, dv=1, sink=True),
    Case(**SMALL, layout="bshd"),
    Case(**(SMALL | dict(heads=4)), kv_heads=2, layout="bshd", **EVERYTHING, dropout_p=0.3),
    Case(**SMALL, **EVERYTHING, causal="top_left"),
    Case(**SMALL, **EVERYTHING, window=(1, 2), causal="bottom_right"),
    Case(**(SMALL | dict(batch=2)), **EVERYTHING, mask="b11k", dropout_p=0.2, dv=3),
]
BIAS_PATTERNS = [
    Case(**(SMALL | dict(batch=2)), bias=pattern, causal=causal)
    for pattern in ALL_PATTERNS
    for causal in (None, "bottom_right")
]
PACKED_CASES = [
    PackedCase((3, 0, 2), (2, 3, 3), Case(d=2)),
    PackedCase((3, 1, 2), (4, 1, 3), Case(d=2, causal="top_left", softcap=1.0)),
    PackedCase((2, 1, 3), (4, 1, 3), Case(d=2, causal="bottom_right", alibi="bh", dv=3)),
    PackedCase((3, 1, 2), (2, 1, 3), Case(d=2, bias="bhqk", sink=True, window=(1, 1))),
    PackedCase((3, 1, 2), (2, 1, 3), Case(d=2, bias="11q1", dropout_p=0.3, sink=True)),
    PackedCase((3, 1, 2), (4, 2, 3), Case(d=2, intervals="1h", num_intervals=2, window=(2, 1), sink=True)),
    PackedCase((3, 1), (2, 2), Case(d=2, heads=4, kv_heads=2, bias="1h1k", mask="b11k", sink=True)),
]


def function_of(
    case: Case | PackedCase, backend: Backend
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], dict[str, torch.Tensor], Inputs]:
    """Our attention of a case in float64 as a function of its differentiable tensors, and these, fresh leaves by name.

    It returns (out, lse), or only out where a row sees nothing: its LSE is -inf, which finite differences cannot take.
    """
    if isinstance(case, PackedCase):
        inputs = make_packed(case, torch.float64, backend.device)
    else:
        inputs = make_inputs(case, torch.float64, backend.device)
    leaves = inputs.leaves()
    names = list(leaves)

    def function(*tensors):
        given = dict(zip(names, tensors, strict=True))
        if isinstance(case, PackedCase):
            return call_packed(case, inputs, given, backend)
        out, lse = call_ours(inputs, given, backend)
        return (out, lse) if has_finite_lse(case, inputs) else (out,)

    return function, leaves, inputs


def has_finite_lse(case: Case, inputs: Inputs) -> bool:
    return case.sink or bool(attended(case, inputs.whole_mask).any(-1).all())
