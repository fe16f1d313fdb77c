"""flash_attn.bert_padding: padded batches (batch, seqlen, ...) to packed tokens (total, ...) and back, differentiable.

Results are those of flash-attention 2.7 and later. Padding affects neither values nor gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: rows of (rows, ...) by ``indices`` (total,) int64. The gradient of a row is the sum of those
    of its copies, 0 where it has none. Raises IndexError for an index that is not a row.

    Example:
        >>> from flash_attn_ext.integrations.flash_attn.bert_padding import index_first_axis
        >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) of zeros, in which row ``indices[i]`` is ``values[i]``. ``values``: (total, ...);
    ``indices``: (total,) int64, each row at most once. Raises IndexError for one that is not a row.

    Example:
        >>> from flash_attn_ext.integrations.flash_attn.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.tensor([[3.0], [1.0]]), torch.tensor([2, 0]), 4)
        tensor([[1.],
                [0.],
                [3.],
                [0.]])
    """
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that a mask marks, packed one sequence after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integer: not 0 = a token, 0 = padding, on either side or in between.
        unused_mask: the same, for places that are packed too but not counted as used.

    Returns:
        The packed tokens (total, ...); their ``indices`` (total,) int64 in (batch * seqlen), for :func:`pad_input`;
        ``cu_seqlens`` (batch + 1,) int32; ``max_seqlen`` as int, which waits for a GPU; ``seqused`` (batch,) int32, how
        many of each sequence are in ``attention_mask``.

    Raises:
        RuntimeError: shapes that do not go together. TypeError: a mask of another dtype.

    Example:
        >>> from flash_attn_ext.integrations.flash_attn.bert_padding import unpad_input
        >>> is_token = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
        >>> tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(torch.randn(2, 4, 64), is_token)
        >>> tokens.shape, indices.tolist(), cu_seqlens.tolist(), max_seqlen
        (torch.Size([4, 64]), [0, 1, 2, 4], [0, 3, 4], 3)
    """
    used = _as_bool("attention_mask", attention_mask, hidden_states)
    packed = used if unused_mask is None else used | _as_bool("unused_mask", unused_mask, hidden_states)
    lengths = packed.sum(dim=-1, dtype=torch.int32)
    indices = packed.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, max_seqlen, used.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Back from packed tokens (total, ...) to (batch, seqlen, ...), with zeros as padding.

    ``indices`` (total,) int64 as :func:`unpad_input` gives them. Raises RuntimeError where there are not as many as
    tokens.

    Example:
        >>> from flash_attn_ext.integrations.flash_attn.bert_padding import pad_input
        >>> pad_input(torch.ones(4), torch.tensor([0, 1, 2, 4]), batch=2, seqlen=4)
        tensor([[1., 1., 1., 0.],
                [1., 0., 0., 0.]])
    """
    if indices.shape != hidden_states.shape[:1]:
        raise RuntimeError(
            f"indices must have one entry for each token, got shape {tuple(indices.shape)} for hidden_states "
            f"{tuple(hidden_states.shape)}: pass those that unpad_input gave"
        )
    padded: Tensor = index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
    return padded


def _as_bool(name: str, mask: Tensor, hidden_states: Tensor) -> Tensor:
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"{name} has dtype {mask.dtype}, expected bool or an integer, not 0 = a token: pass {name} != 0, or "
            f"{name} == 0 for a mask of 0 and -inf"
        )
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        raise RuntimeError(
            f"{name} must be (batch, seqlen) of hidden_states {tuple(hidden_states.shape)}, got shape "
            f"{tuple(mask.shape)}"
        )
    return mask != 0
