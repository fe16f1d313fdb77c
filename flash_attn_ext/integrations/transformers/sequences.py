"""Packed sequences that only the position_ids of a layer tell apart.

Without an attention_mask and a cache, transformers looks for them itself, and its mask then says so. With a mask of
ones, or an empty cache, it does not look, and "eager" and "sdpa" let the sequences see each other. Here they are kept
apart, or refused if that is impossible.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_ext._torch_private import assert_later
from flash_attn_ext.integrations.transformers.mask_form import Visible
from flash_attn_ext.integrations.transformers.private_names import is_tracing

_INSTEAD = (
    "leave out attention_mask and set use_cache=False, so that transformers tells the layers about the sequences, or "
    "pass cu_seq_lens_q and cu_seq_lens_k, or a 4-D attention_mask"
)


class Packing(NamedTuple):
    """Sequences that lie one after the other in the rows of a batch."""

    cu_seqlens: Tensor
    max_seqlen: int


class Question(NamedTuple):
    """The facts that decide about position_ids, besides their values and those of the mask."""

    is_causal: bool
    is_boolean: bool  # whether the mask, which the registered mask function makes, is boolean
    num_cached: int  # keys before those of the queries
    batch: int


class _Answer(NamedTuple):
    position_ids: weakref.ref[Tensor]
    version: int | None
    mask: weakref.ref[Tensor] | None
    question: Question
    packing: Packing | None


class _Answers(threading.local):
    """The last answers of a thread. All layers of a forward pass get the same position_ids and one of a few masks, so
    only the first of them has to wait for the GPU."""

    def __init__(self) -> None:
        self.held: list[_Answer] = []

    def find(self, position_ids: Tensor, mask: Tensor | None, question: Question) -> _Answer | None:
        for answer in self.held:
            is_same_mask = answer.mask is None if mask is None else answer.mask is not None and answer.mask() is mask
            is_same = is_same_mask and answer.position_ids() is position_ids and answer.question == question
            if is_same and answer.version == _version(position_ids):
                return answer
        return None

    def hold(self, position_ids: Tensor, mask: Tensor | None, question: Question, packing: Packing | None) -> None:
        held = self.held
        positions = weakref.ref(position_ids, lambda dead: _drop(held, dead))
        held_mask = None if mask is None else weakref.ref(mask)
        held.append(_Answer(positions, _version(position_ids), held_mask, question, packing))
        del held[:-4]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _drop(held: list[_Answer], dead: weakref.ref[Tensor]) -> None:
    held[:] = [answer for answer in held if answer.position_ids is not dead]


_answers = _Answers()


class Made(NamedTuple):
    """The facts about a mask of the registered mask function that its layers need."""

    keep: Tensor | None  # (batch, queries) bool, False where a query is padding
    position_ids: Tensor | None  # those that the mask function has read
    num_keys: int


def mark_as_made_here(mask: Any, made: Made) -> None:
    """Records a mask of the registered mask function, for the layers that get it."""
    mask._fused_ext_made = made


def made_here(mask: Tensor | None) -> Made | None:
    """What was recorded about a mask. Copies and slices of it have nothing recorded."""
    made: Made | None = getattr(mask, "_fused_ext_made", None)
    return made


def speak_of_tokens(position_ids: Tensor | None, batch: int, num_queries: int) -> bool:
    """Whether position_ids are positions of tokens. Those of pictures have other shapes, and one query is one
    sequence."""
    if position_ids is None or num_queries == 1 or position_ids.dim() != 2:
        return False
    return position_ids.shape[0] in (1, batch) and position_ids.shape[1] == num_queries


def kept_apart(
    visible: Visible, mask: Tensor | None, position_ids: Tensor, batch: int, num_queries: int, num_keys: int
) -> Visible:
    """Returns ``visible``, which is the meaning of ``mask``, or packed sequences if position_ids begin again among
    tokens that are no padding: at a token whose position is below that of the one before it, or equal to it and the
    smallest.

    Positions that only leap forward are one sequence, as in "eager", because tokens may have been left out. Positions
    are ignored if no token of a row is above another.

    Raises:
        ValueError: they begin again where the sequences cannot be told apart. A RuntimeError while values cannot be
            read (torch.compile): wherever they begin again.
    """
    made = made_here(mask)
    is_seen = made is not None and made.position_ids is position_ids
    if is_seen or not speak_of_tokens(position_ids, batch, num_queries):
        return visible
    is_boolean = visible.num_keys is None and mask is not None
    if is_boolean and made is None:
        return visible  # the user's own mask decides alone
    num_visible = num_keys if visible.num_keys is None else visible.num_keys
    if not visible.is_causal and not is_boolean and num_visible != num_queries:
        return visible  # the keys come from elsewhere, such as an encoder
    keep = None if visible.mask is None else visible.mask[:, 0, 0, -num_queries:]
    if is_boolean and made is not None:
        keep = made.keep
    if is_tracing(position_ids):
        assert_later(
            ~_begin_again(position_ids, keep).any(),
            "position_ids begin again, as those of packed sequences do, beside an attention_mask or a cache under "
            "torch.compile: leave out attention_mask and set use_cache=False, or pass cu_seq_lens_q and cu_seq_lens_k",
        )
        return visible
    question = Question(visible.is_causal, is_boolean, num_visible - num_queries, batch)
    packing = _packing_once(position_ids, mask, question, keep)
    if packing is None:
        return visible
    return visible._replace(mask=None, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen)


def _packing_once(position_ids: Tensor, mask: Tensor | None, question: Question, keep: Tensor | None) -> Packing | None:
    if mask is None and position_ids.is_inference():  # inference tensors do not tell whether they were written to since
        return packing_of(position_ids, keep, question)
    answer = _answers.find(position_ids, mask, question)
    if answer is not None:
        return answer.packing
    packing = packing_of(position_ids, keep, question)
    _answers.hold(position_ids, mask, question, packing)
    return packing


def _begin_again(position_ids: Tensor, keep: Tensor | None) -> Tensor:
    """(rows, queries - 1) bool: which tokens after the first one begin a sequence."""
    here, before, least, most = position_ids[:, 1:], position_ids[:, :-1], position_ids, position_ids
    if keep is not None:
        limits = (
            torch.finfo(position_ids.dtype) if position_ids.is_floating_point() else torch.iinfo(position_ids.dtype)
        )
        # No position is below the lowest number, so a row's first token that is no padding begins no sequence.
        most, least = position_ids.where(keep, limits.min), position_ids.where(keep, limits.max)
        latest = _latest(keep)[:, :-1]
        before = most.gather(1, latest)
    least, most = least.amin(1, keepdim=True), most.amax(1, keepdim=True)
    begins = (here < before) | ((here == before) & (here == least) & (least < most))
    return begins if keep is None else begins & keep[:, 1:]


def _latest(keep: Tensor) -> Tensor:
    """For each token, the index of the last one up to it that is no padding, or 0."""
    index = torch.arange(keep.shape[1], device=keep.device)
    return torch.where(keep, index, 0).cummax(1).values


def packing_of(position_ids: Tensor, keep: Tensor | None, question: Question) -> Packing | None:
    """The sequences, where position_ids begin again. ``keep``: (batch, queries) bool, False where a query is padding.
    Raises as :func:`kept_apart`."""
    begins = _begin_again(position_ids, keep)
    if not begins.any():
        return None
    begins = begins.expand(question.batch, -1)
    reason = _hindrance(begins, keep, question)
    if reason is not None:
        row, token = begins.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids begin again at token {token + 1} of row {row}, as those of packed sequences do, but "
            f"{reason}: {_INSTEAD}"
        )
    if keep is not None:  # no query sees padding: each run of it is a sequence of its own
        begins = begins | (keep[:, 1:] != keep[:, :-1])
    starts = F.pad(begins, (1, 0), value=True).flatten().nonzero().flatten()
    cu_seqlens = F.pad(starts, (0, 1), value=question.batch * position_ids.shape[1]).to(torch.int32)
    return Packing(cu_seqlens, int(cu_seqlens.diff().max()))


def _hindrance(begins: Tensor, keep: Tensor | None, question: Question) -> str | None:
    """The reason why the sequences cannot be told apart, or None."""
    if question.is_boolean:
        return "the layer's mask is neither causality, a window nor padding alone"
    if not question.is_causal:
        return "the layer is not causal"
    if question.num_cached:
        return f"a cache holds {question.num_cached} keys from before"
    if keep is not None:
        after_padding = keep[:, 1:] & ~keep[:, :-1] & ((_latest(keep)[:, :-1] > 0) | keep[:, :1])
        if (after_padding & ~begins).any():
            return "a sequence has padding between its tokens"
    return None
