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
from flash_attn_ext.cli.bench.contestant import OURS, SDPA_BACKENDS, Contestant
from flash_attn_ext.cli.bench.peers import PACKAGES, package_contestant
from flash_attn_ext.cli.bench.timing import Stopwatch, stopwatch_for
from flash_attn_ext.cli.bench.workload import DIRECT, OWN_VARLEN, Inputs, Workload, make_inputs
from flash_attn_ext.functional import attention, attention_varlen, explain, scaled_dot_product_attention
from flash_attn_ext.integrations.torch_backend.switch import activate


def prepare(workload: Workload, pass_: str, device: str) -> Inputs:
    """The inputs of a workload. A forward pass needs no grad, as in inference, except for a bias that requires it."""
    inputs = make_inputs(workload, device)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.requires_grad_(pass_ != "forward")
    if workload.bias_needs_grad and inputs.bias is not None:
        inputs.bias.requires_grad_()
    return inputs


def stopwatch(workload: Workload, inputs: Inputs) -> Stopwatch:
    return stopwatch_for(inputs.q.device.type, workload.is_host_time, workload.calls)


def contestants(workload: Workload, inputs: Inputs, backend: str | None) -> dict[str, Contestant]:
    """Ours first, then the workload's peers in their order, then our own other call."""
    q, k, v = inputs.q, inputs.k, inputs.v
    leaves: tuple[Any, ...] = (q, k, v, inputs.bias) if workload.bias_needs_grad else (q, k, v)
    comparable = workload.dropout_p == 0  # with dropout, each contestant drops other weights
    found = {OURS: Contestant(_ours(workload, inputs, backend), leaves, comparable=comparable)}
    for name in workload.peers:
        if name == "varlen_attn":
            found[name] = Contestant(_varlen_peer(workload, inputs), leaves, comparable=comparable)
        elif name in PACKAGES:
            found[name] = package_contestant(name, workload, inputs)
        else:
            arguments = _sdpa_arguments(workload, inputs)
            forward = functools.partial(F.scaled_dot_product_attention, q, k, v, **arguments)
            found[name] = Contestant(forward, leaves, SDPA_BACKENDS[name], comparable)
    if workload.own == DIRECT:
        found[workload.own] = found[OURS]
        forward = functools.partial(F.scaled_dot_product_attention, q, k, v)
        found[OURS] = Contestant(forward, leaves, surroundings=_operators_replaced)
    elif workload.own == OWN_VARLEN:
        found[workload.own] = Contestant(_own_varlen(inputs, backend), ())
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


def _our_options(workload: Workload, inputs: Inputs, backend: str | None) -> dict:
    options = dict(
        causal="top_left" if workload.causal else None,
        window=workload.window,
        mask=inputs.mask,
        bias=inputs.bias,
        dropout_p=workload.dropout_p,
        backend=backend,
    )
    if workload.lengths:
        options |= dict(max_seqlen_q=workload.seqlen, max_seqlen_k=workload.seqlen)
    return options


def _sdpa_arguments(workload: Workload, inputs: Inputs) -> dict:
    """The arguments of PyTorch's function, which has no window and gets it as a boolean mask."""
    attn_mask, is_causal = inputs.bias if inputs.mask is None else inputs.mask, workload.causal
    if workload.window is not None:
        left, right = workload.window
        offset = torch.arange(workload.seqlen, device=inputs.q.device)
        distance = offset - offset[:, None]
        attn_mask = (distance >= -left) & (distance <= (0 if is_causal else right))
        is_causal = False
    return dict(
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=workload.dropout_p,
        enable_gqa=workload.key_heads != workload.num_heads,
    )


def _varlen_peer(workload: Workload, inputs: Inputs) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # here, so that a torch without it loses only this peer

        lengths: Any = (inputs.cu_seqlens, inputs.cu_seqlens, workload.seqlen, workload.seqlen)
        options: Any = dict(window_size=(-1, 0 if workload.causal else -1))
        out: Any = varlen_attn(inputs.q, inputs.k, inputs.v, *lengths, **options)
        return out

    return forward
