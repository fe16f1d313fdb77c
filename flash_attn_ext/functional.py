"""The public functions. C++ takes a plain call as it is (``_C.direct_*``). For every other call they fill in a Problem,
have it brought into form, and pass it to autograd.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from flash_attn_ext import _C
from flash_attn_ext._call.blocks import tensors_of
from flash_attn_ext._call.canonical import packed_form
from flash_attn_ext._call.options import check_flag, check_max_logit, dense_problem, problem_of, results_of
from flash_attn_ext._explanation import Explanation, plans_of
from flash_attn_ext._sdpa import attend_or_decline, operands_to_ask
from flash_attn_ext._table_attention import attend_with_table, direct_entries, problem_to_explain
from flash_attn_ext.autograd import attend
from flash_attn_ext.bias_tables import BiasIndex
from flash_attn_ext.kv_cache import attention_with_kvcache as attention_with_kvcache
from flash_attn_ext.masks import BlockLists, Intervals
from flash_attn_ext.types import AttentionOptions, Backend, Causal, Layout, MaxLogit, Window
from flash_attn_ext.varlen import attention_varlen as attention_varlen

if TYPE_CHECKING:  # at run time Python 3.10 has it in typing_extensions only
    from typing_extensions import Unpack


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, argument for argument.

    ``softmax(scale * query key^T + attn_mask) value``, tile by tile (Dao 2023, "FlashAttention-2", section 3.1), for
    any number of dimensions, any strides and any head dimension. Memory is as :func:`attention` describes it.

    Args:
        query: (N, ..., Hq, L, E) or with fewer leading dimensions, down to (L, E). float32, float64, bfloat16, float16.
        key: (N, ..., H, S, E). Leading dimensions broadcast with those of ``query`` and ``value``.
        value: (N, ..., H, S, Ev). Ev may differ from E.
        attn_mask: anything that broadcasts to (N, ..., Hq, L, S), (S,) included, with any strides. bool: True = attend
            (the opposite of the ``key_padding_mask`` of nn.MultiheadAttention). float32 or query's dtype: added to the
            scaled scores; it may require grad. A row that sees no key (all False, or all -inf) gives 0.
        dropout_p: probability in [0, 1] with which a weight is dropped; kept ones are multiplied by 1 / (1 - p). There
            is no training flag: pass 0.0 for evaluation. Drawn from PyTorch's default generator of the device.
        is_causal: query i sees keys 0..i (aligned at the **top left**, also where L != S). Not together with
            ``attn_mask``.
        scale: factor on query key^T; 1 / sqrt(E) by default. Any finite number, 0 and negative ones included.
        enable_gqa: let query head h use key head h // (Hq / H). Without it unequal head counts are an error, except
            for a broadcast 1.

    Returns:
        (N, ..., Hq, L, Ev) in query's dtype. It lies in memory in the order of ``query``'s strides, so a query that
        was transposed from (N, L, H, E) gives an output that transposes back without a copy.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not go together; more than 2^29 tokens in a sequence;
            ``attn_mask`` with ``is_causal``; a call that no backend can run, with each backend's reasons.
        ValueError: an option outside its range. TypeError: an argument of the wrong type.

    Under ``torch.autocast`` query, key, value and a float mask are cast as PyTorch casts them.

    Example:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> is_token = torch.arange(128) < torch.tensor([128, 90])[:, None]  # padding at the end of a sequence
        >>> flash_attn_ext.scaled_dot_product_attention(q, q, q, attn_mask=is_token[:, None, None]).shape
        torch.Size([2, 8, 128, 64])
    """
    if not is_compiling():
        direct = _C.direct_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if direct is not None:
            return direct
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    out: Tensor = attend_or_decline(arguments)
    if out is NotImplemented:
        out = handle_torch_function(scaled_dot_product_attention, operands_to_ask(*arguments), *arguments)
    return out


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True] | MaxLogit,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True] | MaxLogit,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    return_max_logit: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_max_logit: bool | MaxLogit = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal | None = None,
    window: Window | None = None,
    bias: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_index: BiasIndex | None = None,
    mask: Tensor | None = None,
    intervals: Tensor | Intervals | None = None,
    block_lists: BlockLists | tuple[Tensor, Tensor] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    return_max_logit: bool | MaxLogit = False,
    backend: Backend | None = None,
    allow_tf32: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention with every feature of the library. Everything combines, but for ``bias`` with ``bias_table``.

    In order: scale, softcap, ALiBi, bias, mask, intervals and blocks, causality and window, softmax (with the sink),
    dropout::

        scaled = scale * q k^T
        capped = softcap * tanh(scaled / softcap)
        away   = |key - (query + diagonal)|
        score  = capped - slope * away + bias
        out    = dropout(softmax(score)) v

    (FlashAttention-2, Dao 2023, section 3.1, for the algorithm; ``flash_attn_ext.reference`` for each rule in a line.)

    Args:
        q: (..., Hq, Sq, D) for layout "bhsd", (..., Sq, Hq, D) for "bshd"; 3-D is one batch entry and 2-D, (Sq, D), one
            head. float32, float64, bfloat16 or float16, any strides, any D >= 1.
        k: (..., Hk, Sk, D), as q. Hk divides Hq; query head h uses key head h // (Hq / Hk) (GQA, Ainslie et al.
            2023). Batch dimensions broadcast among q, k and v; all three have the same number of dimensions.
        v: (..., Hk, Sk, Dv). Dv may differ from D.
        causal: None, "top_left" (query i sees keys 0..i, as ``is_causal`` in PyTorch) or "bottom_right" (the last
            query sees the last key, as ``causal`` in flash_attn; a row above the first key sees nothing).
        window: (left, right): query i sees the keys from ``left`` before to ``right`` after its diagonal key, which is
            i + Sk - Sq, or i with causal="top_left". None is unbounded; an int w is (w, w). With ``causal`` the right
            side is 0 whatever is given.
        bias: float, broadcastable to (..., Hq, Sq, Sk) whatever the layout; float32 or q's dtype. Added to the scores;
            it may require grad, and its gradient is summed over broadcast dimensions in a fixed order.
        bias_table: (Hq, entries), q's dtype or float32: the bias of each pair is an entry of its head's row, which
            ``bias_index`` names. With an index by distance no (Hq, Sq, Sk) bias is made. The table's gradient is summed
            in a fixed order. Not together with ``bias``. Fastest in q's dtype.
        bias_index: the entry of each pair. By the distance d = key - (query + diagonal), with the diagonal of
            ``window``: "clip" for entry ``m + min(max(d, -m), m)`` of 2 m + 1; "t5" or a
            :class:`~flash_attn_ext.bias_tables.T5Buckets` for the buckets of T5. Or an int32 or int16 tensor (Sq, Sk)
            of entries, the same for all batch entries and heads: then a bias of (Hq, Sq, Sk) is made and kept for the
            backward pass. On the CPU an entry that the table lacks raises ValueError. On a GPU, in traces and in
            transforms entries are not looked at, and are clamped.
        mask: bool, broadcastable as bias, True = attend.
        intervals: (..., Hq or 1, Sq, 2 n) int32 with n up to 4, on q's device; batch dimensions may be 1 or missing.
            Query i sees key j where ``intervals[..., i, 2m] <= j < intervals[..., i, 2m + 1]`` for some m < n, and
            where causality, window and mask let it. It is a mask that takes memory for each query, not for each pair,
            and tiles of keys that no interval has are skipped. Intervals may overlap, be empty and have any order. On
            the CPU a value below 0 or above Sk raises ValueError. On a GPU values are not looked at before the kernels
            run, and are clamped. A last dimension that is not contiguous is copied.
        block_lists: the blocks of 64 or 128 keys that each block of 64 or 128 queries sees:
            ``flash_attn_ext.masks.BlockLists``, or its ``(counts, indices)``, whose blocks have as many keys as queries
            and a size that follows from the number of lists. (..., Hq, Hk or 1, query blocks) and another dimension for
            the blocks of a list, int32 or int64, on q's device; batch dimensions may be 1 or missing. Query i sees key
            j where its list has j's block, and where everything else lets it. Blocks that no list of a tile has are
            skipped in both passes. Lists take memory for each pair of blocks, one byte. On the CPU a block that does
            not exist raises ValueError, on a GPU and in traces it is ignored.
        alibi_slopes: (Hq,) or ``(*batch, Hq)``, float32 (float64 for float64 q): the bias ``-slope * |key - (query +
            diagonal)|`` of ALiBi (Press et al. 2022, section 3). Differentiable.
        softcap: scores become softcap * tanh(score / softcap), > 0 (Gemma Team 2024, section 2). None: no cap.
        sink: (Hq,), dtype as alibi_slopes: a logit that joins each row's softmax denominator and has no value (Xiao
            et al. 2023, section 3). Differentiable.
        dropout_p: probability in [0, 1] with which a weight is dropped; kept ones are multiplied by 1 / (1 - p). Drawn
            from PyTorch's default generator of q's device; applied whenever it is above 0. The LSE is unaffected.
        scale: 1 / sqrt(D) by default; any finite number.
        layout: where heads and sequence are: "bhsd" or "bshd". ``out`` has it too.
        return_lse: also return the log-sum-exp of each row's scores.
        return_max_logit: also return the largest score, after the LSE: True or "head" for that of each head over the
            whole batch, as QK-clip needs it (Kimi Team 2025, "Kimi K2", section 2.1), "row" for that of each row. It
            is a score as it enters the softmax, of a key that the row sees; the sink does not count. The forward pass
            computes it on the way.
        backend: None for the first that can run this call, or a name from ``explain`` to force one.
        allow_tf32: let float32 on a GPU multiply in single TF32 products, up to head dim 128. That is faster, and each
            product is within 2**-10 of the exact one instead of 2**-20. Nothing else changes: not other dtypes, not the
            CPU. PyTorch's own TF32 switches are not looked at.

    Returns:
        ``out``: (..., Hq, Sq, Dv) or (..., Sq, Hq, Dv), q's dtype, in memory in the order of q's strides. With
        ``return_lse``, ``(out, lse)``: ``lse`` (..., Hq, Sq) whatever the layout, natural log, float32 (float64 for
        float64 q), sink included, differentiable. A row that sees no key has out = 0, lse = -inf (lse = sink with a
        sink) and zero gradients. With ``return_max_logit`` the largest scores come last, in lse's dtype and without
        gradient: (Hq,), or in lse's shape for "row". A row that sees no key has -inf, and one whose lse is NaN has NaN.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not go together; more than 2^29 tokens in a sequence; a call
            that no backend can run.
        ValueError: an option outside its range. TypeError: an argument of the wrong type.

    Memory: the forward pass never holds an Sq x Sk matrix of scores; on Hopper it may copy a boolean mask, packed to
    one bit per element. The backward pass on a GPU may materialise P and dS of some heads at a time, in a workspace of
    at most min(2 GiB, a 40th of the GPU's memory). The environment variable ``FLASH_ATTN_EXT_WORKSPACE_MIB``, read at
    each call, sets another bound of up to 2048; with 0 they are recomputed instead, which takes longer. :func:`explain`
    says what a call stores. ``FLASH_ATTN_EXT_MULTIPROCESSORS``, 1 to 1024, also read at each call, replaces the number
    of SMs from which split-KV on a GPU follows, so that GPUs of one architecture and any size give the same bits.

    Under ``torch.autocast`` q, k and v are cast as PyTorch casts them, and a bias that is not float32.

    Example:
        >>> q, k, v = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 64)
        >>> out, lse = flash_attn_ext.attention(q, k, v, causal="bottom_right", window=(32, 0), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128]))
        >>> out, max_logit = flash_attn_ext.attention(q, k, v, return_max_logit=True)
        >>> max_logit.shape  # of each head
        torch.Size([8])
    """
    if isinstance(intervals, Intervals):
        intervals = intervals.tensor
    has_table = bias_table is not None or bias_index is not None
    entries = None
    if has_table and block_lists is None and not is_compiling():
        entries = direct_entries((q, k), causal, layout, bias_table, bias_index)
    if (entries is not None or not has_table) and block_lists is None and not is_compiling():
        # fmt: off
        results = _C.direct_attention(
            q, k, v, causal, window, bias, mask, intervals, alibi_slopes, softcap, sink, dropout_p, scale, layout,
            return_lse, return_max_logit, backend, allow_tf32, bias_table, entries,
        )
        # fmt: on
        if results is not None:
            return results
    tensors = (bias, bias_table, bias_index, mask, intervals, *tensors_of(block_lists), alibi_slopes, sink)
    if asked := operands_to_ask(q, k, v, *tensors):
        # fmt: off
        theirs: Tensor | tuple[Tensor, ...] = handle_torch_function(
            attention, asked, q, k, v, causal=causal, window=window, bias=bias, bias_table=bias_table,
            bias_index=bias_index, mask=mask, intervals=intervals, block_lists=block_lists, alibi_slopes=alibi_slopes,
            softcap=softcap, sink=sink, dropout_p=dropout_p, scale=scale, layout=layout, return_lse=return_lse,
            return_max_logit=return_max_logit, backend=backend, allow_tf32=allow_tf32,
        )
        # fmt: on
        return theirs
    return_lse, max_logit = check_flag("return_lse", return_lse), check_max_logit(return_max_logit)
    problem = problem_of(
        q=q,
        k=k,
        v=v,
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
    problem, form, operands = dense_problem(problem, layout, block_lists)
    if has_table:
        out, lse, row_max = attend_with_table(problem, bias_table, bias_index, operands)
    else:
        out, lse, row_max = attend(problem, operands)
    if form.rank != 4:
        out, lse = form.restore_out(out), form.restore_lse(lse)
        row_max = None if row_max is None else form.restore_lse(row_max)
    if problem.sequence_first:
        out = out.transpose(-3, -2)
    return results_of((out, lse, row_max), return_lse, max_logit)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: Causal | None = None,
    window: Window | None = None,
    bias: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_index: BiasIndex | None = None,
    mask: Tensor | None = None,
    intervals: Tensor | Intervals | None = None,
    block_lists: BlockLists | tuple[Tensor, Tensor] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    return_max_logit: bool | MaxLogit = False,
    backend: Backend | None = None,
    allow_tf32: bool = False,
) -> Explanation:
    """Says what the same call to :func:`attention` would run, and why each other backend would not. Computes nothing.

    Arguments are those of :func:`attention`, or with ``cu_seqlens_q`` and ``cu_seqlens_k`` those of
    :func:`attention_varlen`; ``layout`` then has to be left at its default, since packed tensors have one layout.

    Returns an :class:`Explanation`. The plans of both passes (:class:`Plan`) are those that the call itself would
    follow: which kernel, its score mode and tile, which scores are materialised, every part of the workspace. Raises
    what the call itself would raise, except for "no backend can run this call": that is an answer here.

    Example:
        >>> q, k, v = torch.randn(3, 1, 8, 128, 64)
        >>> print(flash_attn_ext.explain(q, k, v, causal="top_left"))
        backend: cpu
          forward:  tiled on the CPU; no workspace
          backward: tiled on the CPU; delta by its own kernel; workspace 4096 bytes (delta 4096)
          ...  runs
    """
    check_flag("return_lse", return_lse)
    max_logit = check_max_logit(return_max_logit)
    packing = dict(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    problem = problem_of(
        q=q,
        k=k,
        v=v,
        **packing,
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
    if all(given is None for given in packing.values()):
        problem, _, operands = dense_problem(problem, layout, block_lists)
        if bias_table is not None or bias_index is not None:
            problem = problem_to_explain(problem, bias_table, bias_index, operands)
    else:
        if bias_table is not None or bias_index is not None:
            raise ValueError(
                "bias_table does not go with cu_seqlens: pad the sequences and pass a mask, or pass a bias"
            )
        if block_lists is not None:
            raise ValueError("block_lists does not go with cu_seqlens: pass intervals or a mask")
        if layout != "bhsd":
            raise ValueError(f"layout={layout!r} does not go with cu_seqlens: packed tensors are (tokens, heads, dim)")
        problem = packed_form(problem)
    if problem.dropout_p == 1.0:  # nothing is kept, and no kernel has to know
        problem = problem._replace(dropout_p=0.0)
    if problem.dropout_p > 0:  # a seed is needed, but explain must not advance a generator
        problem = problem._replace(rng_seed=torch.zeros(1, dtype=torch.int64, device=problem.q.device))
    reasons = {name: tuple(why) for name, why in _C.attention_explain(problem)}
    runs = next((name for name, why in reasons.items() if not why), None)
    if runs is None:
        return Explanation(runs, reasons)
    return Explanation(runs, reasons, *plans_of(problem))
