"""flash-attention 2's functions: its names, order and defaults of arguments, its layouts, and what it means by them.

Each translates its arguments and calls ``attention`` or ``attention_varlen``, which check the tensors and compute.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext._call.canonical import operands_of, packed_form
from flash_attn_ext._call.options import check_flag, dense_problem, problem_of
from flash_attn_ext._call.problem import Problem
from flash_attn_ext._call.seeds import draw_seed
from flash_attn_ext.autograd import attend
from flash_attn_ext.functional import attention, attention_varlen
from flash_attn_ext.integrations.flash_attn.arguments import WindowSize, options_of, require_shape

WithProbs = tuple[Tensor, Tensor, Tensor | None]  # out, softmax_lse, S_dmask
# Fields of a problem for which flash_attn has no argument.
_OURS: dict[str, Any] = dict(backend=None, allow_tf32=False)


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> WithProbs: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs: ...
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """``flash_attn.flash_attn_func`` (Dao 2023, "FlashAttention-2", section 3.1), on :func:`flash_attn_ext.attention`.

    Args:
        q: (batch, seqlen_q, heads, headdim), float32, float64, bfloat16 or float16, any strides, any headdim.
        k: (batch, seqlen_k, heads_k, headdim). heads_k divides heads; query head h uses h // (heads / heads_k).
        v: (batch, seqlen_k, heads_k, headdim_v). headdim_v may differ from headdim.
        dropout_p: probability in [0, 1] with which a weight is dropped. There is no training flag.
        softmax_scale: any finite number; None is 1 / sqrt(headdim).
        causal: True: query i sees the keys up to i + seqlen_k - seqlen_q (**bottom right**).
        window_size: (left, right), any two integers, also in a list, a tensor or a NumPy array: query i sees the keys
            from ``left`` before i + seqlen_k - seqlen_q to ``right`` after it. -1 or None is unbounded. With ``causal``
            the right side is 0.
        softcap: scores become softcap * tanh(score / softcap), before ALiBi. 0.0 or None is no cap.
        alibi_slopes: (heads,) or (batch, heads), float32 (float64 for float64 q): the bias ``-slope * |i + seqlen_k
            - seqlen_q - j|``. Differentiable.
        deterministic: no effect, because gradients are bitwise reproducible with either value.
        return_attn_probs: return (out, softmax_lse, S_dmask). The weights themselves are never formed.

    Returns:
        ``out`` (batch, seqlen_q, heads, headdim_v) in q's dtype. With ``return_attn_probs`` also ``softmax_lse``
        (batch, heads, seqlen_q), float32 (float64 for float64 q), differentiable, -inf for a row that sees no key; and
        ``S_dmask``: None without dropout, else (batch, heads, seqlen_q, seqlen_k) in q's dtype, 1 where the call
        kept a weight and -1 where it dropped it. Making it takes that memory, waits for the GPU and breaks a
        graph of ``torch.compile``.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not go together; a call that no backend can run.
        ValueError: an option outside its range. TypeError: an argument of the wrong type.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> q, k, v = torch.randn(3, 2, 128, 8, 64)
        >>> flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(32, 0)).shape
        torch.Size([2, 128, 8, 64])
    """
    require_shape("(batch, seqlen, heads, headdim)", q=q, k=k, v=v)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise RuntimeError(
            f"q, k and v have batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]}, expected the same: expand them, "
            "or call flash_attn_ext.attention(..., layout='bshd'), which broadcasts"
        )
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    check_flag("return_attn_probs", return_attn_probs)
    if not return_attn_probs:
        return attention(q, k, v, **options, layout="bshd")
    problem, _, operands = dense_problem(problem_of(q=q, k=k, v=v, **options, **_OURS), "bshd")
    out, lse, seed = _attend_by_known_seed(problem, operands)
    return out.transpose(1, 2), lse, _signs_of_kept(seed, options["dropout_p"], (*lse.shape, k.shape[1]), out)


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    block_table: None = None,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    block_table: None = None,
) -> WithProbs: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Tensor | WithProbs: ...
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Tensor | WithProbs:
    """``flash_attn.flash_attn_varlen_func``: packed sequences, on :func:`flash_attn_ext.attention_varlen`.

    Arguments that are not named here are those of :func:`flash_attn_func`.

    Args:
        q: (total_q, heads, headdim).
        k: (total_k, heads_k, headdim).
        v: (total_k, heads_k, headdim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device: 0, then the running sum of the lengths. On a GPU
            the values are trusted, on the CPU they are checked.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, or None; they never change the result.
        alibi_slopes: (heads,) or (batch, heads).
        block_table: must be None; :func:`flash_attn_with_kvcache` takes paged caches.

    Returns:
        ``out`` (total_q, heads, headdim_v); with ``return_attn_probs`` also ``softmax_lse`` (heads, total_q) and
        ``S_dmask``: None without dropout, else (batch, heads, max_seqlen_q, max_seqlen_k), by the positions inside a
        sequence, as in :func:`flash_attn_func`. Where a max_seqlen is None, the longest length takes its place.

    Raises:
        NotImplementedError: for a ``block_table``. All others as :func:`flash_attn_func`.

    Example:
        >>> from flash_attn_ext.integrations import flash_attn
        >>> q, k, v = torch.randn(3, 8, 4, 64)  # 8 tokens of 2 sequences
        >>> cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5, causal=True).shape
        torch.Size([8, 4, 64])
    """
    if block_table is not None:
        raise NotImplementedError(
            "block_table must be None, got a paged key-value cache, which packed queries cannot read here: where all "
            "sequences have as many queries, call flash_attn_with_kvcache, which takes it; else gather the pages of "
            "each sequence into packed k and v, and pass cu_seqlens_k of their lengths"
        )
    require_shape("(total, heads, headdim)", q=q, k=k, v=v)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    check_flag("return_attn_probs", return_attn_probs)
    if not return_attn_probs:
        return attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options
        )
    packing = dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    problem = packed_form(problem_of(q=q, k=k, v=v, **packing, **options, **_OURS))
    out, lse, seed = _attend_by_known_seed(problem, operands_of(*problem[:3]))
    if options["dropout_p"] == 0:
        return out, lse, None
    lengths = (_longest(max_seqlen_q, cu_seqlens_q), _longest(max_seqlen_k, cu_seqlens_k))
    sizes = (cu_seqlens_q.numel() - 1, q.shape[1], *lengths)
    return out, lse, _signs_of_kept(seed, options["dropout_p"], sizes, out)


def _longest(max_seqlen: int | None, cu_seqlens: Tensor) -> int:
    if max_seqlen is not None:
        return int(max_seqlen)
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


def _attend_by_known_seed(problem: Problem, operands: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Calls ``attend`` with the seed that it would draw, and also returns the seed."""
    if 0 < problem.dropout_p < 1:
        problem = problem._replace(rng_seed=draw_seed(problem.q.device, operands))
    out, lse, _ = attend(problem, operands)
    return out, lse, problem.rng_seed


def _signs_of_kept(
    seed: Tensor | None, dropout_p: float, sizes: tuple[int, int, int, int], out: Tensor
) -> Tensor | None:
    """S_dmask, with the signs that flash-attention documents, but with ones instead of the weights."""
    if dropout_p == 0:
        return None
    if seed is None:  # nothing was drawn, since nothing is kept
        return out.new_full(sizes, -1.0)
    kept = _C.dropout_mask(seed, dropout_p, *sizes)
    return kept.to(out.device).to(out.dtype).mul_(2).sub_(1)
