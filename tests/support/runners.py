"""The same inputs through the library, through its reference, and through PyTorch's own attention.

Each returns a Result: "out", "lse", and "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsink" where they exist.
"""

import contextlib

import torch
import torch.nn.functional as F

import flash_attn_ext
from flash_attn_ext.reference import attention_reference
from support.backends import Backend
from support.cases import Inputs, accumulate_dtype
from support.masks import offsets, visible

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


def call_ours(inputs: Inputs, tensors: dict[str, torch.Tensor], backend: Backend | None = None):
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
        alibi_slopes=tensors.get("alibi_slopes"),
        sink=tensors.get("sink"),
        dropout_p=case.dropout_p,
        layout=case.layout,
        return_lse=True,
        backend=None if backend is None else backend.name,
    )
    return (out.transpose(1, 2) if case.layout == "bshd" else out), lse


def run_ours(inputs: Inputs, backend: Backend | None = None) -> Result:
    with poisoned_memory():
        leaves = inputs.leaves()
        out, lse = call_ours(inputs, leaves, backend)
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
        alibi_slopes=leaves.get("alibi_slopes"),
        sink=leaves.get("sink"),
        dropout_p=case.dropout_p,
        dropout_mask=keep,
        return_lse=True,
    )
    result = {"out": out, "lse": lse}
    result |= gradients(result, inputs, leaves)
    return {name: tensor.detach() for name, tensor in result.items()}


def sdpa_can(inputs: Inputs) -> bool:
    case = inputs.case
    return case.softcap is None and not case.sink and case.dropout_p == 0 and inputs.dlse is None


def run_sdpa(inputs: Inputs) -> Result:
    """PyTorch's scaled_dot_product_attention with everything it has no keyword for folded into a float mask.

    A mask that requires grad takes PyTorch's unfused path, so only the mask's own gradient comes from there.
    """
    leaves = inputs.leaves()
    core = {name: leaves[name] for name in ("q", "k", "v")}
    result = _sdpa(inputs, core)
    if inputs.bias is not None:
        result = _sdpa(inputs, core | {"bias": leaves["bias"]}) | result
    return {name: tensor.detach() for name, tensor in result.items()}


def _sdpa(inputs: Inputs, leaves: dict[str, torch.Tensor]) -> Result:
    case = inputs.case
    bias, slopes = leaves.get("bias", inputs.bias), inputs.alibi_slopes
    options = dict(scale=case.scale, enable_gqa=case.heads != case.num_kv_heads)
    only_top_left = case.causal == "top_left" and case.window is None
    if bias is None and slopes is None and inputs.mask is None and (only_top_left or bool(visible(case).all())):
        options |= dict(is_causal=only_top_left)
    else:
        options |= dict(attn_mask=_float_mask(inputs, bias, slopes))
    if options["scale"] is None:
        options["scale"] = max(case.d, 1) ** -0.5
    # Zeros up to one head dim change nothing, and PyTorch has no fused path for two different ones.
    widest = max(case.d, case.head_dim_v)
    q, k, v = (F.pad(leaves[name], (0, widest - leaves[name].shape[-1])) for name in ("q", "k", "v"))
    result = {"out": F.scaled_dot_product_attention(q, k, v, **options)[..., : case.head_dim_v]}
    return result | gradients(result, inputs, leaves)


def _float_mask(inputs: Inputs, bias: torch.Tensor | None, slopes: torch.Tensor | None) -> torch.Tensor:
    case, device = inputs.case, inputs.q.device
    dtype = accumulate_dtype(inputs.q.dtype)  # PyTorch takes a float32 mask beside 16-bit inputs
    mask = torch.zeros(case.batch, case.heads, case.sq, case.sk, dtype=dtype, device=device)
    if bias is not None:
        mask = mask + bias.to(dtype)
    if slopes is not None:
        mask = mask - slopes[..., None, None] * offsets(case).abs().to(device)
    hidden = ~visible(case).to(device)
    if inputs.mask is not None:
        hidden = hidden | ~inputs.mask
    return mask.masked_fill(hidden, -float("inf"))


def dropout_bits(inputs: Inputs, backend: Backend) -> torch.Tensor:
    """Which weights the call of this case keeps, read off the public surface: uniform weights times an identity V."""
    case, device = inputs.case, inputs.q.device
    dtype = torch.float32
    zeros_q = torch.zeros(case.batch, case.heads, case.sq, 1, device=device, dtype=dtype)
    zeros_k = torch.zeros(case.batch, case.heads, case.sk, 1, device=device, dtype=dtype)
    identity = torch.eye(case.sk, device=device, dtype=dtype).expand(case.batch, case.heads, -1, -1)
    torch.manual_seed(inputs.dropout_seed)
    weights = flash_attn_ext.attention(zeros_q, zeros_k, identity, dropout_p=case.dropout_p, backend=backend.name)
    return weights > 0
