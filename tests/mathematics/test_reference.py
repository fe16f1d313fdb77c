"""reference.py is what everything else is compared with, so it is compared with two other readings of the formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from flash_attn_ext.reference import (
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
)
from support.cases import ALL_PATTERNS, Case, Inputs, make_inputs
from support.masks import diagonal, visible
from support.packed import PackedCase, cu_seqlens, make_packed, run_by_sequence
from support.params import over_cases
from support.runners import run_reference
from support.yardstick import run_sdpa

SMALL = dict(sq=4, sk=6, d=3, dv=2, heads=4, kv_heads=2)


def element(tensor: torch.Tensor, *index: int) -> float:
    """An element of a tensor that broadcasts to the index's shape."""
    offset = len(index) - tensor.dim()
    return float(tensor[tuple(min(i, n - 1) for i, n in zip(index[offset:], tensor.shape, strict=True))])


def one_row(inputs: Inputs, b: int, h: int, i: int) -> tuple[list[float], float]:
    """One query's output and LSE, scalar by scalar."""
    case = inputs.case
    group = h // (case.heads // case.num_kv_heads)
    scale = 1 / math.sqrt(case.d) if case.scale is None else case.scale
    scores = {}
    for j in range(case.sk):
        if not visible(case)[i, j] or (inputs.mask is not None and not element(inputs.mask, b, h, i, j)):
            continue
        score = scale * sum(float(x * y) for x, y in zip(inputs.q[b, h, i], inputs.k[b, group, j], strict=True))
        if case.softcap is not None:
            score = case.softcap * math.tanh(score / case.softcap)
        if inputs.alibi_slopes is not None:
            slope = element(inputs.alibi_slopes, b, h) if case.alibi == "bh" else element(inputs.alibi_slopes, h)
            score -= slope * abs(j - (i + diagonal(case)))
        if inputs.bias is not None:
            score += element(inputs.bias, b, h, i, j)
        scores[j] = score
    total = sum(math.exp(score) for score in scores.values())
    if inputs.sink is not None:
        total += math.exp(float(inputs.sink[h]))
    out = [
        sum(math.exp(s) * float(inputs.v[b, group, j, c]) for j, s in scores.items()) for c in range(case.head_dim_v)
    ]
    return [x / total if total else 0.0 for x in out], math.log(total) if total else -math.inf


@over_cases(
    [
        Case(**SMALL),
        Case(**SMALL, causal="top_left"),
        Case(**SMALL, causal="bottom_right"),
        Case(**(SMALL | dict(sq=6, sk=4)), causal="bottom_right"),
        Case(**SMALL, window=(1, 2)),
        Case(**SMALL, window=(None, 0), causal="top_left"),
        Case(**SMALL, mask="bhqk", mask_keep=0.3),
        Case(**SMALL, mask="bhqk", mask_keep=0.3, sink=True),
        Case(**SMALL, softcap=0.7, scale=-1.3),
        Case(**SMALL, alibi="bh", causal="top_left"),
        Case(**SMALL, alibi="h", window=(3, 3)),
        Case(**SMALL, bias="1h1k", alibi="bh", softcap=2.0, sink=True, mask="b1qk", causal="bottom_right"),
    ]
)
def test_scalar_by_scalar(case):
    inputs = make_inputs(case, torch.float64)
    out, lse = attention_reference(
        inputs.q, inputs.k, inputs.v, **case.options(), **options_of(inputs), return_lse=True
    )
    for b in range(case.batch):
        for h in range(case.heads):
            for i in range(case.sq):
                row, row_lse = one_row(inputs, b, h, i)
                torch.testing.assert_close(out[b, h, i], torch.tensor(row, dtype=torch.float64))
                torch.testing.assert_close(float(lse[b, h, i]), row_lse)


def options_of(inputs: Inputs) -> dict:
    return {name: getattr(inputs, name) for name in ("bias", "mask", "alibi_slopes", "sink")}


@over_cases(
    [
        Case(sq=20, sk=30, d=8, dv=5, bias=pattern, mask=mask, alibi=alibi, causal=causal, window=window)
        for pattern, mask, alibi, causal, window in zip(
            (None, *ALL_PATTERNS),
            (None, *reversed(ALL_PATTERNS)),
            (None, "h", "bh") * 6,
            (None, "top_left", "bottom_right") * 6,
            (None, (5, 3), None, (None, 9), (11, None)) * 4,
            strict=False,
        )
    ]
)
def test_equals_pytorch_in_float64(case):
    """Forward and the gradients that PyTorch has, rows without keys included."""
    inputs = make_inputs(case, torch.float64)
    ours, theirs = run_reference(inputs), run_sdpa(inputs)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_dropout_and_layout(layout):
    """Kept weights are divided by 1 - p; dropped ones are gone; the LSE is that of no dropout."""
    inputs = make_inputs(Case(sq=4, sk=6, d=3), torch.float64)
    keep = torch.rand(2, 2, 4, 6) < 0.5
    views = [t.transpose(1, 2) if layout == "bshd" else t for t in (inputs.q, inputs.k, inputs.v)]
    options = dict(layout=layout, return_lse=True)
    out, lse = attention_reference(*views, dropout_p=0.25, dropout_mask=keep, **options)
    weights = (inputs.q @ inputs.k.mT / math.sqrt(3)).softmax(-1)
    expected = (weights * keep / 0.75) @ inputs.v
    torch.testing.assert_close(out.transpose(1, 2) if layout == "bshd" else out, expected)
    assert torch.equal(lse, attention_reference(*views, **options)[1])


def test_packed_reference_is_the_dense_one_sequence_by_sequence():
    base = Case(d=8, bias="b1qk", mask="1h1k", alibi="bh", sink=True, causal="bottom_right", softcap=3.0)
    case = PackedCase((5, 0, 9), (7, 4, 3), base)
    inputs = make_packed(case, torch.float64, "cpu")
    offsets_of = [cu_seqlens(lengths, "cpu") for lengths in (case.lengths_q, case.lengths_k)]
    tensors = (inputs.q, inputs.k, inputs.v)
    out, lse = attention_varlen_reference(*tensors, *offsets_of, **base.options(), **options_of(inputs))
    expected = run_by_sequence(case, inputs)
    torch.testing.assert_close(out, expected["out"])
    torch.testing.assert_close(lse, expected["lse"])


def test_defaults_are_sdpas():
    inputs = make_inputs(Case(), torch.float64)
    tensors = (inputs.q, inputs.k, inputs.v)
    out = attention_reference(*tensors, return_lse=False)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*tensors))


@pytest.mark.parametrize("half", ["k_new", "v_new", "rotary_cos", "rotary_sin"])
def test_half_of_a_pair_is_refused(half):
    q = torch.randn(1, 2, 1, 8)
    with pytest.raises(ValueError, match="both or neither"):
        attention_with_kvcache_reference(q, q, q, cache_seqlens=0, **{half: q})
