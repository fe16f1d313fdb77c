"""Users' tensors in, the one form that the extension takes out (see ``_C.pyi``), and the results back.

Only what changes form is checked here: ranks, leading dimensions, head rules, spelling of options. Shapes, dtypes and
devices of the canonical form are checked once, in C++ (csrc/host/checks.h).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_ext import _C
from flash_attn_ext._options import check_causal, check_flag, check_length, check_number, window_pair


class Problem(NamedTuple):
    """The arguments of ``_C.attention_forward``, in its order. Without ``cu_seqlens_*`` the batch is dense."""

    q: Tensor  # (B, Hq, Sq, D), packed: (Tq, Hq, D)
    k: Tensor  # (B, Hk, Sk, D), packed: (Tk, Hk, D)
    v: Tensor  # (B, Hk, Sk, Dv), packed: (Tk, Hk, Dv)
    bias: Tensor | None = None  # (B|1, Hq|1, Sq|1, Sk|1)
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None  # (Hq,) or (B, Hq)
    sink: Tensor | None = None  # (Hq,)
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    rng_seed: Tensor | None = None  # (1,) int64
    scale: float = 1.0
    softcap: float | None = None
    causal: str | None = None
    window_left: int | None = None
    window_right: int | None = None
    dropout_p: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    backend: str | None = None
    allow_tf32: bool = False
    sequence_first: bool = False


class ScoreTensors(NamedTuple):
    """What is added to scores, as the user gave it."""

    bias: Tensor | None
    mask: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None


class Options(NamedTuple):
    """The keywords that are not tensors, as the user gave them."""

    causal: str | None
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    dropout_p: float
    scale: float | None
    backend: str | None
    allow_tf32: bool


class Packing(NamedTuple):
    """What makes a call packed, as the user gave it."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class DenseForm(NamedTuple):
    """How a dense call was shaped: its dimensions before heads (not kept for 4-D calls) and the rank of its output."""

    lead: tuple[int, ...]
    rank: int

    def restore_out(self, out: Tensor) -> Tensor:
        """(B, H, Sq, Dv) -> (*lead, H, Sq, Dv), without the dimensions that the caller did not have."""
        return out if self.rank == 4 else self._restore(out, self.rank)

    def restore_lse(self, lse: Tensor) -> Tensor:
        return self._restore(lse, self.rank - 1)

    def _restore(self, tensor: Tensor, rank: int) -> Tensor:
        if self.rank == 4:
            return tensor
        if self.rank > 4:
            return tensor.reshape(*self.lead, *tensor.shape[1:])
        while tensor.dim() > rank:
            tensor = tensor.squeeze(0)
        return tensor


def dense_problem(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoreTensors, options: Options, layout: str
) -> tuple[Problem, DenseForm]:
    """The arguments of ``attention`` in canonical form (without a seed), and how to give the results back."""
    bias, mask, alibi_slopes, sink = scores
    any_scores = bias is not None or mask is not None or alibi_slopes is not None or sink is not None
    if any_scores:
        require_tensors(ScoreTensors._fields, scores, num_required=0)
    if layout == "bhsd" and are_canonical(q, k, v):
        form = PLAIN_FORM
    else:
        q, k, v = _heads_before_sequence(q, k, v, layout)
        q, k, v, bias = _cast_for_autocast(q, k, v, bias)
        q, k, v, form = dense_form(q, k, v, ("q", "k", "v"))
    if any_scores:
        scores = ScoreTensors(
            table_form("bias", bias, q, k.size(2), form),
            table_form("mask", mask, q, k.size(2), form),
            _slopes_form(alibi_slopes, form, q.shape[:1]),
            sink,
        )
    problem = _problem(q, k, v, scores, options, _DENSE)
    return problem._replace(sequence_first=True) if layout == "bshd" else problem, form


