"""Packed ("varlen") problems as data, run through attention_varlen and sequence by sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

import flash_attn_ext
from flash_attn_ext.reference import attention_reference
from support.backends import Backend
from support.cases import Case, Inputs, accumulate_dtype, draw_intervals, make_inputs
from support.runners import Result, gradients, poisoned_memory

# (q, k, v, options with tensors) of one sequence, (1, H, S, D) -> out, lse
DenseAttention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class PackedCase:
    """`base` carries the features; its batch, sq and sk follow from the lengths."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    base: Case = Case()

    def __str__(self) -> str:
        def joined(lengths: tuple[int, ...]) -> str:
            return "_".join(map(str, lengths))

        features = str(self.base).split("-")[2:]
        return "-".join([f"q{joined(self.lengths_q)}", f"k{joined(self.lengths_k)}", *features])

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    def padded(self) -> Case:
        """The dense case whose bias, mask, slopes and sink have the shapes of this one."""
        return dataclasses.replace(self.base, batch=self.batch, sq=max(self.lengths_q), sk=max(self.lengths_k))


def cu_seqlens(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def make_packed(case: PackedCase, dtype: torch.dtype, device: str, seed: int = 0, draw_on: str = "cpu") -> Inputs:
    """Inputs with q, k, v, dout of shape (T, H, D) and dlse (H, T)."""
    inputs = make_inputs(case.padded(), dtype, device, seed, draw_on)
    generator = torch.Generator(draw_on).manual_seed(seed + 1)
    base, total_q, total_k = case.base, sum(case.lengths_q), sum(case.lengths_k)

    def normal(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device=draw_on)
        return numbers.to(device=device, dtype=dtype)

    changes = dict(
        q=normal(total_q, base.heads, base.d),
        k=normal(total_k, base.num_kv_heads, base.d),
        v=normal(total_k, base.num_kv_heads, base.head_dim_v),
        dout=normal(total_q, base.heads, base.head_dim_v),
    )
    if base.dlse:
        changes["dlse"] = normal(base.heads, total_q).to(accumulate_dtype(dtype))
    if base.intervals is not None:
        changes["intervals"] = _draw_intervals(case, generator).to(device)
    return inputs.replace(**changes)


def _draw_intervals(case: PackedCase, generator: torch.Generator) -> torch.Tensor:
    """(H|1, Tq, 2 n), of positions inside the sequences."""
    heads = case.base.heads if case.base.intervals[1] == "h" else 1
    device = generator.device
    shape = (heads, sum(case.lengths_q), 2 * case.base.num_intervals)
    numbers = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    lengths = torch.tensor(case.lengths_k, device=device).repeat_interleave(torch.tensor(case.lengths_q, device=device))
    return draw_intervals(numbers, lengths[:, None])


def call_packed(case: PackedCase, inputs: Inputs, tensors: dict[str, torch.Tensor], backend: Backend, **more):
    device = inputs.q.device
    if case.base.dropout_p > 0:
        torch.manual_seed(inputs.dropout_seed)
    return flash_attn_ext.attention_varlen(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        cu_seqlens(case.lengths_q, device),
        cu_seqlens(case.lengths_k, device),
        **(dict(max_seqlen_q=max(case.lengths_q), max_seqlen_k=max(case.lengths_k)) | more),
        **case.base.options(),
        bias=tensors.get("bias"),
        mask=inputs.mask,
        intervals=inputs.intervals,
        alibi_slopes=tensors.get("alibi_slopes"),
        sink=tensors.get("sink"),
        dropout_p=case.base.dropout_p,
        return_lse=True,
        backend=backend.name,
    )


def run_packed(case: PackedCase, inputs: Inputs, backend: Backend, **more) -> Result:
    with poisoned_memory():
        leaves = inputs.leaves()
        out, lse = call_packed(case, inputs, inputs.operands(leaves), backend, **more)
        result = {"out": out, "lse": lse}
        result |= gradients(result, inputs, leaves)
    return {name: tensor.detach() for name, tensor in result.items()}


def sequences(case: PackedCase, inputs: Inputs) -> Iterator[tuple[Inputs, slice, slice]]:
    """Each sequence as a dense problem of one batch entry, and where its queries and keys are among the tokens."""
    q_begin, k_begin = 0, 0
    for index, (length_q, length_k) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True)):
        queries, keys = slice(q_begin, q_begin + length_q), slice(k_begin, k_begin + length_k)
        q_begin, k_begin = queries.stop, keys.stop
        rows = {"q": queries, "k": keys, "v": keys, "dout": queries}
        changes = {name: getattr(inputs, name)[tokens].transpose(0, 1).unsqueeze(0) for name, tokens in rows.items()}
        if inputs.dlse is not None:
            changes["dlse"] = inputs.dlse[:, queries].unsqueeze(0)
        for name in ("bias", "mask"):
            changes[name] = _of_sequence(getattr(inputs, name), index, length_q, length_k)
        if inputs.intervals is not None:
            changes["intervals"] = inputs.intervals[None, :, queries]
        if case.base.alibi == "bh":
            changes["alibi_slopes"] = inputs.alibi_slopes[index : index + 1]
        alone = dataclasses.replace(case.base, batch=1, sq=length_q, sk=length_k)
        yield inputs.replace(case=alone, **changes), queries, keys


def run_by_sequence(
    case: PackedCase, inputs: Inputs, attend: DenseAttention = attention_reference, keep: torch.Tensor | None = None
) -> Result:
    """Each sequence on its own through a dense attention, then packed again; gradients through the whole.

    `keep`: dropout bits (batch, H, max_q, max_k) for a reference that takes them.
    """
    leaves = inputs.leaves()
    outs, lses = [], []
    for index, (alone, _, _) in enumerate(sequences(case, inputs.replace(**leaves))):
        options = {name: getattr(alone, name) for name in ("bias", "mask", "intervals", "alibi_slopes", "sink")}
        if keep is not None:
            options |= dict(dropout_p=case.base.dropout_p)
            options["dropout_mask"] = keep[index : index + 1, :, : alone.case.sq, : alone.case.sk]
        out, lse = attend(alone.q, alone.k, alone.v, **alone.case.options(), **options, return_lse=True)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    result = {"out": torch.cat(outs), "lse": torch.cat(lses, dim=1)}
    result |= gradients(result, inputs, leaves)
    return {name: tensor.detach() for name, tensor in result.items()}


def _of_sequence(tensor: torch.Tensor | None, index: int, length_q: int, length_k: int) -> torch.Tensor | None:
    """A broadcast dimension stays 1, also where the sequence is empty."""
    if tensor is None:
        return None
    batch = slice(index, index + 1) if tensor.shape[0] > 1 else slice(None)
    queries = slice(0, length_q) if tensor.shape[2] > 1 else slice(None)
    keys = slice(0, length_k) if tensor.shape[3] > 1 else slice(None)
    return tensor[batch, :, queries, keys]
