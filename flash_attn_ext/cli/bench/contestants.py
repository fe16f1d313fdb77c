"""The contestants of a workload: our call, our own other call, and the peers by name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_ext._explanation import Explanation
from flash_attn_ext.cli.bench import structures
from flash_attn_ext.cli.bench.contestant import OURS, SDPA_BACKENDS, Contestant, sequence_first
from flash_attn_ext.cli.bench.cudnn_flex import CUDNN_FLEX, cudnn_flex_contestant
from flash_attn_ext.cli.bench.flex import FLEX, flex_contestant
from flash_attn_ext.cli.bench.peers import PACKAGES, package_contestant
from flash_attn_ext.cli.bench.table_suites import table_of
from flash_attn_ext.cli.bench.timing import Stopwatch, stopwatch_for
from flash_attn_ext.cli.bench.workload import DIRECT, OWN_CAUSAL, OWN_VARLEN, Inputs, Workload, make_inputs
from flash_attn_ext.functional import attention, attention_varlen, explain, scaled_dot_product_attention
from flash_attn_ext.integrations.torch_backend.switch import activate
from flash_attn_ext.masks import BlockLists, from_blocks


def prepare(workload: Workload, pass_: str, device: str) -> Inputs:
    """The inputs of a workload. A forward pass needs no grad, as in inference, except for a bias, slopes or a sink
    that require it."""
    inputs = make_inputs(workload, device)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.requires_grad_(pass_ != "forward")
    if workload.table is not None:
        inputs.table_index, inputs.table_entries, num_entries = table_of(workload, inputs.q.device)
        inputs.table = torch.randn(workload.num_heads, num_entries, device=device, dtype=workload.dtype)
        inputs.bias = inputs.table[:, inputs.table_entries][None]
        inputs.table.requires_grad_(workload.extras_need_grad)
    for tensor in inputs.extras:
        tensor.requires_grad_(workload.extras_need_grad)
    return inputs


def stopwatch(workload: Workload, inputs: Inputs) -> Stopwatch:
    return stopwatch_for(inputs.q.device.type, workload.is_host_time, workload.calls)


def contestants(workload: Workload, inputs: Inputs, backend: str | None) -> dict[str, Contestant]:
    """Ours first, then the workload's peers in their order, then our own other call."""
    q, k, v = inputs.q, inputs.k, inputs.v
    leaves = inputs.leaves
    comparable = workload.dropout_p == 0  # with dropout, each contestant drops other weights
    of_table = inputs.leaves_of_table
    found = {OURS: Contestant(_ours(workload, inputs, backend), of_table, comparable=comparable)}
    arguments: dict[str, Any] = {}  # of PyTorch's function; all its kernels share one mask
    for name in workload.peers:
        if name == "varlen_attn":
            found[name] = Contestant(_varlen_peer(workload, inputs), leaves, comparable=comparable)
        elif name == FLEX:
            found[name] = flex_contestant(workload, inputs)
        elif name == CUDNN_FLEX:
            found[name] = cudnn_flex_contestant(workload, inputs)
        elif name in PACKAGES:
            found[name] = package_contestant(name, workload, inputs)
        else:
            arguments = arguments or _sdpa_arguments(workload, inputs)
            same_leaves = comparable and inputs.table is None
            found[name] = Contestant(_sdpa(name, inputs, arguments), leaves, SDPA_BACKENDS[name], same_leaves)
    if workload.own == DIRECT:
        found[workload.own] = found[OURS]
        forward = functools.partial(F.scaled_dot_product_attention, q, k, v)
        found[OURS] = Contestant(forward, leaves, surroundings=_operators_replaced)
    elif workload.own == OWN_VARLEN and workload.structure is not None:
        found[workload.own] = _own_documents(inputs, backend)
    elif workload.own == OWN_VARLEN:
        found[workload.own] = Contestant(_own_varlen(inputs, backend), ())
    elif workload.own == OWN_CAUSAL:
        causal = functools.partial(attention, q, k, v, causal="top_left", backend=backend)
        found[workload.own] = Contestant(causal, (q, k, v), comparable=workload.against == OWN_CAUSAL)
    elif workload.own is not None:
        plain = functools.partial(attention, q, k, v, backend=backend)
        found[workload.own] = Contestant(plain, (q, k, v), comparable=False)
    return found


def explain_ours(workload: Workload, inputs: Inputs, backend: str | None) -> Explanation:
    options = _our_options(workload, inputs, backend)
    if workload.lengths:
        return explain(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.cu_seqlens, **options)
    return explain(inputs.q, inputs.k, inputs.v, **options)


