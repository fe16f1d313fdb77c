"""The attention function that transformers calls in every layer."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from flash_attn_ext._torch_private import assert_later
from flash_attn_ext.functional import attention, attention_varlen, explain
from flash_attn_ext.integrations.transformers.mask_form import Visible, num_keys_of_intervals, read
from flash_attn_ext.integrations.transformers.private_names import is_tracing
from flash_attn_ext.integrations.transformers.sequences import kept_apart, made_here

_LOGGER = logging.getLogger("flash_attn_ext")
_said: set[tuple[Any, ...]] = set()

# Arguments that would change attention or its results, and are not supported here.
REFUSED = {
    "cache": "continuous batching with its paged cache is not supported: use generate(), or attn_implementation='sdpa'",
    "block_table": "paged caches are not supported: use generate(), or attn_implementation='sdpa'",
    "indices": "sparse attention by indices is not supported: use the implementation that the model recommends",
    "block_indices": "sparse attention by blocks is not supported: use the implementation that the model recommends",
    "output_attentions": "the weights are never held: use attn_implementation='eager' to get them",
    "head_mask": "weights cannot be masked by head: use attn_implementation='eager'",
    "alibi": "pass slopes as a bias: a float attention_mask or position_bias",
    "sinks": "only s_aux is taken for attention sinks: use attn_implementation='eager'",
}


class Packing(NamedTuple):
    """transformers' arguments for sequences without padding."""

    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | Tensor | None
    max_length_k: int | Tensor | None


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface, by ``attention`` and ``attention_varlen``.

    Args:
        query: (B, Hq, L, D); key: (B, Hk, S, D); value: (B, Hk, S, Dv). float32, float64, bfloat16 or float16. Key
            heads are shared, never repeated.
        attention_mask: what the registered mask function made, or the user's own (B | 1, H | 1, L | 1, S): bool, True =
            attend, or floating, added to the scores. Only the mask decides what is seen; ``is_causal`` and
            ``sliding_window`` count if it is None.
        is_causal: that of ``module`` by default, and without one True.
        sliding_window: keys from ``sliding_window - 1`` before the diagonal, and where not causal as many after it.
        s_aux: (Hq,), attention sinks. position_bias: broadcastable to (B, Hq, L, S), added to the scores. Both may
            require grad.
        position_ids: (B | 1, L), of the queries. Where they begin again, sequences lie one after the other, which do
            not see each other (``kept_apart``). They count where cumulative lengths and a mask of the user's own do
            not say it, and say nothing in any other shape.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,), for B = 1: sequences that lie one after the other.

    Returns:
        (B, L, Hq, Dv), contiguous, and None for the weights.

    Raises:
        ValueError: arguments that contradict each other, and those that it cannot honour, by name. Else what
        ``attention`` raises.
    """
    for name, advice in REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"attn_implementation='fused_ext' does not take {name}: {advice}")
    packing = Packing(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    is_packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        visible = _visible_by_arguments(query, key, bool(is_causal), sliding_window, is_packed)
    else:
        visible = read(attention_mask, key.shape[2])
        _check_shape(visible, query.shape, key.shape[2])
        made = None if visible.num_keys is None else made_here(attention_mask)
        if made is not None and made.num_keys != key.shape[2]:
            raise _of_another_layer(made.num_keys, key.shape[2])
        if visible.intervals is not None:
            _check_num_keys(attention_mask, key.shape[2])
        _check_window(visible, sliding_window)
    if position_ids is not None and not is_packed and visible.cu_seqlens is None:
        visible = kept_apart(visible, attention_mask, position_ids, query.shape[0], query.shape[2], key.shape[2])
    options: dict[str, Any] = dict(
        causal=visible.causal,
        window=visible.window,
        softcap=softcap,
        sink=None if s_aux is None else s_aux.to(torch.promote_types(query.dtype, torch.float32)),
        dropout_p=dropout,
        scale=scaling,
    )
    num_keys = visible.num_keys if visible.cu_seqlens is None else query.shape[2]
    if num_keys is not None and num_keys != key.shape[2]:
        key, value = key[:, :, :num_keys], value[:, :, :num_keys]
        position_bias = None if position_bias is None else position_bias[..., :num_keys]
    if is_packed or visible.cu_seqlens is not None:
        lengths = _lengths(query, visible, packing, position_bias)
        return _call_packed(module, (query, key, value), lengths | options, others), None
    bias = position_bias if visible.bias is None or position_bias is None else position_bias + visible.bias
    options |= dict(mask=visible.mask, intervals=visible.intervals, bias=visible.bias if bias is None else bias)
    if not is_compiling():
        _say_once(module, (query, key, value), options, others)
    out: Tensor = attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _visible_by_arguments(
    query: Tensor, key: Tensor, is_causal: bool, sliding_window: int | None, is_packed: bool
) -> Visible:
    num_queries, num_keys = query.shape[2], key.shape[2]
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window is {sliding_window}, expected 1 or more keys, the query's own among them, or None"
        )
    if is_causal and not is_packed and num_queries > 1 and num_queries != num_keys:
        raise ValueError(
            f"attention_mask is None and is_causal is True for {num_queries} queries and {num_keys} keys, which does "
            "not say which key is the last query's: pass a mask, as the models do, or is_causal=False"
        )
    return Visible(is_causal, None if sliding_window is None else sliding_window - 1)


def _check_shape(visible: Visible, query_shape: torch.Size, num_keys: int) -> None:
    """Checks the shape of a mask, because errors of ``attention`` would call it by another name."""
    if visible.cu_seqlens is not None and query_shape[2] == 1:
        raise ValueError(
            "attention_mask holds the intervals of several queries, cut to one query, or packed sequences: make a mask "
            "for this call"
        )
    if visible.intervals is not None:
        batch, _, num_queries, _ = visible.intervals.shape
        if batch not in (1, query_shape[0]) or num_queries != query_shape[2]:
            raise ValueError(
                f"attention_mask is made for {num_queries} queries and a batch of {batch}, but query has "
                f"{query_shape[2]} and {query_shape[0]}: it is that of another call; let the model make one for each "
                "call"
            )
    given = visible.bias if visible.mask is None or visible.num_keys is not None else visible.mask
    expected = (*query_shape[:3], num_keys)
    if given is not None and any(size not in (1, full) for size, full in zip(given.shape, expected, strict=True)):
        raise ValueError(
            f"attention_mask has shape {tuple(given.shape)}, expected {expected} = (batch, heads, queries, keys), or 1 "
            "in place of any of them: make it for these queries and for all keys, those of a cache included"
        )


def _check_num_keys(mask: Tensor, num_keys: int) -> None:
    """Checks for how many keys intervals are made. A copy tells only by its values, so it waits for a GPU."""
    made = made_here(mask)
    if made is None and is_tracing(mask):
        is_right = (num_keys_of_intervals(mask) == num_keys).all()
        assert_later(is_right, f"attention_mask is made for another number of keys than there are: {_OF_ANOTHER_LAYER}")
        return
    for found in num_keys_of_intervals(mask).tolist() if made is None else [made.num_keys]:
        if found != num_keys:
            raise _of_another_layer(found, num_keys)


_OF_ANOTHER_LAYER = "it is that of another layer, or of another kind of cache"


def _of_another_layer(found: int, num_keys: int) -> ValueError:
    return ValueError(f"attention_mask is made for {found} keys, but there are {num_keys}: {_OF_ANOTHER_LAYER}")


def _check_window(visible: Visible, sliding_window: int | None) -> None:
    """Checks the layer's window against the mask's. A window that hides nothing is in no mask. In a window on both
    sides, some models count the query's own key and others do not."""
    if sliding_window is None or visible.num_keys is None:
        return
    widest = sliding_window - 1 if visible.is_causal else sliding_window
    if visible.left in (sliding_window - 1, widest):
        return
    if visible.left is not None or widest < visible.num_keys - 1:
        shown = "no window" if visible.left is None else f"a window of {visible.left + 1} keys"
        raise ValueError(
            f"sliding_window is {sliding_window}, but attention_mask has {shown}: the layer got a mask that was made "
            "for another kind of layer"
        )


