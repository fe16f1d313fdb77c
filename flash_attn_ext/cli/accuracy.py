"""One case three times: by this library, by PyTorch in the same dtype, and exactly. And the rule that compares them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_ext import _C
from flash_attn_ext.autograd import draw_seed
from flash_attn_ext.cli.cases import Case, Inputs, accumulate_dtype, make_inputs
from flash_attn_ext.functional import attention
from flash_attn_ext.reference import attention_reference, key_distance, visible_pairs

MAX_ERROR_RATIO = 2.0
MEAN_ERROR_RATIO = 1.1
SEED = 1234

Results = dict[str, Tensor]  # "out", "lse", "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsink"


@dataclass(frozen=True)
class Comparison:
    """Errors of one result, ours and PyTorch's in the same dtype, against float64."""

    name: str
    max_error: float
    mean_error: float
    torch_max_error: float
    torch_mean_error: float
    slack: float

    @property
    def share_of_allowed(self) -> float:
        """The error by what the rule allows, the larger of the two: above 1 it is broken."""
        allowed_max = MAX_ERROR_RATIO * self.torch_max_error + self.slack
        allowed_mean = MEAN_ERROR_RATIO * self.torch_mean_error + self.slack
        return max(_ratio(self.max_error, allowed_max), _ratio(self.mean_error, allowed_mean))

    @property
    def max_ratio(self) -> float:
        return _ratio(self.max_error, self.torch_max_error)

    @property
    def mean_ratio(self) -> float:
        return _ratio(self.mean_error, self.torch_mean_error)


def compare(case: Case, dtype: torch.dtype, device: str) -> Iterator[Comparison]:
    """The error rule for out, lse and every gradient of a case.

    max error <= 2 x PyTorch's + slack and mean error <= 1.1 x PyTorch's + slack, where the slack is 1e-5 of the
    result's largest value (1e-12 in float64, where two orders of summation differ by as much).
    """
    inputs = make_inputs(case, dtype, device)
    keep = _kept_weights(case, device)
    torch.manual_seed(SEED)
    ours = _differentiate(inputs, functools.partial(attention, mask=inputs.mask, return_lse=True, **case.options))
    exact = _plain(case, inputs.to(torch.float64), keep)
    theirs = _theirs(case, inputs, keep)
    for name, result in ours.items():
        finite = exact[name][exact[name].isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        slack = scale * (1e-12 if result.dtype == torch.float64 else 1e-5)
        yield Comparison(name, *_errors(result, exact[name]), *_errors(theirs[name], exact[name]), slack)


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


def _theirs(case: Case, inputs: Inputs, keep: Tensor | None) -> Results:
    """PyTorch's attention where it has the feature, else the plain formula in the same dtype.

    It has no LSE and no slopes, only a mask: these come from the plain formula, the LSE in the dtype it is kept in.
    """
    plain = _plain(case, inputs, keep)
    plain["lse"] = _plain(case, inputs.to(accumulate_dtype(inputs.q.dtype)), keep)["lse"]
    if case.softcap is not None or case.sink or case.dropout_p > 0:
        return plain
    function = functools.partial(_torch_attention, case, inputs)
    # A mask that requires grad sends PyTorch to its unfused path: only the mask's own gradient comes from there.
    theirs = _differentiate(inputs, function, frozen=("bias", "alibi_slopes"))
    if inputs.bias is not None:
        theirs["dbias"] = _differentiate(inputs, function, frozen=("alibi_slopes",))["dbias"]
    return plain | theirs | {"lse": plain["lse"]}


def _torch_attention(case: Case, inputs: Inputs, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, bias, alibi_slopes = (tensors.get(name) for name in ("q", "k", "v", "bias", "alibi_slopes"))
    grouped = dict(enable_gqa=case.num_heads != case.num_key_heads)
    no_lse = q.new_empty(0)
    if bias is None and alibi_slopes is None and inputs.mask is None and case.window is None:
        if case.causal is None:
            return F.scaled_dot_product_attention(q, k, v, **grouped), no_lse
        if case.causal == "top_left":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped), no_lse
    dtype = accumulate_dtype(q.dtype)
    distance = key_distance(case.num_queries, case.num_keys, case.causal, q.device)
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
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **grouped), no_lse


def _kept_weights(case: Case, device: str) -> Tensor | None:
    """The dropout bits that a call after manual_seed(SEED) draws, True = kept."""
    if case.dropout_p == 0:
        return None
    torch.manual_seed(SEED)
    shape = (case.batch, case.num_heads, case.num_queries, case.num_keys)
    return _C.dropout_mask(draw_seed(torch.device(device)), case.dropout_p, *shape).to(device)


def _errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest and mean. Equal infinities (the LSE of a row without keys) are no error, a NaN is an infinite one."""
    error = (result.double() - exact).abs()
    error = torch.where(result == exact, 0.0, error).nan_to_num(nan=float("inf"))
    return (float(error.max()), float(error.mean())) if error.numel() else (0.0, 0.0)


def _ratio(error: float, other: float) -> float:
    if error == 0:
        return 0.0
    return error / other if other > 0 else float("inf")
