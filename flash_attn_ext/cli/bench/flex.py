"""PyTorch's FlexAttention, compiled, as a peer.

A workload's position rules and mask become a block mask, which is made once and not timed. Its softcap, ALiBi and bias
become a score_mod. FlexAttention has no sink: its log-sum-exp gives the factor by which a sink shrinks each output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from flash_attn_ext.cli.bench.contestant import Contestant
from flash_attn_ext.cli.bench.structures import STRUCTURES
from flash_attn_ext.cli.bench.workload import Inputs, Workload
from flash_attn_ext.masks import from_blocks

FLEX = "flex"
ON_THE_CPU = (
    "FlexAttention (flex) takes part in forward passes without a sink alone: on the CPU PyTorch compiles no backward "
    "pass of it and no log-sum-exp"
)
Indices = tuple[Any, Any, Any, Any]  # batch entry, head, query and key


def is_compiled_on_cpu(workload: Workload, pass_: str) -> bool:
    """Whether PyTorch compiles this call for a CPU, where it has forward passes alone."""
    return pass_ == "forward" and not workload.has_sink and not workload.extras_need_grad


def flex_contestant(workload: Workload, inputs: Inputs) -> Contestant:
    """The contestant for a workload without dropout. It compiles in its first call, so that a failure is its own. Of
    what earlier rows compiled nothing is left, or PyTorch would stop compiling after some rows."""
    q, k, v = inputs.q, inputs.k, inputs.v

    @functools.cache
    def compiled() -> Callable[..., Tensor]:
        torch.compiler.reset()
        return torch.compile(_call(workload, inputs), dynamic=False)

    return Contestant(lambda: compiled()(q, k, v, inputs.sink), inputs.leaves_of_table, compiles=True)


def _call(workload: Workload, inputs: Inputs) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    is_packed = bool(workload.lengths)
    options: Any = dict(
        score_mod=_score_mod(workload, inputs),
        block_mask=_block_mask(workload, inputs),
        enable_gqa=workload.key_heads != workload.num_heads,
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        if is_packed:
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        if sink is None:
            out: Any = flex_attention(q, k, v, **options)
        else:
            plain, aux = cast(Any, flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options))
            out = (plain * torch.sigmoid(aux.lse - sink[:, None])[..., None]).to(q.dtype)
        return out[0].transpose(0, 1) if is_packed else out

    return attend


def _score_mod(workload: Workload, inputs: Inputs) -> Callable[..., Tensor] | None:
    softcap, slopes, bias = workload.softcap, inputs.alibi_slopes, inputs.bias
    if softcap is None and slopes is None and bias is None:
        return None
    bias_at = None if bias is None else _element(bias)
    if inputs.table is not None and inputs.table_entries is not None:
        table, entries = inputs.table, inputs.table_entries
        bias_at = lambda at: table[at[1], entries[at[2], at[3]]]  # noqa: E731

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * (j - i).abs()
        return score if bias_at is None else score + bias_at((b, h, i, j))

    return score_mod


def _block_mask(workload: Workload, inputs: Inputs) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if workload.blocks is not None and inputs.blocks is not None:
        return _flex_mask_of(inputs.blocks, workload.blocks.size, workload.seqlen)
    rules = _mask_rules(workload, inputs)
    if not rules:
        return None

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        shown = rules[0]((b, h, i, j))
        for rule in rules[1:]:
            shown = shown & rule((b, h, i, j))
        return shown

    batch = workload.batch if inputs.mask is not None and inputs.mask.ndim == 4 else None
    lengths = (inputs.q.shape[0], inputs.k.shape[0]) if workload.lengths else (workload.seqlen, workload.num_keys)
    device = inputs.q.device
    # Uncompiled, this would form the mask of all queries and keys, with their indices.
    create = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return create(mask_mod, batch, None, *lengths, device=device)


def _flex_mask_of(seen: Tensor, size: int, tokens: int) -> Any:
    """All blocks are full. Only PyTorch's uncompiled form asks the rule."""
    from torch.nn.attention.flex_attention import BlockMask

    lists = from_blocks(seen)
    partial = torch.zeros_like(lists.counts), torch.zeros_like(lists.indices)

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[0, h, i // size, j // size]

    return BlockMask.from_kv_blocks(
        *partial, lists.counts, lists.indices, BLOCK_SIZE=size, mask_mod=rule, seq_lengths=(tokens, tokens)
    )


def _mask_rules(workload: Workload, inputs: Inputs) -> list[Callable[[Indices], Tensor]]:
    """Which keys a query sees, each rule on its own."""
    rules: list[Callable[[Indices], Tensor]] = []
    if workload.causal:
        rules.append(lambda at: at[2] >= at[3])
    if workload.window is not None:
        left, right = workload.window
        rules.append(lambda at: at[2] - at[3] <= left)
        if not workload.causal:
            rules.append(lambda at: at[3] - at[2] <= right)
    if workload.lengths:
        lengths = torch.tensor(workload.lengths)
        document = torch.arange(len(lengths)).repeat_interleave(lengths).to(inputs.q.device)
        rules.append(lambda at: document[at[2]] == document[at[3]])
    if workload.structure is not None:
        structure = STRUCTURES[workload.structure].rule(workload.seqlen, inputs.q.device)
        rules.append(lambda at: structure(at[2], at[3]))
    if inputs.mask is not None:
        rules.append(_element(inputs.mask))
    return rules


def _element(tensor: Tensor) -> Callable[[Indices], Tensor]:
    """Reads a tensor that broadcasts to (B, H, Sq, Sk), without its dimensions of size 1."""
    first = 4 - tensor.ndim
    kept = tuple(dim for dim in range(4) if dim >= first and tensor.shape[dim - first] > 1)
    values = tensor.squeeze()
    return lambda at: values[tuple(at[dim] for dim in kept)]
