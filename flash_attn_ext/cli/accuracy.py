"""Computes a case by this library, by PyTorch in the same dtype and exactly, and compares the errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn_ext import _C
from flash_attn_ext._call.problem import accumulate_dtype
from flash_attn_ext._call.seeds import draw_seed
from flash_attn_ext.cli.cases import Case, Inputs, make_inputs
from flash_attn_ext.cli.error_rule import Comparison, Errors, errors_of, scale_of, slack_share
from flash_attn_ext.functional import attention
from flash_attn_ext.reference import attention_reference, key_distance, visible_pairs

SEED = 1234

# PyTorch's backends whose errors are the measure on a GPU: the fused ones, and the unfused formula for calls that these
# refuse, above all in float64. In 16 bits that formula computes in float32, which no kernel on 16-bit operands equals.
# So the calls below are such that a fused one takes them. cuDNN is left out, because the masks that it takes depend on
# its version.
CUDA_MEASURES = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# An answer whose error exceeds that of the plain formula by this factor is wrong, and not used as a measure. Some fused
# kernels have such answers for rows that see nothing or only keys at finfo.min.
WRONG = 10.0

Results = dict[str, Tensor]  # "out", "lse", "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsink"


def compare(case: Case, dtype: torch.dtype, device: str) -> dict[str, Comparison]:
    """The errors of out, lse and every gradient of a case, for the error rule (error_rule.py)."""
    inputs = make_inputs(case, dtype, device)
    keep = _kept_weights(case, device)
    torch.manual_seed(SEED)
    with_lse: Any = functools.partial(attention, mask=inputs.mask, return_lse=True, **case.options)
    ours = _differentiate(inputs, with_lse)
    exact = _plain(case, inputs.to(torch.float64), keep)
    theirs = _their_errors(case, inputs, keep, exact)
    return {
        name: Comparison(errors_of(result, exact[name]), theirs[name], slack_share(result) * scale_of(exact[name]))
        for name, result in ours.items()
    }


def _differentiate(inputs: Inputs, function: Callable[..., tuple[Tensor, Tensor]], frozen: tuple[str, ...] = ()):
    """(out, lse) = function(**tensors), and the gradients of <out, dout>."""
    leaves = inputs.leaves()
    out, lse = function(**{name: leaf.detach() if name in frozen else leaf for name, leaf in leaves.items()})
    wanted = {name: leaf for name, leaf in leaves.items() if name not in frozen}
    gradients = torch.autograd.grad(out, list(wanted.values()), inputs.dout)
    results = {"out": out.detach(), "lse": lse.detach()}
    return results | {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}


def _plain(case: Case, inputs: Inputs, keep: Tensor | None) -> Results:
    return _differentiate(
        inputs, functools.partial(attention_reference, mask=inputs.mask, dropout_mask=keep, **case.options)
    )


def _their_errors(case: Case, inputs: Inputs, keep: Tensor | None, exact: Results) -> dict[str, Errors]:
    """The errors of PyTorch's attention if it has the feature, else of the plain formula in the same dtype.

    PyTorch has a mask, but no LSE and no slopes. These come from the plain formula, and the LSE in the dtype in which
    it is kept.
    """
    plain = _plain(case, inputs, keep)
    plain["lse"] = _plain(case, inputs.to(accumulate_dtype(inputs.q.dtype)), keep)["lse"]
    errors = {name: errors_of(result, exact[name]) for name, result in plain.items()}
    if case.softcap is not None or case.sink or case.dropout_p > 0:
        return errors
    function = functools.partial(_torch_attention, case, inputs)
    # A mask that requires grad sends PyTorch to its unfused path: only the mask's own gradient comes from there.
    theirs = _differentiate(inputs, function, frozen=("bias", "alibi_slopes"))
    if inputs.bias is not None:
        theirs["dbias"] = _differentiate(inputs, function, frozen=("alibi_slopes",))["dbias"]
    del theirs["lse"]
    exact = _exact_with_their_mask(case, inputs, exact)
    for name, result in theirs.items():
        found = errors_of(result, exact[name])
        if found.largest <= WRONG * errors[name].largest:
            errors[name] = found
    return errors


def _torch_attention(case: Case, inputs: Inputs, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    if _needs_mask(case):
        mask = _torch_mask(case, inputs, tensors.get("bias"), tensors.get("alibi_slopes"))
        arguments: dict[str, Any] = dict(attn_mask=mask)
    else:
        arguments = dict(is_causal=case.causal is not None)
    no_lse = q.new_empty(0)
    if not q.is_cuda:
        arguments["enable_gqa"] = case.num_heads != case.num_key_heads
        return F.scaled_dot_product_attention(q, k, v, **arguments), no_lse
    # The fused kernels take equal numbers of heads, and one head dim that is a multiple of 8, to which this zero-pads.
    k, v = (t.repeat_interleave(case.num_heads // case.num_key_heads, dim=1) for t in (k, v))
    widest = max(case.head_dim, case.head_dim_v)
    widest += -widest % 8
    q, k, v = (F.pad(t, (0, widest - t.shape[-1])) for t in (q, k, v))
    with sdpa_kernel(CUDA_MEASURES):
        out = F.scaled_dot_product_attention(q, k, v, scale=case.head_dim**-0.5, **arguments)
    return out[..., : case.head_dim_v], no_lse


def _needs_mask(case: Case) -> bool:
    """Whether PyTorch's attention has no keyword for an option of the case."""
    has_scores = case.bias is not None or case.mask is not None or case.alibi
    return has_scores or case.window is not None or case.causal == "bottom_right"