def _lengths(query: Tensor, visible: Visible, packing: Packing, position_bias: Tensor | None) -> dict[str, Any]:
    """The arguments of ``attention_varlen`` for sequences that lie one after the other."""
    if position_bias is not None:
        raise ValueError("position_bias does not go with packed sequences: pass them padded, with an attention_mask")
    if packing.cu_seq_lens_q is None and packing.cu_seq_lens_k is None:
        lengths: dict[str, Any] = dict(cu_seqlens_q=visible.cu_seqlens, cu_seqlens_k=visible.cu_seqlens)
        return lengths | dict(max_seqlen_q=visible.max_seqlen, max_seqlen_k=visible.max_seqlen)
    if packing.cu_seq_lens_q is None or packing.cu_seq_lens_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given both or neither")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is for one row of packed sequences, but query has shape {tuple(query.shape)}")
    if visible.mask is not None or visible.bias is not None or visible.intervals is not None:
        raise ValueError("cu_seq_lens_q does not go with an attention_mask: packed sequences have no padding")
    return dict(
        cu_seqlens_q=packing.cu_seq_lens_q.to(torch.int32),
        cu_seqlens_k=packing.cu_seq_lens_k.to(torch.int32),
        max_seqlen_q=_bound(packing.max_length_q),
        max_seqlen_k=_bound(packing.max_length_k),
    )


def _bound(length: int | Tensor | None) -> int | Tensor | None:
    """A bound as an int, or None if it is on a GPU. A call without a bound takes less time than waiting for the GPU."""
    return None if isinstance(length, Tensor) and length.is_cuda else length


def _call_packed(
    module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any], others: dict[str, Any]
) -> Tensor:
    """Packs (B, H, L, D) into (B * L, H, D), calls attention, and unpacks the result."""
    batch, _, num_queries, _ = tensors[0].shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors)
    if not is_compiling():
        _say_once(module, (q, k, v), options, others)
    out: Tensor = attention_varlen(q, k, v, **options)
    by_row: Tensor = out.unflatten(0, (batch, num_queries))
    return by_row.contiguous()


def _say_once(
    module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any], others: dict[str, Any]
) -> None:
    """Logs which call a model's layers make, what runs it, and which arguments have no effect on attention, once for
    each kind of layer and call."""
    if not _LOGGER.isEnabledFor(logging.INFO):
        return
    q, _, v = tensors
    kinds = tuple((name, value if isinstance(value, str) else value is None) for name, value in options.items())
    key = (type(module), q.dtype, q.device, q.shape[-1], v.shape[-1], q.shape[-2] == 1, kinds)
    if key in _said:
        return
    _said.add(key)
    given = {name: value for name, value in options.items() if value is not None}
    shown = [f"{name}={_brief(value)}" for name, value in given.items()]
    call = ", ".join([*(f"{name} {_brief(tensor)}" for name, tensor in zip("qkv", tensors, strict=True)), *shown])
    name = "attention_varlen" if "cu_seqlens_q" in given else "attention"
    layer = f"{type(module).__module__}.{type(module).__qualname__}"
    unused = ", ".join(name for name, value in others.items() if value is not None) or "none"
    said = (layer, name, call, explain(*tensors, **options), unused)
    _LOGGER.info("%s calls %s(%s)\n%s\n  arguments of the layer without a meaning here: %s", *said)


def _brief(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
