"""The types of options, by name, for the annotations of your own code.

``Causal``, ``Layout``, ``Backend``, ``Fallback`` and ``MaxLogit`` are the strings that an option takes, ``BiasIndex``
what ``bias_index`` may be, and ``Window`` is a window.
``AttentionOptions``, ``VarlenOptions`` and ``KvCacheOptions`` are the keywords of ``attention``, ``attention_varlen``
and ``attention_with_kvcache``, each with its type, for options that are kept and passed on:

>>> from flash_attn_ext.types import AttentionOptions
>>> options: AttentionOptions = {"causal": "bottom_right", "window": (256, 0)}
>>> q, k, v = torch.randn(3, 1, 4, 512, 64)
>>> flash_attn_ext.attention(q, k, v, **options).shape
torch.Size([1, 4, 512, 64])

To a type checker the values of a plain ``dict(causal=..., window=...)`` may be anything, so it refuses that. What each
option means is in :func:`flash_attn_ext.attention`.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from torch import Tensor

from flash_attn_ext.bias_tables import BiasIndex as BiasIndex
from flash_attn_ext.masks import BlockLists, Intervals

Causal = Literal["top_left", "bottom_right"]
Layout = Literal["bhsd", "bshd"]
Backend = Literal["cpu", "sm80", "sm90"]
Fallback = Literal["raise", "torch"]
MaxLogit = Literal["head", "row"]
Window = int | tuple[int | None, int | None]


class ScoreOptions(TypedDict, total=False):
    """The keywords that all forms of attention share."""

    causal: Causal | None
    window: Window | None
    bias: Tensor | None
    mask: Tensor | None
    intervals: Tensor | Intervals | None
    alibi_slopes: Tensor | None
    softcap: float | None
    sink: Tensor | None
    scale: float | None


class AttentionOptions(ScoreOptions, total=False):
    """The keywords of ``attention`` but ``return_lse`` and ``return_max_logit``, which decide the result's type."""

    bias_table: Tensor | None
    bias_index: BiasIndex | None
    block_lists: BlockLists | tuple[Tensor, Tensor] | None
    dropout_p: float
    layout: Layout
    backend: Backend | None
    allow_tf32: bool


class VarlenOptions(ScoreOptions, total=False):
    """The keywords of ``attention_varlen`` but ``return_lse`` and ``return_max_logit``."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    dropout_p: float
    backend: Backend | None
    allow_tf32: bool


class KvCacheOptions(ScoreOptions, total=False):
    """The keywords of ``attention_with_kvcache`` but ``return_lse``, ``return_max_logit`` and ``cache_seqlens``, which
    has no default."""

    k_new: Tensor | None
    v_new: Tensor | None
    block_table: Tensor | None
    cache_batch_idx: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    layout: Layout
    backend: Backend | None


class ReferenceOptions(ScoreOptions, total=False):
    """The keywords of ``reference.attention_reference`` but ``return_lse`` and ``return_max_logit``."""

    bias_table: Tensor | None
    bias_index: BiasIndex | None
    block_lists: BlockLists | None
    dropout_p: float
    dropout_mask: Tensor | None
    layout: Layout