def _ours(workload: Workload, inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
    q, k, v = inputs.q, inputs.k, inputs.v
    if workload.is_host_time and backend is None:  # the entry point that stands in for PyTorch's
        return functools.partial(scaled_dot_product_attention, q, k, v)
    options = _our_options(workload, inputs, backend)
    if workload.lengths:
        return functools.partial(attention_varlen, q, k, v, inputs.cu_seqlens, inputs.cu_seqlens, **options)
    return functools.partial(attention, q, k, v, **options)


@contextlib.contextmanager
def _operators_replaced() -> Iterator[None]:
    handle = activate()
    try:
        yield
    finally:
        handle.remove()


def _own_varlen(inputs: Inputs, backend: str | None) -> Callable[[], Tensor]:
    """A varlen call with the work that a padding mask leaves: all queries, and those keys that it does not mask."""
    batch, _, seqlen, _ = inputs.q.shape
    assert inputs.mask is not None  # the keys that it does not mask are packed
    shown = inputs.mask[:, 0, 0]
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    packed = q.flatten(0, 1).contiguous(), k[shown], v[shown]
    ends = torch.full((batch,), seqlen, device=q.device).cumsum(0), shown.sum(1).cumsum(0)
    cu_seqlens = [torch.cat([end.new_zeros(1), end]).int() for end in ends]
    options: dict[str, Any] = dict(max_seqlen_q=seqlen, max_seqlen_k=seqlen, backend=backend)

    def forward() -> Tensor:
        out = attention_varlen(*packed, *cu_seqlens, **options)
        return out.unflatten(0, (batch, seqlen)).transpose(1, 2)

    return forward


def _own_documents(inputs: Inputs, backend: str | None) -> Contestant:
    """The documents of a mask as packed sequences. Its tensors lie in memory as those of a packed call."""
    tokens = inputs.q.shape[2]
    ends = structures.ends_of_documents(tokens, inputs.q.device)
    longest = min(structures.DOCUMENT, tokens)
    options: dict[str, Any] = dict(max_seqlen_q=longest, max_seqlen_k=longest, causal="top_left", backend=backend)
    leaves = tuple(
        sequence_first(tensor.detach()).requires_grad_(tensor.requires_grad)
        for tensor in (inputs.q, inputs.k, inputs.v)
    )

    def forward() -> Tensor:
        q, k, v = (leaf[0].transpose(0, 1) for leaf in leaves)
        out: Tensor = attention_varlen(q, k, v, ends, ends, **options)
        return out.transpose(0, 1)[None]

    return Contestant(forward, leaves, sequence_first=True)


def _our_options(workload: Workload, inputs: Inputs, backend: str | None) -> dict:
    options = dict(
        causal="top_left" if workload.causal else None,
        window=workload.window,
        mask=inputs.mask,
        intervals=inputs.intervals,
        block_lists=_block_lists(workload, inputs),
        bias=inputs.bias if inputs.table is None else None,
        alibi_slopes=inputs.alibi_slopes,
        softcap=workload.softcap,
        sink=inputs.sink,
        dropout_p=workload.dropout_p,
        backend=backend,
    )
    if inputs.table is not None:
        options |= dict(bias_table=inputs.table, bias_index=inputs.table_index)
    if workload.lengths:
        options |= dict(max_seqlen_q=workload.seqlen, max_seqlen_k=workload.seqlen)
        del options["block_lists"]
    return options


def _block_lists(workload: Workload, inputs: Inputs) -> BlockLists | None:
    if workload.blocks is None or inputs.blocks is None:
        return None
    return from_blocks(inputs.blocks, query_block=workload.blocks.size, key_block=workload.blocks.size)


def _sdpa(name: str, inputs: Inputs, arguments: dict) -> Callable[[], Tensor]:
    """PyTorch's function takes a mask or a bias. A mask beside a bias joins it in the call, as in a model whose bias
    changes at every step. The memory-efficient kernel has no grouped heads, so the call repeats the key heads."""
    q, k, v = inputs.q, inputs.k, inputs.v
    repeats = q.shape[1] // k.shape[1] if name == "efficient" else 1
    mask, bias = inputs.mask, inputs.bias
    if repeats == 1 and (mask is None or bias is None):
        return functools.partial(F.scaled_dot_product_attention, q, k, v, **arguments)

    def forward() -> Tensor:
        options = dict(arguments)
        if mask is not None and bias is not None:
            options["attn_mask"] = torch.where(mask, bias, float("-inf"))
        keys, values = (tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1) for tensor in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, **options)

    return forward


def _sdpa_arguments(workload: Workload, inputs: Inputs) -> dict:
    """The arguments of PyTorch's function, which has no window and no ALiBi and gets both as a mask."""
    attn_mask, is_causal = inputs.bias if inputs.mask is None else inputs.mask, workload.causal
    if workload.window is not None:
        left, right = workload.window
        offset = torch.arange(workload.seqlen, device=inputs.q.device)
        distance = offset - offset[:, None]
        attn_mask = (distance >= -left) & (distance <= (0 if is_causal else right))
        is_causal = False
    elif inputs.alibi_slopes is not None:
        attn_mask, is_causal = _alibi_bias(workload, inputs.alibi_slopes.detach()), False
    return dict(
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=workload.dropout_p,
        enable_gqa=workload.key_heads != workload.num_heads,
    )


def _alibi_bias(workload: Workload, slopes: Tensor) -> Tensor:
    """(1, H, Sq, Sk) in the workload's dtype, with causality. Made head by head, since it is large."""
    distance = torch.arange(workload.num_keys, device=slopes.device)
    distance = distance - torch.arange(workload.seqlen, device=slopes.device)[:, None]
    bias = torch.empty(1, len(slopes), *distance.shape, dtype=workload.dtype, device=slopes.device)
    for head, slope in enumerate(slopes):
        bias[0, head] = -slope * distance.abs()
    return bias.masked_fill_(distance > 0, float("-inf")) if workload.causal else bias


def _varlen_peer(workload: Workload, inputs: Inputs) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # here, so that a torch without it loses only this peer

        lengths: Any = (inputs.cu_seqlens, inputs.cu_seqlens, workload.seqlen, workload.seqlen)
        options: Any = dict(window_size=(-1, 0 if workload.causal else -1))
        out: Any = varlen_attn(inputs.q, inputs.k, inputs.v, *lengths, **options)
        return out

    return forward
