"""Tensors and contestants of decode workloads.

A cache in use is far larger than the L2 of a GPU, or was evicted since the last step. To keep a workload's cache out of
L2, calls alternate between more copies of it than L2 can hold.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from flash_attn_ext import functional
from flash_attn_ext._explanation import Explanation
from flash_attn_ext.cli.bench.contestant import OURS, SDPA_BACKENDS, Contestant
from flash_attn_ext.cli.bench.decode_suites import APPEND, ATTENTION, CONTIGUOUS, ONE_QUERY, DecodeWorkload
from flash_attn_ext.cli.bench.peers import PACKAGES, package_decode
from flash_attn_ext.cli.bench.timing import Stopwatch, stopwatch_for
from flash_attn_ext.cli.bench.workload import PADDING_MASK
from flash_attn_ext.types import Backend

L2_MULTIPLE = 4  # bytes of all copies of a cache, divided by those of L2
NOT_YET_WRITTEN = 32  # keys at the end of a static cache, which a mask hides
Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k and v


@dataclass
class DecodeInputs:
    """q (B, Hq, Sq, D) and copies of (k, v): (B, Hk, Sk, D) each, or (pages, Hk, page_size, D) with a block table.
    `contiguous`: the same keys and values as (B, Hk, Sk, D). `mask`: (B, 1, 1, Sk), True where a key counts."""

    q: Tensor
    copies: list[tuple[Tensor, Tensor]]
    contiguous: list[tuple[Tensor, Tensor]]
    cache_seqlens: Tensor
    block_table: Tensor | None = None
    mask: Tensor | None = None

    @property
    def dout(self) -> Tensor:
        """There is no backward pass, so only the device of this tensor counts."""
        return self.q


def prepare(workload: DecodeWorkload, pass_: str, device: str) -> DecodeInputs:
    """Random-normal inputs from one seed. All copies are equal, so results of any copy can be compared."""
    generator = torch.Generator(device).manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, device=device, dtype=workload.dtype)
    q = normal(workload.batch, workload.num_heads, workload.seqlen, workload.head_dim)
    sequences, block_table, length = workload.batch, None, workload.num_keys
    if workload.page_size is not None:
        sequences, length = workload.batch * workload.num_keys // workload.page_size, workload.page_size
        block_table = torch.randperm(sequences, generator=generator, device=device, dtype=torch.int32)
        block_table = block_table.unflatten(0, (workload.batch, -1))
    k, v = (normal(sequences, workload.key_heads, length, dim) for dim in (workload.head_dim, workload.dim_v))
    more = num_copies(workload, device) - 1
    copies = [(k, v), *((k.clone(), v.clone()) for _ in range(more))]
    # An append writes in place of the last key, so that calls repeat.
    valid = workload.num_keys - (1 if workload.entry == APPEND else 0)
    cache_seqlens = torch.full((workload.batch,), valid, dtype=torch.int32, device=device)
    contiguous = copies if block_table is None else [_gathered(copy, block_table) for copy in copies]
    mask = None
    if workload.mask == PADDING_MASK:
        mask = torch.arange(workload.num_keys, device=device) < workload.num_keys - NOT_YET_WRITTEN
        mask = mask.expand(workload.batch, 1, 1, -1)
    return DecodeInputs(q, copies, contiguous, cache_seqlens, block_table, mask)


def explain_ours(workload: DecodeWorkload, inputs: DecodeInputs, backend: Backend | None) -> Explanation:
    k, v = inputs.contiguous[0]
    return functional.explain(inputs.q, k, v, causal="bottom_right", mask=inputs.mask, backend=backend)


def contestants(workload: DecodeWorkload, inputs: DecodeInputs, backend: str | None) -> dict[str, Contestant]:
    """Ours first, then the workload's peers in their order, then our own other call."""
    q, contiguous = inputs.q, inputs.contiguous
    entrants = {OURS: _entrant(_ours(workload, inputs, backend), q, inputs.copies)}
    for name in workload.peers:
        comparable = name not in workload.non_causal_peers
        if name in PACKAGES:
            copies = [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in inputs.copies]
            lengths = inputs.cache_seqlens if workload.entry else None
            call = package_decode(name, workload.causal, lengths, inputs.block_table)
            entrants[name] = _entrant(call, q.transpose(1, 2).contiguous(), copies)
        else:
            call = _sdpa(workload, inputs, with_causality=comparable)
            entrants[name] = _entrant(call, q, contiguous, SDPA_BACKENDS[name], comparable)
    plain = functools.partial(functional.attention, causal="bottom_right", backend=backend)
    if workload.own == ONE_QUERY:
        entrants[ONE_QUERY] = _entrant(plain, q[:, :, -1:], contiguous, comparable=False)
    elif workload.own == ATTENTION:
        entrants[ATTENTION] = _entrant(plain, q, contiguous)
    elif workload.own == CONTIGUOUS:
        options = dict(cache_seqlens=inputs.cache_seqlens, backend=backend)
        entrants[CONTIGUOUS] = _entrant(functools.partial(functional.attention_with_kvcache, **options), q, contiguous)
    return entrants


def stopwatch(workload: DecodeWorkload, inputs: DecodeInputs) -> Stopwatch:
    """A stopwatch that times one call with every copy."""
    return stopwatch_for(inputs.q.device.type, workload.is_host_time, len(inputs.copies))


def num_copies(workload: DecodeWorkload, device: str) -> int:
    if device == "cpu" or workload.is_host_time:
        return 1
    wanted = L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size
    return -(-wanted // workload.cache_bytes)


def _gathered(pages: tuple[Tensor, Tensor], block_table: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (tensor[block_table].transpose(1, 2).flatten(2, 3) for tensor in pages)
    return k, v


def _entrant(
    call: Call,
    q: Tensor,
    copies: list[tuple[Tensor, Tensor]],
    backend=None,
    comparable: bool = True,
) -> Contestant:
    next_copy = itertools.cycle(copies)
    return Contestant(lambda: call(q, *next(next_copy)), (), backend, comparable)


def _ours(workload: DecodeWorkload, inputs: DecodeInputs, backend: str | None) -> Call:
    if workload.is_host_time and workload.entry is None and backend is None:  # what stands in for PyTorch's function
        return functools.partial(functional.scaled_dot_product_attention, enable_gqa=True)
    if workload.entry is None:
        return functools.partial(functional.attention, causal="bottom_right", mask=inputs.mask, backend=backend)
    options = dict(cache_seqlens=inputs.cache_seqlens, block_table=inputs.block_table, backend=backend)
    if workload.entry == APPEND:
        k, v = inputs.copies[0]
        options |= dict(k_new=k[:, :, -1:].clone(), v_new=v[:, :, -1:].clone())
    return functools.partial(functional.attention_with_kvcache, **options)


def _sdpa(workload: DecodeWorkload, inputs: DecodeInputs, with_causality: bool) -> Call:
    """Bottom-right causality hides nothing from a single query, and from a few next to nothing."""
    mask = inputs.mask
    if workload.seqlen > 1 and with_causality:
        mask = causal_lower_right(workload.seqlen, workload.num_keys)
    enable_gqa = workload.key_heads != workload.num_heads
    return functools.partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=enable_gqa)
