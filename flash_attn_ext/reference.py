"""Exact attention in plain PyTorch: the specification that the documentation states and the tests compare with.

It builds the whole (Sq, Sk) matrix of scores, so it is slow and needs O(Sq * Sk) memory, but every rule of the library
is one line here. It computes in the dtype of its inputs: pass float64 tensors for exact answers. (One rule it does not
follow: a NaN in a key that a query does not see spoils matrix products here, and not in the library.)

    score[i, j] = softcap( scale * q_i . k_j ) - slope * |j - (i + diagonal)| + bias[i, j]
    p[i, j]     = exp(score[i, j] - lse[i])            where query i sees key j, else 0
    lse[i]      = log( sum over visible j of exp(score[i, j])  +  exp(sink) )
    out[i]      = sum over j of dropout(p[i, j]) * v_j

Sources: softmax attention, Vaswani et al. 2017, section 3.2.1; ALiBi, Press et al. 2022, section 3; softcap, Gemma Team
2024 ("Gemma 2"), section 2; sinks, Xiao et al. 2023 ("Efficient streaming language models with attention sinks"),
section 3; grouped queries, Ainslie et al. 2023 ("GQA"), section 2; rotation, Su et al. 2021 ("RoFormer"), section
3.4.2; pages, Kwon et al. 2023 ("PagedAttention"), section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from flash_attn_ext.bias_tables import BiasIndex, entries_of_pairs
from flash_attn_ext.masks import BlockLists, Intervals
from flash_attn_ext.types import Causal, Layout, MaxLogit, ReferenceOptions, Window

if TYPE_CHECKING:  # at run time Python 3.10 has it in typing_extensions only
    from typing_extensions import Unpack


@overload
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True] = True,
    return_max_logit: Literal[False] = False,
    **options: Unpack[ReferenceOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False],
    return_max_logit: Literal[False] = False,
    **options: Unpack[ReferenceOptions],
) -> Tensor: ...
@overload
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True] = True,
    return_max_logit: Literal[True] | MaxLogit,
    **options: Unpack[ReferenceOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False],
    return_max_logit: Literal[True] | MaxLogit,
    **options: Unpack[ReferenceOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    return_max_logit: Literal[False] = False,
    **options: Unpack[ReferenceOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = True,
    return_max_logit: bool | MaxLogit = False,
    **options: Unpack[ReferenceOptions],
) -> Tensor | tuple[Tensor, ...]: ...
def attention_reference(
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
    block_lists: BlockLists | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = True,
    return_max_logit: bool | MaxLogit = False,
) -> Tensor | tuple[Tensor, ...]:
    """Computes what :func:`flash_attn_ext.attention` does, with the same keywords. Those not named here mean the same.

    Args:
        q, k, v: (..., H, S, D) as for ``attention``: ``q`` has Hq heads, ``k`` and ``v`` have Hk, and Hk divides Hq.
            Any floating dtype, which is that of the computation too. ``block_lists`` is a ``masks.BlockLists``.
        dropout_mask: bool, broadcastable to (..., Hq, Sq, Sk), True = kept. Without it ``dropout_p > 0`` draws from
            PyTorch's default generator. The bits that a call drew are the signs that
            ``integrations.flash_attn.flash_attn_func(..., return_attn_probs=True)`` returns.
        return_lse: also return the log-sum-exp; True by default, unlike in ``attention``.
        return_max_logit: also return the largest score of each head or row, last.

    Returns:
        ``out`` (..., Hq, Sq, Dv), or (..., Sq, Hq, Dv) for layout "bshd"; and ``lse`` (..., Hq, Sq), natural log.
        A query that sees no key has out = 0 and lse = -inf (or lse = sink), and zero gradients. With
        ``return_max_logit`` the largest scores come last: (Hq,), or (..., Hq, Sq) for "row"; -inf where a query sees no
        key, NaN where lse is NaN.

    Raises:
        ValueError: ``return_max_logit`` is not False, True, "head" or "row".
        RuntimeError: shapes, dtypes or devices that do not go together, as PyTorch's own operations say it. Other
            options are not checked.

    Example:
        >>> exact = torch.randn(3, 2, 8, 30, 64, dtype=torch.float64)
        >>> q, k, v = exact.float()
        >>> out, lse = flash_attn_ext.reference.attention_reference(*exact, causal="top_left")
        >>> torch.allclose(flash_attn_ext.attention(q, k, v, causal="top_left"), out.float(), atol=1e-5)
        True
    """
    intervals = intervals.tensor if isinstance(intervals, Intervals) else intervals
    if return_max_logit not in (False, True, "head", "row"):
        raise ValueError(f"return_max_logit must be False, True, 'head' or 'row', got {return_max_logit!r}")
    one_head = q.dim() == 2
    if one_head:
        q, k, v = q[None], k[None], v[None]
    elif layout == "bshd":
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    # Query head h uses key head h // (Hq / Hk).
    k, v = (t.repeat_interleave(q.shape[-3] // max(t.shape[-3], 1), dim=-3) for t in (k, v))
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    distance = key_distance(q.shape[-2], k.shape[-2], causal, q.device)
    visible = visible_pairs(distance, causal, window)
    if mask is not None:
        visible = visible & mask
    if intervals is not None:
        visible = visible & pairs_of_intervals(intervals, k.shape[-2])
    if block_lists is not None:
        visible = visible & block_lists.dense(q.shape[-2], k.shape[-2], heads=q.shape[-3])
    score = scale * (q @ k.mT)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if alibi_slopes is not None:
        score = score - alibi_slopes[..., None, None].to(score.dtype) * distance.abs()
    if bias is not None:
        score = score + bias
    if (bias_table is None) != (bias_index is None) or (bias is not None and bias_table is not None):
        raise ValueError("bias_table and bias_index go together, and not with bias")
    if bias_table is not None:
        score = score + bias_table[:, entries_of_pairs(bias_index, distance, bias_table.shape[1])]
    p, lse = _softmax(score, visible, sink)
    if dropout_p > 0:
        kept = torch.rand(p.shape, device=p.device) >= dropout_p if dropout_mask is None else dropout_mask
        p = p.masked_fill(~kept, 0)
        p = p / (1 - dropout_p) if dropout_p < 1 else p * 0
    out = p.to(v.dtype) @ v
    row_max = _largest(score.detach(), visible, lse)
    if one_head:
        out, lse, row_max = out[0], lse[0], row_max[0]
    out = out.transpose(-3, -2) if layout == "bshd" and not one_head else out
    if return_max_logit:
        largest = row_max if return_max_logit == "row" else _largest_of_heads(row_max)
        return (out, lse, largest) if return_lse else (out, largest)
    return (out, lse) if return_lse else out


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: Causal | None = None,
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    intervals: Tensor | Intervals | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes what :func:`flash_attn_ext.attention_varlen` does, sequence by sequence, in the packed (T, H, D) layout.

    Keywords are those of :func:`attention_reference`; dropout_mask has the shape of ``mask``.
    Returns ``out`` (Tq, Hq, Dv) and ``lse`` (Hq, Tq). Raises as there.

    Example:
        >>> q, k, v = torch.randn(3, 8, 4, 64)  # 8 tokens of 2 sequences
        >>> cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
        >>> out, lse = flash_attn_ext.reference.attention_varlen_reference(q, k, v, cu_seqlens, cu_seqlens)
        >>> out.shape, lse.shape
        (torch.Size([8, 4, 64]), torch.Size([4, 8]))
    """
    intervals = intervals.tensor if isinstance(intervals, Intervals) else intervals
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for index in range(len(starts_q) - 1):
        queries, keys = slice(*starts_q[index : index + 2]), slice(*starts_k[index : index + 2])
        lengths = (queries.stop - queries.start, keys.stop - keys.start)
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[index]
        out, lse = attention_reference(
            *(t.transpose(0, 1) for t in (q[queries], k[keys], v[keys])),
            causal=causal,
            window=window,
            bias=_of_sequence(bias, index, lengths),
            mask=_of_sequence(mask, index, lengths),
            intervals=intervals if intervals is None else intervals[..., queries, :],
            alibi_slopes=slopes,
            softcap=softcap,
            sink=sink,
            dropout_p=dropout_p,
            dropout_mask=_of_sequence(dropout_mask, index, lengths),
            scale=scale,
        )
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


