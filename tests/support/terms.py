"""How large the terms are that an output is the sum of, where signs could make it cancel."""

import torch

from flash_attn_ext.reference import attention_reference
from support.cases import Inputs
from support.masks import offsets
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
        by_slope = (dscores * offsets(case).abs().to(dscores.device)).sum((2, 3))
        terms["dalibi_slopes"] = by_slope if case.alibi == "bh" else by_slope.sum(0)
    return {name: float(term.max()) if term.numel() else 0.0 for name, term in terms.items()}


def _weights(inputs: Inputs) -> torch.Tensor:
    """The softmax weights before dropout, as the output for an identity V."""
    case = inputs.case
    heads = case.num_kv_heads
    identity = torch.eye(case.sk, dtype=torch.float64, device=inputs.q.device).expand(case.batch, heads, -1, -1)
    scores = {name: getattr(inputs, name) for name in ("bias", "mask", "alibi_slopes", "sink")}
    return attention_reference(inputs.q, inputs.k, identity, **case.options(), **scores, return_lse=False)
