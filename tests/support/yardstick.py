"""PyTorch's own attention in the dtype of the inputs: what the error rule measures ours by.

On the CPU that is F.scaled_dot_product_attention as it comes. On a GPU the same function has several paths, and not all
of them are a measure:

- the fused ones (flash, efficient) are what users of a dtype get. They want four dimensions, head dims in multiples of
  8, one number of heads, a scale above 0, and a mask in q's dtype, and are asked in that form;
- the unfused one ("math") turns 16-bit inputs into float32 first. No kernel on 16-bit operands is as exact, so it is
  the measure only where it is all there is: float64;
- cuDNN's is left out: whether it is chosen depends on its version, and it reads a float32 mask beside 16-bit inputs
  as if it were 16-bit (github.com/pytorch/pytorch/pull/191612).

In float32 the efficient kernel multiplies in three TF32 products, whatever torch.backends.cuda.matmul.allow_tf32 says;
conftest.py keeps that switch off for the plain formula.
"""

import contextlib
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.cases import Inputs, accumulate_dtype
from support.errors import errors_of, slack_of
from support.masks import offsets, visible
from support.runners import Result, gradients, run_reference

MEASURES = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
HEAD_DIM_MULTIPLE = 8
# Further from the exact answer than the plain formula by this factor is not an error of rounding but a wrong answer:
# fused kernels have some, in rows that see nothing and in rows at finfo.min.
WRONG = 10.0


def run_yardstick(inputs: Inputs, exact: Result, keep: torch.Tensor | None = None) -> Result:
    """PyTorch's attention where it has the feature and gives an answer, else the plain formula in the same dtype.

    It has no LSE and no slopes. The LSE is kept in the accumulate dtype, so its yardstick is computed in it.
    """
    plain = run_reference(inputs, keep)
    accumulate = accumulate_dtype(inputs.q.dtype)
    if accumulate != inputs.q.dtype:
        plain["lse"] = run_reference(inputs.to(accumulate), keep)["lse"]
    if not sdpa_can(inputs):
        return plain
    theirs = run_sdpa(inputs)
    for name, difference in rounding_of_the_mask(inputs, exact).items():
        theirs[name] = theirs[name].double() - difference
    return plain | {name: t for name, t in theirs.items() if is_an_answer(t, plain[name], exact[name])}


def sdpa_can(inputs: Inputs) -> bool:
    case = inputs.case
    return case.softcap is None and not case.sink and case.dropout_p == 0 and inputs.dlse is None


def is_an_answer(theirs: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> bool:
    allowed = WRONG * errors_of(plain, exact).largest + slack_of(plain, exact)
    return errors_of(theirs, exact).largest <= allowed


# A grid's limit, which PyTorch's fused kernels do not look after.
MOST_BATCH_ENTRIES = 65535


def fused_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask=None, **options) -> torch.Tensor:
    """F.scaled_dot_product_attention in the form in which a GPU's fused kernels take it, so that it never raises."""
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
    if options.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in (query, key, value)))
    if attn_mask is not None:
        attn_mask = _four_dimensional(mask_in(query.dtype, attn_mask), lead, (query.shape[-2], key.shape[-2]))
    scale = options.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0:  # hidden scores are -inf before they are scaled there: times 0 or less, NaN
        query, scale = query * math.copysign(float(scale != 0), scale), abs(scale) or 1.0
    head_dim_v = value.shape[-1]
    widest = max(query.shape[-1], head_dim_v)
    widest += -widest % HEAD_DIM_MULTIPLE
    # Zeros up to one head dim change nothing.
    padded = (F.pad(t, (0, widest - t.shape[-1])) for t in (query, key, value))
    q, k, v = (_four_dimensional(t, lead, t.shape[-2:]) for t in padded)
    is_causal = options.get("is_causal", False)
    parts = []
    for first in range(0, max(q.shape[0], 1), MOST_BATCH_ENTRIES):
        entries = slice(first, first + MOST_BATCH_ENTRIES)
        mask = attn_mask if attn_mask is None else attn_mask[entries]
        with sdpa_kernel(MEASURES):
            parts.append(
                F.scaled_dot_product_attention(
                    q[entries], k[entries], v[entries], attn_mask=mask, is_causal=is_causal, scale=scale
                )
            )
    out = torch.cat(parts)
    return out[..., :head_dim_v].reshape(*lead, query.shape[-2], head_dim_v)


def unfused_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask=None, **options):
    """F.scaled_dot_product_attention by its formula where a GPU has fused kernels, which have no answer for some rows.

    In float32 and float64, that is: in 16 bits it is not the measure (above).
    """
    with sdpa_kernel(SDPBackend.MATH) if query.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)


def mask_in(dtype: torch.dtype, mask: torch.Tensor) -> torch.Tensor:
    """A float mask in q's dtype; what is hidden stays hidden, and nothing else becomes so."""
    if mask.dtype == torch.bool:
        return mask
    if dtype.itemsize >= mask.dtype.itemsize:
        return mask.to(dtype)
    return torch.where(mask == -math.inf, mask, mask.clamp(min=torch.finfo(dtype).min)).to(dtype)