def attention_with_kvcache_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    cache_seqlens: Tensor | int,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: Causal | None = "bottom_right",
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    intervals: Tensor | Intervals | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes what :func:`flash_attn_ext.attention_with_kvcache` does, with the same keywords, sequence by sequence.

    Returns ``out``, ``lse``, and the caches as that function leaves them. The caches that are given are not written.
    Raises ValueError where only one of ``k_new`` and ``v_new`` is given, or of ``rotary_cos`` and ``rotary_sin``; else
    as :func:`attention_reference`.

    Example:
        >>> q, caches = torch.randn(4, 8, 1, 64), torch.randn(2, 4, 2, 512, 64)
        >>> results = flash_attn_ext.reference.attention_with_kvcache_reference(q, *caches, cache_seqlens=7)
        >>> [tuple(result.shape) for result in results]
        [(4, 8, 1, 64), (4, 8, 1), (4, 2, 512, 64), (4, 2, 512, 64)]
    """
    intervals = intervals.tensor if isinstance(intervals, Intervals) else intervals
    if (k_new is None) != (v_new is None) or (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("k_new and v_new must be given both or neither, and so must rotary_cos and rotary_sin")
    if layout == "bshd":
        q, k_cache, v_cache = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
        k_new, v_new = (t if t is None else t.transpose(1, 2) for t in (k_new, v_new))
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    batch, _, num_queries, _ = q.shape
    lengths = cache_seqlens.tolist() if isinstance(cache_seqlens, Tensor) else [cache_seqlens] * batch
    queries, all_rows = [], []
    for b, old in enumerate(lengths):
        new = old + torch.arange(0 if k_new is None else k_new.shape[2], device=q.device)
        rows = cache_rows(
            torch.arange(old + len(new), device=q.device), b, k_cache.shape[2], block_table, cache_batch_idx
        )
        query = q[b]
        if k_new is not None and v_new is not None:
            key = k_new[b]
            if rotary_cos is not None and rotary_sin is not None:
                key = rotate(key, rotary_cos[new], rotary_sin[new], rotary_interleaved)
                steps = causal is not None or window not in (None, (None, None))
                at = old + steps * torch.arange(num_queries, device=q.device)
                query = rotate(query, rotary_cos[at], rotary_sin[at], rotary_interleaved)
            entries, positions = (index[old:] for index in rows)
            k_cache[entries, :, positions] = key.transpose(0, 1)
            v_cache[entries, :, positions] = v_new[b].transpose(0, 1)
        queries.append(query)
        all_rows.append(rows)
    outs, lses = [], []
    for b, (query, (entries, positions)) in enumerate(zip(queries, all_rows, strict=True)):
        out, lse = attention_reference(
            query,
            k_cache[entries, :, positions].transpose(0, 1),
            v_cache[entries, :, positions].transpose(0, 1),
            causal=causal,
            window=window,
            bias=_of_sequence(bias, b, (num_queries, len(positions))),
            mask=_of_sequence(mask, b, (num_queries, len(positions))),
            intervals=intervals if intervals is None else intervals[b if intervals.shape[0] > 1 else 0],
            alibi_slopes=alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes,
            softcap=softcap,
            sink=sink,
            scale=scale,
        )
        outs.append(out)
        lses.append(lse)
    out, lse = torch.stack(outs), torch.stack(lses)
    if layout == "bshd":
        out, k_cache, v_cache = (t.transpose(1, 2) for t in (out, k_cache, v_cache))
    return out, lse, k_cache, v_cache


def cache_rows(
    keys: Tensor, sequence: int, rows: int, block_table: Tensor | None, cache_batch_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns where the keys of a sequence are in a cache: indices of its first dimension, and of its rows.

    keys: positions in the sequence. rows: of an entry, or of a page where there is a ``block_table``.
    """
    if block_table is not None:
        return block_table[sequence].to(keys.dtype)[keys // rows], keys % rows
    entry = sequence if cache_batch_idx is None else int(cache_batch_idx[sequence])
    return torch.full_like(keys, entry), keys


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first columns of (..., tokens, D) rotated in pairs by angles whose cos and sin are (tokens, pairs)."""
    pairs = cos.shape[-1]
    columns = x[..., : 2 * pairs]
    first, second = columns.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else columns.chunk(2, -1)
    rotated = first * cos - second * sin, first * sin + second * cos
    columns = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([columns, x[..., 2 * pairs :]], -1)


def key_distance(num_queries: int, num_keys: int, causal: Causal | None, device: torch.device | None = None) -> Tensor:
    """key - (query + diagonal), (Sq, Sk): 0 on the diagonal, negative before it.

    The diagonal ends at the last query and the last key (bottom right), except for causal="top_left" where it starts
    at the first of both.
    """
    diagonal = 0 if causal == "top_left" else num_keys - num_queries
    queries = torch.arange(num_queries, device=device)[:, None]
    return torch.arange(num_keys, device=device) - (queries + diagonal)


def visible_pairs(distance: Tensor, causal: Causal | None, window: Window | None) -> Tensor:
    """Which keys a query sees by causality and window: bool (Sq, Sk) from :func:`key_distance`, True = seen."""
    left, right = window if isinstance(window, tuple | list) else (window, window)
    right = right if causal is None else 0
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    return visible


def pairs_of_intervals(intervals: Tensor, num_keys: int) -> Tensor:
    """Which keys a query sees by its intervals: bool (..., Sq, Sk) from (..., Sq, 2 n), True = seen."""
    keys = torch.arange(num_keys, device=intervals.device)
    begins, ends = intervals[..., 0::2, None], intervals[..., 1::2, None]
    return ((begins <= keys) & (keys < ends)).any(-2)


def _softmax(score: Tensor, visible: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys, and its log-sum-exp. Keys that are not visible get weight 0 and gradient 0."""
    score = score.masked_fill(~visible, -torch.inf)
    logits = score
    if sink is not None:  # one more logit in every row, whose weight belongs to no key
        logits = torch.cat([score, sink.to(score.dtype)[:, None, None].expand(*score.shape[:-1], 1)], dim=-1)
    if logits.shape[-1] == 0:
        return score, score.sum(-1) - torch.inf
    largest = logits.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0)  # a row that sees nothing: exp(-inf - 0) = 0
    total = torch.exp(logits - largest).sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)  # keeps 0 / 0 and log(0) out of the gradients
    lse = (largest + total.log()).masked_fill(empty, -torch.inf)
    return torch.exp(score - largest) / total, lse.squeeze(-1)


