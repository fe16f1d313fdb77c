"""Forward mode and second derivatives of one problem: ours, and those of the reference, which PyTorch derives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flash_attn_ext.derivatives import subproblems
from flash_attn_ext.reference import attention_reference
from support.backends import Backend
from support.cases import Case, Inputs
from support.runners import Result, call_ours, dropout_bits

# Few queries, keys and heads at a time, so that small problems have many tiles and subproblems.
TINY_TILES = subproblems.TileSize(queries=32, keys=48, scores=32 * 48 * 2)

LARGE = dict(sq=70, sk=110, d=8)
# Each in many tiles and subproblems (tiny_tiles).
LARGE_CASES = [
    Case(**LARGE, dlse=True),
    Case(**LARGE, causal="top_left"),
    Case(**(LARGE | dict(sq=110, sk=70)), causal="bottom_right", sink=True, dlse=True),
    Case(**LARGE, window=(20, 7), softcap=1.5),
    Case(**LARGE, window=(25, 60), causal="bottom_right", alibi="bh", dropout_p=0.3),
    Case(**LARGE, heads=6, kv_heads=2, bias="1hqk", mask="b1qk"),
    Case(**LARGE, heads=4, kv_heads=1, bias="b11k", alibi="h", softcap=2.0, dlse=True),
    Case(**LARGE, bias="bh1k", dropout_p=0.6, dv=5, sink=True, dlse=True),
    Case(**LARGE, heads=4, kv_heads=2, intervals="bh", num_intervals=3, bias="11qk", causal="bottom_right"),
    Case(**LARGE, intervals="11", interval_rows=40, dropout_p=0.3, dlse=True),
    Case(**LARGE, heads=4, kv_heads=2, blocks="bk", block_sizes=(64, 128), causal="bottom_right"),
    Case(**LARGE, blocks="11", intervals="1h", num_intervals=2, bias="11qk"),
    Case(**LARGE, batch=3, heads=2, mask="bh1k", layout="bshd", scale=-0.4),
]
# Scores that only a scale changes, and only causality and windows hide, which has kernels of its own on a GPU.
PLAIN_CASES = [
    Case(sq=33, sk=49, d=8, heads=4, kv_heads=2, window=(9, 3)),  # tiles of one query and of one key
    Case(sq=70, sk=245, d=5, dv=3, causal="bottom_right", dlse=True),  # more tiles in a row than are kept
    Case(sq=130, sk=67, d=8, heads=6, kv_heads=2, window=(20, 11), causal="bottom_right", sink=True, dlse=True),
    Case(sq=9, sk=3, d=8, batch=3, causal="bottom_right", layout="bshd", scale=-0.4),
    Case(sq=1, sk=50, d=8, dlse=True),
]

# q, k, v, ... -> (out, lse)
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def tiny_tiles(monkeypatch):
    for name in ("CPU_TILE", "GPU_TILE"):
        monkeypatch.setattr(subproblems, name, TINY_TILES)


def ours(inputs: Inputs, backend: Backend) -> Attention:
    names = list(inputs.leaves())
    return lambda *tensors: call_ours(inputs, dict(zip(names, tensors, strict=True)), backend)


def reference(inputs: Inputs, keep: torch.Tensor | None) -> Attention:
    """`keep`: the dropout bits, True = kept."""
    case, names = inputs.case, list(inputs.leaves())

    def attend(*tensors):
        given = dict(zip(names, tensors, strict=True))
        options = {name: given.get(name) for name in ("bias", "alibi_slopes", "sink")}
        return attention_reference(
            given["q"],
            given["k"],
            given["v"],
            **case.options(),
            **options,
            mask=inputs.mask,
            intervals=inputs.intervals,
            block_lists=inputs.block_lists,
            dropout_p=case.dropout_p,
            dropout_mask=keep,
        )

    return attend


def bits(inputs: Inputs, backend: Backend) -> torch.Tensor | None:
    return dropout_bits(inputs, backend) if inputs.case.dropout_p > 0 else None


def directions(inputs: Inputs, seed: int = 1) -> dict[str, torch.Tensor]:
    """A tangent of each differentiable input. Drawn in float64, so that dtypes round the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.device, leaf.dtype)
        for name, leaf in inputs.leaves().items()
    }


def jvp(attend: Attention, inputs: Inputs, along: dict[str, torch.Tensor]) -> Result:
    leaves = [leaf.detach() for leaf in inputs.leaves().values()]
    _, (out, lse) = torch.func.jvp(attend, tuple(leaves), tuple(along.values()))
    return {"out": out, "lse": lse}


def double_backward(attend: Attention, inputs: Inputs, along: dict[str, torch.Tensor]) -> Result:
    """The gradients of sum over inputs of <gradient, along>, for the inputs, dout and dlse."""
    leaves = inputs.leaves()
    cotangents = {"out": inputs.dout.detach().requires_grad_()}
    if inputs.dlse is not None:
        cotangents["lse"] = inputs.dlse.detach().requires_grad_()
    results = dict(zip(("out", "lse"), attend(*leaves.values()), strict=True))
    roots = [results[name] for name in cotangents]
    # A bias that is constant along each row has no gradient; nor has the sink in a call without one.
    gradients = torch.autograd.grad(roots, list(leaves.values()), list(cotangents.values()), create_graph=True)
    everything = leaves | {f"d{name}": cotangent for name, cotangent in cotangents.items()}
    found = torch.autograd.grad(gradients, list(everything.values()), list(along.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient.detach()
        for (name, tensor), gradient in zip(everything.items(), found, strict=True)
    }