def _four_dimensional(tensor: torch.Tensor, lead: tuple[int, ...], matrix: tuple[int, ...]) -> torch.Tensor:
    """Broadcast to (*lead, *matrix), then batch entries, heads and the matrix; no stride of 0 in a mask's last one."""
    heads = lead[-1] if lead else 1
    return tensor.expand(*lead, *matrix).reshape(math.prod(lead[:-1]), heads, *matrix).contiguous()


def run_sdpa(inputs: Inputs) -> Result:
    """PyTorch's attention with everything it has no keyword for folded into a float mask.

    A mask that requires grad takes the unfused path on the CPU, so only the mask's own gradient comes from there.
    """
    leaves = inputs.leaves()
    core = {name: leaves[name] for name in ("q", "k", "v")}
    result = _sdpa(inputs, core)
    if inputs.bias is not None:
        result = _sdpa(inputs, core | {"bias": leaves["bias"]}) | result
    return {name: tensor.detach() for name, tensor in result.items()}


def _sdpa(inputs: Inputs, leaves: dict[str, torch.Tensor]) -> Result:
    case = inputs.case
    bias = leaves.get("bias", inputs.bias)
    options = dict(scale=case.scale, enable_gqa=case.heads != case.num_kv_heads)
    if needs_mask(inputs):
        options |= dict(attn_mask=asked_mask(inputs, bias))
    else:
        options |= dict(is_causal=case.causal == "top_left" and case.window is None)
    if options["scale"] is None:
        options["scale"] = max(case.d, 1) ** -0.5
    # Zeros up to one head dim change nothing, and PyTorch has no fused path for two different ones.
    widest = max(case.d, case.head_dim_v)
    q, k, v = (F.pad(leaves[name], (0, widest - leaves[name].shape[-1])) for name in ("q", "k", "v"))
    result = {"out": fused_sdpa(q, k, v, **options)[..., : case.head_dim_v]}
    return result | gradients(result, inputs, leaves)


def needs_mask(inputs: Inputs) -> bool:
    case = inputs.case
    if inputs.bias is not None or inputs.alibi_slopes is not None or inputs.whole_mask is not None:
        return True
    only_top_left = case.causal == "top_left" and case.window is None
    return not only_top_left and not bool(visible(case).all())


def float_mask(inputs: Inputs, bias: torch.Tensor | None) -> torch.Tensor:
    """(B, H, Sq, Sk) in the accumulate dtype; PyTorch on the CPU takes a float32 mask beside 16-bit inputs."""
    case, device = inputs.case, inputs.q.device
    dtype = accumulate_dtype(inputs.q.dtype)
    mask = torch.zeros(case.batch, case.heads, case.sq, case.sk, dtype=dtype, device=device)
    if bias is not None:
        mask = mask + bias.to(dtype)
    if inputs.alibi_slopes is not None:
        mask = mask - inputs.alibi_slopes[..., None, None] * offsets(case, device).abs()
    hidden = ~visible(case, device)
    if inputs.whole_mask is not None:
        hidden = hidden | ~inputs.whole_mask
    return mask.masked_fill(hidden, -math.inf)


def asked_mask(inputs: Inputs, bias: torch.Tensor | None) -> torch.Tensor:
    """float_mask, less the largest element of each row where a GPU's fused kernels take it rounded to 16 bits.

    The softmax does not see a constant that is added to a row, but rounding does: around 4096 one bfloat16 stands for
    all of a row's biases. Their problem would have flatter weights, which average rounding errors out further.
    """
    mask = float_mask(inputs, bias)
    is_rounded = bias is not None and inputs.q.is_cuda and bias.dtype.itemsize > inputs.q.dtype.itemsize
    if not is_rounded or mask.shape[-1] == 0:
        return mask
    largest = mask.detach().amax(-1, keepdim=True)
    return mask - torch.where(torch.isfinite(largest), largest, 0.0)


def rounding_of_the_mask(inputs: Inputs, exact: Result) -> Result:
    """What the rounding of a float32 mask to q's dtype does to the exact answer.

    A GPU's fused kernels solve the problem with the rounded mask. Their error is their distance from the exact answer
    to that problem, not to the one that they could not be asked: bfloat16 moves a bias of 90 by up to 1/4, beside which
    every error of ours would look small.
    """
    dtype = inputs.q.dtype
    if not inputs.q.is_cuda or dtype.itemsize > 2 or not needs_mask(inputs):
        return {}
    asked = asked_mask(inputs, inputs.bias)
    rounded = mask_in(dtype, asked)
    if torch.equal(asked, rounded.to(asked.dtype)):
        return {}
    case = dataclasses.replace(
        inputs.case, causal=None, window=None, alibi=None, mask=None, intervals=None, blocks=None, bias="bhqk"
    )
    problem = inputs.replace(case=case, bias=rounded, mask=None, intervals=None, block_counts=None, alibi_slopes=None)
    answer = run_reference(problem.to(torch.float64))
    if inputs.bias is None:
        del answer["dbias"]
    else:
        answer["dbias"] = answer["dbias"].sum_to_size(inputs.bias.shape)
    del answer["lse"]  # PyTorch has none
    return {name: answer[name] - exact[name] for name in answer}
