"""The families of masks. Positions are those of self-attention: as many queries as keys, the first of each at 0.

No function waits for a GPU unless its docstring says so. ``merge`` sorts intervals and joins those that touch.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flash_attn_ext.masks.intervals import Intervals, check_ends, count, from_bounds, integers, merge

_Device = torch.device | str | None
_Window = int | tuple[int | None, int | None]  # that of flash_attn_ext.types, which may need Intervals
_BATCHED = "(tokens,) or (batch, tokens)"


def causal(tokens: int, *, device: _Device = None) -> Intervals:
    """Query i sees keys 0 to i.

    Where causality is all, ``attention(causal=)`` needs no intervals. This is for ``&`` and ``|``.

    Args:
        tokens: number of queries, and of keys.
        device: where the intervals are made; by default PyTorch's default device.

    Returns:
        (1, 1, tokens, 2).

    Raises:
        TypeError: ``tokens`` is no int. ValueError: it is negative.

    Example:
        >>> flash_attn_ext.masks.causal(3).tensor[0, 0]
        tensor([[0, 1],
                [0, 2],
                [0, 3]], dtype=torch.int32)
    """
    at = _positions(tokens, device)
    return _intervals(0 * at, at + 1)


def window(tokens: int, window: _Window, *, device: _Device = None) -> Intervals:
    """Query i sees the keys from ``left`` before position i to ``right`` after it.

    Where a window is all, ``attention(window=)`` needs no intervals. This is for ``&`` and ``|``.

    Args:
        tokens: number of queries, and of keys.
        window: ``(left, right)``, or an int for both sides. None is no bound. ``(left, 0)`` is causal.
        device: where the intervals are made; by default PyTorch's default device.

    Returns:
        (1, 1, tokens, 2).

    Raises:
        TypeError: ``tokens`` or a side is no int. ValueError: one is negative, or there are not two sides.

    Example:
        >>> flash_attn_ext.masks.window(4, (1, 0)).dense(4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    return _intervals(*_window_bounds(_positions(tokens, device), window))


def documents(ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None, tokens: int | None = None) -> Intervals:
    """Documents packed in one sequence: query i sees key j where both are in the same document.

    A document is a run of tokens with the same id. Tokens with a negative id are padding, which sees nothing and is
    seen by nothing. For causal documents, pass ``causal=`` to attention, or use ``documents(...) & causal(tokens)``.

    Args:
        ids: integers, (tokens,) or (batch, tokens).
        cu_seqlens: instead of ``ids``: integers, (documents + 1,), the begin of each document and the end of the last.
        tokens: with ``cu_seqlens``: number of tokens. Those behind the last document are padding. By default there are
            none, and the last entry of ``cu_seqlens`` is read, which waits for a GPU.

    Returns:
        (batch or 1, 1, tokens, 2).

    Raises:
        TypeError: both or neither of ``ids`` and ``cu_seqlens``; one of them is no tensor.
        RuntimeError: dtype or shape; on the CPU also ``cu_seqlens`` that decreases or begins below 0. ValueError:
            ``tokens`` is negative.

    Example:
        >>> of_ids = flash_attn_ext.masks.documents(torch.tensor([7, 7, 9, -1]))
        >>> of_ids.tensor[0, 0]
        tensor([[0, 2],
                [0, 2],
                [2, 3],
                [0, 0]], dtype=torch.int32)
        >>> of_ends = flash_attn_ext.masks.documents(cu_seqlens=torch.tensor([0, 2, 3]), tokens=4)
        >>> torch.equal(of_ids.dense(4), of_ends.dense(4))
        True
    """
    if (ids is None) == (cu_seqlens is None):
        raise TypeError("documents takes ids or cu_seqlens, got " + ("neither" if ids is None else "both"))
    if ids is not None:
        if tokens is not None:
            raise TypeError("tokens goes with cu_seqlens; the number of ids says how many tokens there are")
        ids = integers("ids", ids, _BATCHED, lambda dims: dims in (1, 2))
        begin, end = _runs(ids)
        return _intervals(*(bound.masked_fill(ids < 0, 0) for bound in (begin, end)))
    ends = integers("cu_seqlens", cu_seqlens, "(documents + 1,)", lambda dims: dims == 1)
    if ends.numel() == 0:
        raise RuntimeError("cu_seqlens must be (documents + 1,), got (0,): it begins with 0")
    check_ends(ends)
    at = _positions(int(ends[-1]) if tokens is None else tokens, ends.device)
    document = torch.searchsorted(ends, at, right=True)
    is_padding = (document == 0) | (document == ends.numel())
    begin, end = ends[(document - 1).clamp(min=0)], ends[document.clamp(max=ends.numel() - 1)]
    return _intervals(*(bound.clamp(max=at.numel()).masked_fill(is_padding, 0) for bound in (begin, end)))


def prefix_lm(tokens: int, lengths: int | Tensor, *, device: _Device = None) -> Intervals:
    """Causal behind a prefix that sees itself whole: query i sees key j where j <= i or j < length.

    Args:
        tokens: number of queries, and of keys.
        lengths: of the prefix: an int, or integers (batch,). More than ``tokens`` counts as ``tokens``.
        device: where the intervals are made; by default that of ``lengths``.

    Returns:
        (batch or 1, 1, tokens, 2).

    Raises:
        TypeError: ``tokens`` is no int, or ``lengths`` neither an int nor a tensor. ValueError: an int is negative.
        RuntimeError: dtype or shape of ``lengths``.

    Example:
        >>> flash_attn_ext.masks.prefix_lm(4, 2).dense(4)[0, 0].int()
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    lengths, device = _of_batch("lengths", lengths, device)
    at = _positions(tokens, device)
    end = torch.maximum(at + 1, lengths.clamp(max=at.numel()))
    return _intervals(torch.zeros_like(end), end)


def chunked(tokens: int, size: int, *, offset: int | Tensor = 0, device: _Device = None) -> Intervals:
    """Causal inside chunks of a fixed size, as in Llama 4: j <= i, and both in one chunk.

    Args:
        tokens: number of queries, and of keys.
        size: tokens of a chunk.
        offset: where the first chunk begins: an int, or integers (batch,). With padding at the left, its length.
        device: where the intervals are made; by default that of ``offset``.

    Returns:
        (batch or 1, 1, tokens, 2).

    Raises:
        TypeError: ``tokens`` or ``size`` is no int, or ``offset`` neither an int nor a tensor.
        ValueError: ``tokens`` or ``offset`` is negative, ``size`` below 1. RuntimeError: dtype or shape of ``offset``.

    Example:
        >>> flash_attn_ext.masks.chunked(5, 2).tensor[0, 0].tolist()
        [[0, 1], [0, 2], [2, 3], [2, 4], [4, 5]]
    """
    offset, device = _of_batch("offset", offset, device)
    size, at = count("size", size, least=1), _positions(tokens, device)
    begin = offset + (at - offset).div(size, rounding_mode="floor") * size
    return _intervals(begin.clamp(min=0), at + 1)


def blocks_within_causal(ids: Tensor) -> Intervals:
    """Causal, and the tokens of a block also see one another: the image tokens of Gemma 3, say.

    Query i sees key j where j <= i, or where both are in the same block. A block is a run of tokens with the same id.

    Args:
        ids: integers, (tokens,) or (batch, tokens). Tokens with a negative id are in no block: text.

    Returns:
        (batch or 1, 1, tokens, 2).

    Raises:
        TypeError: ``ids`` is no tensor. RuntimeError: its dtype or shape.

    With a window, as in Gemma's local layers: ``window(tokens, (left, 0)) | documents(ids)``, two intervals.

    Example:
        >>> flash_attn_ext.masks.blocks_within_causal(torch.tensor([-1, 0, 0, -1])).dense(4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    ids = integers("ids", ids, _BATCHED, lambda dims: dims in (1, 2))
    at = _positions(ids.shape[-1], ids.device)
    end = torch.where(ids < 0, at + 1, _runs(ids)[1])
    return _intervals(torch.zeros_like(end), end)


def block_causal(tokens: int, size: int, *, device: _Device = None) -> Intervals:
    """Causal from block to block, and whole inside a block: the frames of a video, say.

    Query i sees key j where ``j // size <= i // size``.

    Args:
        tokens: number of queries, and of keys. The last block may be shorter.
        size: tokens of a block.
        device: where the intervals are made; by default PyTorch's default device.

    Returns:
        (1, 1, tokens, 2).

    Raises:
        TypeError: ``tokens`` or ``size`` is no int. ValueError: ``tokens`` is negative, ``size`` below 1.

    Example:
        >>> flash_attn_ext.masks.block_causal(5, 2).dense(5)[0, 0].int()
        tensor([[1, 1, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    size, at = count("size", size, least=1), _positions(tokens, device)
    return _intervals(0 * at, ((at // size + 1) * size).clamp(max=at.numel()))


def global_and_window(tokens: int, num_global: int, window: _Window, *, device: _Device = None) -> Intervals:
    """A window, and the first tokens global, as in Longformer: they see every key, and every query sees them.

    Query i sees key j where i < num_global, or j < num_global, or j is in the window of i. With ``& causal(tokens)``
    the global tokens are attention sinks in the sense of StreamingLLM: every later query sees them and its window.

    Args:
        tokens: number of queries, and of keys.
        num_global: number of global tokens.
        window: ``(left, right)``, or an int for both sides. None is no bound.
        device: where the intervals are made; by default PyTorch's default device.

    Returns:
        Two intervals for each query, (1, 1, tokens, 4).

    Raises:
        TypeError: ``tokens``, ``num_global`` or a side is no int. ValueError: one is negative, or there are not two
            sides.

    Example:
        >>> flash_attn_ext.masks.global_and_window(5, 1, 1).dense(5)[0, 0].int()
        tensor([[1, 1, 1, 1, 1],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 0, 1, 1, 1],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    at = _positions(tokens, device)
    num_global = min(count("num_global", num_global), at.numel())
    begin, end = _window_bounds(at, window)
    is_global = at < num_global
    begin, end = begin.masked_fill(is_global, 0), end.masked_fill(is_global, at.numel())
    return _intervals(torch.zeros_like(at), torch.full_like(at, num_global), begin, end)


def shared_prefix(branches: Tensor) -> Intervals:
    """Several continuations of one prefix, all causal: each sees the prefix and itself, but no other continuation.

    A row may hold several such groups, packed. A run of zeros begins a group and is its prefix. Each run of another
    number is a branch, so neighbouring branches need different numbers.

    Args:
        branches: integers, (tokens,) or (batch, tokens): 0 for tokens of a prefix, above 0 for those of a branch.
            Tokens with a negative number are padding, which sees nothing and is seen by nothing.

    Returns:
        Two intervals for each query, (batch or 1, 1, tokens, 4).

    Raises:
        TypeError: ``branches`` is no tensor. RuntimeError: its dtype or shape.

    Example:
        >>> flash_attn_ext.masks.shared_prefix(torch.tensor([0, 0, 1, 1, 2])).dense(5)[0, 0].int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 0, 0, 1]], dtype=torch.int32)
    """
    branches = integers("branches", branches, _BATCHED, lambda dims: dims in (1, 2))
    at = _positions(branches.shape[-1], branches.device)
    begin, end = _runs(branches)
    # Where the last run of zeros before a token begins, and where that run ends: there is none before the first.
    is_prefix_begin = (branches == 0) & (begin == at)
    prefix_begin = torch.where(is_prefix_begin, at, -1).cummax(-1).values
    has_prefix, prefix_begin = prefix_begin >= 0, prefix_begin.clamp(min=0)
    own_end = torch.where(branches < 0, 0, at + 1)
    prefix_end = torch.minimum(end.gather(-1, prefix_begin), own_end).masked_fill(~has_prefix, 0)
    return _intervals(prefix_begin, prefix_end, begin, own_end)


def block_diffusion(tokens: int, size: int, *, device: _Device = None) -> Intervals:
    """Training of block diffusion, as in BD3-LM: a noisy copy of the sequence, and behind it the clean one.

    There are ``2 * tokens`` queries and keys. A noisy query sees the noisy tokens of its own block and the clean tokens
    of earlier blocks. A clean query sees the clean tokens of its own and earlier blocks. To generate block by block,
    use :func:`block_causal`.

    Args:
        tokens: of one copy. The last block may be shorter.
        size: tokens of a block.
        device: where the intervals are made; by default PyTorch's default device.

    Returns:
        Two intervals for each query, (1, 1, 2 * tokens, 4).

    Raises:
        TypeError: ``tokens`` or ``size`` is no int. ValueError: ``tokens`` is negative, ``size`` below 1.

    Example:
        >>> flash_attn_ext.masks.block_diffusion(3, 2).dense(6)[0, 0].int()
        tensor([[1, 1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [0, 0, 1, 1, 1, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    size, tokens = count("size", size, least=1), count("tokens", tokens)
    at = _positions(tokens, device)
    begin = at // size * size
    end = (begin + size).clamp(max=tokens)
    nothing = torch.zeros_like(at)
    clean = torch.full_like(at, tokens)
    noisy_rows = begin, end, clean, tokens + begin
    clean_rows = nothing, nothing, clean, tokens + end
    return _intervals(*(torch.cat(bounds) for bounds in zip(noisy_rows, clean_rows, strict=True)))


def padding(
    tokens: int, lengths: int | Tensor, side: Literal["left", "right"] = "right", *, device: _Device = None
) -> Intervals:
    """Sequences of different lengths in one batch: every query sees the keys that are no padding.

    That holds for the queries of padding too, whose results mean nothing.

    Args:
        tokens: number of queries, and of keys.
        lengths: of the sequences, without padding: an int, or integers (batch,). More than ``tokens`` counts as
            ``tokens``.
        side: where the padding is: at the "right", so that keys 0 to length - 1 are seen, or at the "left".
        device: where the intervals are made; by default that of ``lengths``.

    Returns:
        (batch or 1, 1, tokens, 2).

    Raises:
        TypeError: ``tokens`` is no int, or ``lengths`` neither an int nor a tensor.
        ValueError: an int is negative, or ``side`` is another. RuntimeError: dtype or shape of ``lengths``.

    Example:
        >>> flash_attn_ext.masks.padding(4, torch.tensor([4, 3]), "left").tensor[:, 0, 0]
        tensor([[0, 4],
                [1, 4]], dtype=torch.int32)
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    lengths, device = _of_batch("lengths", lengths, device)
    at = _positions(tokens, device)
    lengths = lengths.clamp(0, at.numel()) + 0 * at  # the same in each row
    if side == "right":
        return _intervals(torch.zeros_like(lengths), lengths)
    return _intervals(at.numel() - lengths, torch.full_like(lengths, at.numel()))


def tree(parents: Tensor, *, prefix: int | Tensor = 0) -> Intervals:
    """A tree of tokens, as speculative decoding verifies it: each sees the prefix, its ancestors and itself.

    Tokens in depth-first order need the fewest intervals: a chain of tokens that follow each other is one.
    Waits for a GPU.

    Args:
        parents: integers, (tokens,) or (batch, tokens): the position in the tree of each token's parent, which comes
            before the token; -1 for a root.
        prefix: keys before the tree, all of them seen: an int, or integers (batch,).

    Returns:
        (batch or 1, 1, tokens, 2n). Query i is token i of the tree, which is key ``prefix + i``.

    Raises:
        ValueError: a token needs more than four intervals, with the number; a parent that does not come before its
            token; a negative ``prefix``.
        TypeError: ``parents`` is no tensor, or ``prefix`` neither an int nor a tensor. RuntimeError: dtypes or shapes.

    Example:
        >>> flash_attn_ext.masks.tree(torch.tensor([-1, 0, 1, 0, 3])).dense(5)[0, 0].int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 0, 0, 1, 0],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    parents = integers("parents", parents, _BATCHED, lambda dims: dims in (1, 2))
    before, _ = _of_batch("prefix", prefix, parents.device)
    before = before.clamp(min=0) + torch.zeros_like(parents)  # the same in each row
    at = _positions(parents.shape[-1], parents.device)
    is_wrong = torch.logical_or(parents >= at, parents < -1)
    if bool(is_wrong.any()):
        wrong, parent = int(is_wrong.nonzero()[0, -1]), int(parents[is_wrong][0])
        raise ValueError(f"the parent of token {wrong} must be one of -1 (a root) to {wrong - 1}, got {parent}")
    # A chain is a run of tokens, each the parent of the next. From a token, the first of its chain leads to the parent
    # that ends the chain before.
    is_chained = torch.logical_and(parents == at - 1, at > 0)
    first = torch.where(is_chained, 0, at).cummax(-1).values
    bounds = [torch.zeros_like(before), before]
    token = at.expand_as(parents)
    while bool((token >= 0).any()):
        is_there, token = token >= 0, token.clamp(min=0)
        begin = first.gather(-1, token)
        bounds += [torch.where(is_there, before + bound, 0) for bound in (begin, token + 1)]
        token = torch.where(is_there, parents.gather(-1, begin), -1)
    return _intervals(*bounds, is_read=True)


def _positions(tokens: int, device: _Device) -> Tensor:
    return torch.arange(count("tokens", tokens), device=device)


def _intervals(*bounds: Tensor, is_read: bool = False) -> Intervals:
    """Of the begin and the end of each interval, (tokens,) or (batch, tokens).

    is_read: the number of intervals is that of the values, and not that of the arguments.
    """
    table = torch.stack(torch.broadcast_tensors(*bounds), -1)
    table = table[(None,) * (3 - table.dim())].unsqueeze(1)
    if len(bounds) == 2:
        return Intervals(table.to(torch.int32))
    merged = merge(table[..., 0::2], table[..., 1::2])
    return from_bounds(*merged, at_most=None if is_read else len(bounds) // 2)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where the run of equal ids that a token is in begins and ends."""
    at = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    is_first, is_last = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool)
    is_first[..., 1:] = ids[..., 1:] != ids[..., :-1]
    is_last[..., :-1] = is_first[..., 1:]
    begin = at.masked_fill(~is_first, 0).cummax(-1).values
    end = (at + 1).masked_fill(~is_last, ids.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    return begin, end


def _window_bounds(at: Tensor, window: _Window) -> tuple[Tensor, Tensor]:
    sides: Any = window if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window must be an int or (left, right), got {window!r}")
    left, right = (None if side is None else count("a side of window", side) for side in sides)
    begin = torch.zeros_like(at) if left is None else (at - left).clamp(min=0)
    end = torch.full_like(at, at.numel()) if right is None else (at + right + 1).clamp(max=at.numel())
    return begin, end


def _of_batch(name: str, value: int | Tensor, device: _Device) -> tuple[Tensor, _Device]:
    """A number for each batch entry as (batch, 1), or (1,) for one that all share; and the device to work on."""
    if isinstance(value, Tensor):
        values = integers(name, value, "an int or (batch,)", lambda dims: dims <= 1)
        device = values.device if device is None else device
        return values.to(device)[..., None], device
    return torch.full((1,), count(name, value), device=device), device