def _heads_before_sequence(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    require_tensors(Problem._fields, (q, k, v))
    if not q.dim() == k.dim() == v.dim() >= 2:
        raise RuntimeError(
            "q, k and v must have the same number of dimensions, at least 2, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: add dimensions of size 1"
        )
    if layout == "bshd":
        if q.dim() > 2:
            q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
    elif layout != "bhsd":
        raise ValueError(
            f"layout must be 'bhsd' (..., heads, sequence, head dim) or 'bshd' (..., sequence, heads, head dim), "
            f"got {layout!r}"
        )
    return q, k, v


def packed_problem(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scores: ScoreTensors, options: Options
) -> Problem:
    """The arguments of ``attention_varlen`` in canonical form (without a seed)."""
    require_tensors(Problem._fields, (q, k, v, *scores))
    require_tensors(Packing._fields, packing[:2], num_required=2)
    packing = packing._replace(
        max_seqlen_q=check_length("max_seqlen_q", packing.max_seqlen_q),
        max_seqlen_k=check_length("max_seqlen_k", packing.max_seqlen_k),
    )
    q, k, v, bias = _cast_for_autocast(q, k, v, scores.bias)
    scores = scores._replace(bias=_packed_table("bias", bias), mask=_packed_table("mask", scores.mask))
    return _problem(q, k, v, scores, options, packing)


def _problem(q: Tensor, k: Tensor, v: Tensor, scores: ScoreTensors, options: Options, packing: Packing) -> Problem:
    causal, window, softcap, dropout_p, scale, backend, allow_tf32 = options
    check_flag("allow_tf32", allow_tf32)
    if causal is not None:
        check_causal(causal)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be None or a name, got {type(backend).__name__}")
    left, right = (None, None) if window is None else window_pair(window)
    return Problem(
        q,
        k,
        v,
        *scores,
        packing.cu_seqlens_q,
        packing.cu_seqlens_k,
        None,
        default_scale(q) if scale is None else check_number("scale", scale),
        None if softcap is None else check_number("softcap", softcap),
        causal,
        left,
        right,
        check_number("dropout_p", dropout_p),
        packing.max_seqlen_q,
        packing.max_seqlen_k,
        backend,
        allow_tf32,
    )


def are_canonical(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether they are plain 4-D tensors that need no bringing into form, as in most calls; answered in C++, since each
    question alone takes as long from Python."""
    return not is_compiling() and _C.are_canonical(q, k, v)


def require_tensors(names: tuple[str, ...], tensors: tuple, num_required: int = 3) -> None:
    """The first ``num_required`` must be tensors, the others may be None."""
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) and (tensor is not None or index < num_required):
            raise TypeError(f"{names[index]} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor is not None and tensor.is_nested:
            raise TypeError(
                f"{names[index]} is a nested tensor, which is not taken: pass its values() and offsets() to "
                "flash_attn_ext.attention_varlen, or pad it and pass a mask"
            )
        if tensor is not None and tensor.layout != torch.strided:
            raise TypeError(
                f"{names[index]} has layout {tensor.layout}, expected a dense tensor: pass {names[index]}.to_dense()"
            )


def dense_form(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str]
) -> tuple[Tensor, Tensor, Tensor, DenseForm]:
    """Broadcast the dimensions before (H, S, D) and fold them into one. Heads are left as they are."""
    rank = q.dim()
    if rank == 4 and k.dim() == 4 and v.dim() == 4 and q.size(0) == k.size(0) == v.size(0):
        return q, k, v, PLAIN_FORM
    rank = max(rank, k.dim(), v.dim())
    tensors = [_at_least_3d(t, rank, name) for name, t in zip(names, (q, k, v), strict=True)]
    try:
        lead = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, (q, k, v), strict=True))
        raise RuntimeError(f"the batch dimensions of {shapes} do not broadcast: each must be equal, or 1") from None
    q, k, v = (_fold(t, lead) for t in tensors)
    return q, k, v, DenseForm(lead, rank)


def table_form(name: str, table: Tensor | None, q: Tensor, num_keys: int, form: DenseForm) -> Tensor | None:
    """A bias or mask that broadcasts to (*lead, Hq, Sq, Sk) -> (B|1, Hq|1, Sq|1, Sk|1); `q` is canonical.

    A view, except when it has some of several leading dimensions and broadcasts over others: then a copy with all.
    """
    if table is None:
        return None
    lead = form.lead if form.rank > 4 else q.shape[:1]
    scores = (*lead, q.size(1), q.size(2), num_keys)[-form.rank :]
    table = _without_leading_ones(table, form.rank)
    missing = form.rank - table.dim()
    if missing < 0 or not _broadcasts(table.shape, scores[missing:]):
        raise RuntimeError(
            f"{name} has shape {tuple(table.shape)}, which does not broadcast to {scores} = (..., heads, queries, "
            "keys) here: every dimension must be 1 or equal, counted from the right"
        )
    if missing or form.rank < 4:
        table = table[(None,) * (max(form.rank, 4) - table.dim())]
    if form.rank <= 4:
        return table
    if all(n == 1 for n in table.shape[:-3]):
        return table[(0,) * (form.rank - 4)]
    return _fold(table, form.lead)


def _without_leading_ones(table: Tensor, rank: int) -> Tensor:
    """Dimensions of size 1 that a table has before those of the scores broadcast against nothing."""
    while table.dim() > rank and table.size(0) == 1:
        table = table[0]
    return table


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    for index, size in enumerate(shape):  # noqa: SIM110, half the time of any()
        if size != 1 and size != full[index]:
            return False
    return True


def _slopes_form(alibi_slopes: Tensor | None, form: DenseForm, batch: tuple[int, ...]) -> Tensor | None:
    """(Hq,) or (B, Hq) as it is, (*lead, Hq) -> (B, Hq)."""
    if alibi_slopes is None or alibi_slopes.dim() <= 2:
        return alibi_slopes
    lead = form.lead if form.rank > 4 else batch
    if tuple(alibi_slopes.shape[:-1]) != tuple(lead):
        raise RuntimeError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}, expected (heads,) or (*batch, heads) with batch "
            f"dimensions {tuple(lead)}"
        )
    return alibi_slopes.reshape(math.prod(lead), alibi_slopes.size(-1))


def default_scale(q: Tensor) -> float:
    """1 / sqrt(D); without a head dimension every score is 0 whatever the scale."""
    head_dim = q.size(-1)
    return head_dim**-0.5 if head_dim > 0 else 1.0


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What torch.autocast casts tensors of that device to at this moment, or None."""
    if tensor.is_meta:  # a device type that autocast does not know
        return None
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast does to an argument: float64 and what is not floating stay as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _cast_for_autocast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    dtype = autocast_dtype(q)
    if dtype is None:
        return q, k, v, bias
    if bias is not None and bias.dtype != torch.float32:
        bias = cast(bias, dtype)
    return cast(q, dtype), cast(k, dtype), cast(v, dtype), bias


def _packed_table(name: str, table: Tensor | None) -> Tensor | None:
    if table is None or table.dim() == 4:
        return table
    table = _without_leading_ones(table, 4)
    if table.dim() > 4:
        raise RuntimeError(
            f"{name} has shape {tuple(table.shape)}, expected one that broadcasts to (batch, heads, max_seqlen_q, "
            "max_seqlen_k)"
        )
    return table[(None,) * (4 - table.dim())]


def _at_least_3d(tensor: Tensor, rank: int, name: str) -> Tensor:
    if tensor.dim() < 2:
        raise RuntimeError(f"{name} must have at least 2 dimensions, got shape {tuple(tensor.shape)}")
    return tensor[(None,) * (max(rank, 3) - tensor.dim())]


def _fold(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(*lead or 1, H, S, D) -> (B, H, S, D). A view where strides allow it, so broadcast dimensions cost nothing."""
    if len(lead) == 1:
        return tensor.expand(lead[0], -1, -1, -1)
    if not lead:
        return tensor.unsqueeze(0)
    inner = tensor.shape[-3:]
    return tensor.expand(*lead, *inner).reshape(math.prod(lead), *inner)


PLAIN_FORM = DenseForm((), 4)
_DENSE = Packing(None, None, None, None)
