"""Attention of packed sequences of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor
from torch.overrides import handle_torch_function

from flash_attn_ext._call.canonical import operands_of, packed_form
from flash_attn_ext._call.options import check_flag, check_max_logit, problem_of, results_of
from flash_attn_ext._sdpa import operands_to_ask
from flash_attn_ext.autograd import attend
from flash_attn_ext.masks import Intervals
from flash_attn_ext.types import Backend, Causal, MaxLogit, VarlenOptions, Window

if TYPE_CHECKING:  # at run time Python 3.10 has it in typing_extensions only
    from typing_extensions import Unpack


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True] | MaxLogit,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True] | MaxLogit,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool,
    return_max_logit: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool = False,
    return_max_logit: bool | MaxLogit = False,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, ...]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: Causal | None = None,
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    intervals: Tensor | Intervals | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool | MaxLogit = False,
    backend: Backend | None = None,
    allow_tf32: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of sequences of different lengths, packed one after the other without padding.

    Sequence b has queries ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]`` and attends only to its own keys, exactly as a
    call of :func:`attention` on that sequence alone would. What is not named here is as in :func:`attention`, and so
    are the sources.

    Args:
        q: (Tq, Hq, D), with Tq the sum of all lengths.
        k, v: (Tk, Hk, D) and (Tk, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device: 0, then the running sum of the lengths, ending at
            Tq and Tk. Lengths may be 0. On the CPU the values are checked. On a GPU they are trusted, since looking at
            them would wait for the device: wrong ones give wrong results, but never an access outside the tensors.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. Optional: they size ``bias`` and ``mask`` and the GPU's
            grid, and never change the result. On a GPU they are trusted too: a longer sequence is cut off there.
        bias, mask: broadcastable to (batch, Hq, max_seqlen_q, max_seqlen_k), where each max_seqlen is the one given or
            else the longest length; indexed by the position inside the sequence. On a GPU, without a max_seqlen, their
            own size is trusted as a bound.
        intervals: (Hq or 1, Tq, 2 n) int32: as in :func:`attention`, for each token of q, by the position of a key in
            its sequence.
        alibi_slopes: (Hq,) or (batch, Hq).

    Returns:
        ``out`` (Tq, Hq, Dv), and with ``return_lse`` also ``lse`` (Hq, Tq). With ``return_max_logit`` the largest
        scores come last: (Hq,), or (Hq, Tq) for "row".

    Raises:
        RuntimeError: on the CPU also for cu_seqlens that decrease, or do not begin at 0 or end at the number of
            tokens. ValueError: there also for a max_seqlen below the longest length. Others as :func:`attention`.

    Example:
        >>> q, k, v = torch.randn(3, 8, 4, 64)  # 8 tokens of 2 sequences
        >>> cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
        >>> flash_attn_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal="bottom_right").shape
        torch.Size([8, 4, 64])
        >>> out, max_logit = flash_attn_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, return_max_logit="row")
        >>> max_logit.shape
        torch.Size([4, 8])
    """
    if asked := operands_to_ask(q, k, v, cu_seqlens_q, cu_seqlens_k, bias, mask, intervals, alibi_slopes, sink):
        # fmt: off
        theirs: Tensor | tuple[Tensor, ...] = handle_torch_function(
            attention_varlen, asked, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, causal=causal, window=window, bias=bias, mask=mask, intervals=intervals,
            alibi_slopes=alibi_slopes, softcap=softcap, sink=sink, dropout_p=dropout_p, scale=scale,
            return_lse=return_lse, return_max_logit=return_max_logit, backend=backend, allow_tf32=allow_tf32,
        )
        # fmt: on
        return theirs
    return_lse, max_logit = check_flag("return_lse", return_lse), check_max_logit(return_max_logit)
    problem = problem_of(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        bias=bias,
        mask=mask,
        intervals=intervals,
        alibi_slopes=alibi_slopes,
        sink=sink,
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_p=dropout_p,
        scale=scale,
        backend=backend,
        allow_tf32=allow_tf32,
        wants_row_max=max_logit is not None,
    )
    problem = packed_form(problem)
    return results_of(attend(problem, operands_of(*problem[:3])), return_lse, max_logit)
