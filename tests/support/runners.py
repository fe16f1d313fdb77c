"""The same inputs through the library and through its reference; through PyTorch: support/yardstick.py.

Each returns a Result: "out", "lse", and "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsink" where they exist.
"""

import contextlib

import torch

import flash_attn_ext
from flash_attn_ext.reference import attention_reference
from support.backends import WIDEST_EVERYWHERE, Backend
from support.cases import Inputs

Result = dict[str, torch.Tensor]


@contextlib.contextmanager
def poisoned_memory():
    """Fresh torch memory is NaN inside, so that what a kernel forgets to write, or reads unwritten, shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def gradients(outputs: Result, inputs: Inputs, leaves: dict[str, torch.Tensor]) -> Result:
    """Backward of <out, dout> + <lse, dlse>."""
    roots, grads = [outputs["out"]], [inputs.dout]
    if inputs.dlse is not None:
        roots.append(outputs["lse"])
        grads.append(inputs.dlse)
    found = torch.autograd.grad(roots, list(leaves.values()), grads, allow_unused=True)
    zeros = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    return {f"d{name}": zeros[name] if g is None else g for name, g in zip(leaves, found, strict=True)}


def call_ours(inputs: Inputs, tensors: dict[str, torch.Tensor], backend: Backend | None = None, **more):
    """flash_attn_ext.attention on a case; returns (out, lse), out in (B, H, S, Dv) whatever the layout."""
    case = inputs.case
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    if case.layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if case.dropout_p > 0:
        torch.manual_seed(inputs.dropout_seed)
    out, lse = flash_attn_ext.attention(
        q,
        k,
        v,
        **case.options(),
        bias=tensors.get("bias"),
        mask=inputs.mask,
        intervals=inputs.intervals,
        block_lists=inputs.block_lists,
        alibi_slopes=tensors.get("alibi_slopes"),
        sink=tensors.get("sink"),
        dropout_p=case.dropout_p,
        layout=case.layout,
        return_lse=True,
        backend=None if backend is None else backend.name,
        **more,
    )
    return (out.transpose(1, 2) if case.layout == "bshd" else out), lse


def run_ours(inputs: Inputs, backend: Backend | None = None, **more) -> Result:
    """`more`: keywords of attention that a case does not have."""
    with poisoned_memory():
        leaves = inputs.leaves()
        out, lse = call_ours(inputs, inputs.operands(leaves), backend, **more)
        result = {"out": out, "lse": lse}
        result |= gradients(result, inputs, leaves)
    return {name: tensor.detach() for name, tensor in result.items()}


def run_reference(inputs: Inputs, keep: torch.Tensor | None = None) -> Result:
    """flash_attn_ext.reference in the dtype of the inputs. `keep`: the dropout bits, True = kept."""
    case, leaves = inputs.case, inputs.leaves()
    out, lse = attention_reference(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        **case.options(),
        bias=leaves.get("bias"),
        mask=inputs.mask,
        intervals=inputs.intervals,
        block_lists=inputs.block_lists,
        alibi_slopes=leaves.get("alibi_slopes"),
        sink=leaves.get("sink"),
        dropout_p=case.dropout_p,
        dropout_mask=keep,
        return_lse=True,
    )
    result = {"out": out, "lse": lse}
    result |= gradients(result, inputs, leaves)
    return {name: tensor.detach() for name, tensor in result.items()}


def dropout_bits(inputs: Inputs, backend: Backend) -> torch.Tensor:
    """Which weights the call of this case keeps, read off the public surface: uniform weights times an identity V.

    A head dim is as wide as every backend takes it, so a wide identity comes in parts: the bits depend on the seed and
    on where a weight is, and not on V, nor on the dtype.
    """
    case, device = inputs.case, inputs.q.device
    dtype = torch.float32 if backend.refusal(torch.float32) is None else torch.bfloat16
    zeros_q = torch.zeros(case.batch, case.heads, case.sq, 1, device=device, dtype=dtype)
    zeros_k = torch.zeros(case.batch, case.heads, case.sk, 1, device=device, dtype=dtype)
    parts = []
    for identity in identity_parts(case.sk, device, dtype):
        v = identity.expand(case.batch, case.heads, -1, -1)
        torch.manual_seed(inputs.dropout_seed)
        parts.append(flash_attn_ext.attention(zeros_q, zeros_k, v, dropout_p=case.dropout_p, backend=backend.name) > 0)
    return torch.cat(parts, dim=-1)


def identity_parts(size: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Columns of the identity, no wider than the head dims that every backend takes."""
    return torch.eye(size, device=device, dtype=dtype).split(WIDEST_EVERYWHERE, dim=1)