def _torch_mask(case: Case, inputs: Inputs, bias: Tensor | None, alibi_slopes: Tensor | None) -> Tensor:
    """All terms that are added to scores, and all masks, as one float mask."""
    dtype = accumulate_dtype(inputs.q.dtype)
    distance = key_distance(case.num_queries, case.num_keys, case.causal, inputs.q.device)
    visible = visible_pairs(distance, case.causal, case.window)
    if inputs.mask is not None:
        visible = visible & inputs.mask
    mask = torch.zeros_like(distance, dtype=dtype)
    if bias is not None:
        mask = mask + bias.to(dtype)
    if alibi_slopes is not None:
        mask = mask - alibi_slopes[:, None, None] * distance.abs()
    mask = mask.masked_fill(~visible, -torch.inf)
    mask = mask[(None,) * (4 - mask.dim())]  # with three dimensions PyTorch's CPU attention takes its unfused path
    return mask.to(_torch_mask_dtype(inputs.q))


def _torch_mask_dtype(q: Tensor) -> torch.dtype:
    """On the CPU PyTorch takes a float32 mask beside 16-bit inputs; its fused CUDA kernels want one in their dtype."""
    return q.dtype if q.is_cuda else accumulate_dtype(q.dtype)


def _exact_with_their_mask(case: Case, inputs: Inputs, exact: Results) -> Results:
    """The exact answer to the problem that PyTorch got.

    It differs from our problem if the mask had to be rounded (such as the slopes of ALiBi in bfloat16). That rounding
    is no error of PyTorch's kernels, so counting it would allow our kernels too much.
    """
    if not _needs_mask(case) or _torch_mask_dtype(inputs.q) == accumulate_dtype(inputs.q.dtype):
        return exact
    doubles = inputs.to(torch.float64)
    rounded = _torch_mask(case, inputs, inputs.bias, inputs.alibi_slopes).detach()
    leaves = {"q": doubles.q, "k": doubles.k, "v": doubles.v, "mask": rounded.to(torch.float64)}
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    out, _ = attention_reference(leaves["q"], leaves["k"], leaves["v"], bias=leaves["mask"])
    gradients = torch.autograd.grad(out, list(leaves.values()), doubles.dout)
    results = {"out": out.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    dmask = results.pop("dmask")
    return results if inputs.bias is None else results | {"dbias": dmask.sum_to_size(inputs.bias.shape)}


def _kept_weights(case: Case, device: str) -> Tensor | None:
    """The dropout bits that a call after manual_seed(SEED) draws, True = kept."""
    if case.dropout_p == 0:
        return None
    torch.manual_seed(SEED)
    shape = (case.batch, case.num_heads, case.num_queries, case.num_keys)
    return _C.dropout_mask(draw_seed(torch.device(device)), case.dropout_p, *shape).to(device)