def _largest(score: Tensor, visible: Tensor, lse: Tensor) -> Tensor:
    """The largest score of the keys that each row sees; NaN where the LSE is NaN."""
    nothing = score.new_full((*score.shape[:-1], 1), -torch.inf)
    largest = torch.cat([score.masked_fill(~visible, -torch.inf), nothing], dim=-1).amax(-1)
    return largest.masked_fill(lse.isnan(), torch.nan)


def _largest_of_heads(row_max: Tensor) -> Tensor:
    """(heads,) of (..., heads, queries), or () of (queries,). -inf of a head without queries."""
    of_heads = row_max.movedim(-2, 0).flatten(1) if row_max.dim() > 1 else row_max
    nothing = row_max.new_full((*of_heads.shape[:-1], 1), -torch.inf)
    return torch.cat((of_heads, nothing), -1).amax(-1)


def _of_sequence(table: Tensor | None, index: int, lengths: tuple[int, int]) -> Tensor | None:
    """The (heads, queries, keys) part of a (batch, heads, queries, keys) table; broadcast dimensions stay 1."""
    if table is None:
        return None
    table = table[(None,) * (4 - table.dim())]
    table = table[index if table.shape[0] > 1 else 0]
    num_queries, num_keys = (n if size > 1 else 1 for n, size in zip(lengths, table.shape[1:], strict=True))
    return table[:, :num_queries, :num_keys]


