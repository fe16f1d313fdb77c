"""How large the terms are that an output is the sum of, where signs could make it cancel."""

import torch

from flash_attn_ext.reference import attention_reference
from support.cases import Inputs
from support.masks import offsets
from support.packed import PackedCase, sequences
from support.runners import Result


def largest_terms(inputs: Inputs, exact: Result, keep: torch.Tensor | None = None) -> dict[str, float]:
    """The largest sum of absolute terms of any element, for each gradient. `inputs` and `exact` are float64."""
    case = inputs.case
    group = case.heads // case.num_kv_heads if case.num_kv_heads else 1
    k, v = (t.repeat_interleave(group, dim=1) for t in (inputs.k, inputs.v))
    weights = _weights(inputs)
    kept = weights if keep is None else weights * keep / (1 - case.dropout_p)
    dweights = (inputs.dout @ v.mT).abs() * (kept / weights).nan_to_num()
    delta = (inputs.dout * exact["out"]).abs().sum(-1)
    if inputs.dlse is not None:
        delta = delta + inputs.dlse.abs()
    dscores = weights * (dweights + delta.unsqueeze(-1))
    scale = abs(case.d**-0.5 if case.scale is None else case.scale)
    terms = {
        "dq": scale * dscores @ k.abs(),
        "dk": scale * (dscores.mT @ inputs.q.abs()).unflatten(1, (case.num_kv_heads, group)).sum(2),
    }
    if inputs.bias is not None:
        terms["dbias"] = dscores.sum_to_size(inputs.bias.shape)
    if inputs.alibi_slopes is not None:
        by_slope = (dscores * offsets(case, dscores.device).abs()).sum((2, 3))
        terms["dalibi_slopes"] = by_slope if case.alibi == "bh" else by_slope.sum(0)
    return {name: float(term.max()) if term.numel() else 0.0 for name, term in terms.items()}


def largest_terms_packed(
    case: PackedCase, inputs: Inputs, exact: Result, keep: torch.Tensor | None = None
) -> dict[str, float]:
    """The same for a packed batch: of any of its sequences, and of all for what they share."""
    shared = {"dbias": case.base.bias is not None and case.base.bias[0] == "1", "dalibi_slopes": case.base.alibi == "h"}
    largest: dict[str, float] = {}
    for index, (alone, queries, _) in enumerate(sequences(case, inputs)):
        if alone.case.sq == 0 or alone.case.sk == 0:
            continue
        bits = None if keep is None else keep[index : index + 1, :, : alone.case.sq, : alone.case.sk]
        out = exact["out"][queries].transpose(0, 1).unsqueeze(0)
        for name, term in largest_terms(alone, {"out": out}, bits).items():
            so_far = largest.get(name, 0.0)
            largest[name] = so_far + term if shared.get(name) else max(so_far, term)
    return largest


def _weights(inputs: Inputs) -> torch.Tensor:
    """The softmax weights before dropout, as the gradient of the LSE with respect to a bias. As the output for an
    identity V they would take (keys, keys) numbers for each head."""
    case = inputs.case
    shape = (case.batch, case.heads, case.sq, case.sk)
    bias = torch.zeros(shape, dtype=torch.float64, device=inputs.q.device, requires_grad=True)
    scores = {name: getattr(inputs, name) for name in ("mask", "intervals", "block_lists", "alibi_slopes", "sink")}
    scores["bias"] = bias if inputs.bias is None else bias + inputs.bias
    _, lse = attention_reference(inputs.q, inputs.k, inputs.v, **case.options(), **scores)
    return torch.autograd.grad(lse, bias, torch.ones_like(lse))[0]