# The masks of flash_attn_ext.masks, by the names of its functions. Tensors have a dimension for the batch. What is
# returned says whether query i of batch entry b and head h sees key j, and is a mask_mod of FlexAttention.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MASKS: dict[str, Callable[..., MaskMod]] = {
    "causal": lambda: lambda b, h, i, j: j <= i,
    "window": lambda left, right: lambda b, h, i, j: (j >= i - left) & (j <= i + right),
    "documents": lambda ids: lambda b, h, i, j: same_run(ids, b, i, j),
    "prefix_lm": lambda lengths: lambda b, h, i, j: (j <= i) | (j < lengths[b]),
    "chunked": lambda size, offset: lambda b, h, i, j: (j <= i) & ((j - offset[b]) // size == (i - offset[b]) // size),
    "blocks_within_causal": lambda ids: lambda b, h, i, j: (j <= i) | same_run(ids, b, i, j),
    "block_causal": lambda size: lambda b, h, i, j: j // size <= i // size,
    "global_and_window": lambda num_global, left, right: (
        lambda b, h, i, j: (i < num_global) | (j < num_global) | ((j >= i - left) & (j <= i + right))
    ),
    "shared_prefix": lambda branches: (
        lambda b, h, i, j: (j <= i) & (same_run(branches, b, i, j) | in_prefix_of(branches, b, i, j))
    ),
    "block_diffusion": lambda tokens, size: (
        lambda b, h, i, j: torch.where(
            j < tokens,
            (i < tokens) & (i // size == j // size),
            (j - tokens) // size < (i % tokens) // size + i // tokens,
        )
    ),
    "padding_left": lambda tokens, lengths: lambda b, h, i, j: j >= tokens - lengths[b],
    "padding_right": lambda tokens, lengths: lambda b, h, i, j: j < lengths[b],
    "tree": lambda parents, prefix: in_tree(ancestors(parents), prefix),
}


def same_run(ids: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether tokens i and j are in one run of equal ids, which are not negative."""
    numbers = (ids.diff(dim=-1, prepend=ids[:, :1]) != 0).cumsum(-1)  # of each token's run
    return (ids[b, i] >= 0) & (numbers[b, i] == numbers[b, j])


def in_prefix_of(branches: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether token j is in the last run of zeros that begins at or before token i, which is no padding."""
    is_zero = branches == 0
    groups = torch.cat([is_zero[:, :1], is_zero[:, 1:] & ~is_zero[:, :-1]], dim=-1).cumsum(-1)
    return (branches[b, i] >= 0) & (branches[b, j] == 0) & (groups[b, i] == groups[b, j])


def ancestors(parents: Tensor) -> Tensor:
    """Whether token j is token i or an ancestor of it: bool (batch, tokens, tokens), for parents (batch, tokens)."""
    tokens = parents.shape[-1]
    related = torch.eye(tokens, dtype=torch.bool, device=parents.device).repeat(len(parents), 1, 1)
    for i in range(tokens):
        above = related.gather(1, parents[:, i].clamp(min=0)[:, None, None].expand(-1, 1, tokens))[:, 0]
        related[:, i] |= above & (parents[:, i, None] >= 0)
    return related


def in_tree(related: Tensor, prefix: Tensor) -> MaskMod:
    """What a token of a tree sees: the keys of the prefix, and those of the tree that are :func:`ancestors`."""
    tokens = related.shape[-1]

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        token = j - prefix[b]
        return (token < 0) | ((token < tokens) & related[b, i, token.clamp(0, tokens - 1)])

    return sees
