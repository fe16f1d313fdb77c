"""Scale, softcap, ALiBi and sink: what changes a score or joins the softmax."""

import math

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.checks import check_case, check_drawn
from support.masks import offsets, visible
from support.params import over_cases, over_dtypes
from support.runners import run_ours

SCALES = [Case(sq=70, sk=270, scale=scale) for scale in (0.0, -0.3, 1.0, 3.0, 1e-3)]
SOFTCAPS = [Case(sq=140, sk=270, softcap=cap, dlse=dlse) for cap in (0.5, 5.0, 50.0) for dlse in (False, True)]
ALIBI = [
    Case(sq=sq, sk=sk, alibi=alibi, causal=causal, d=16)
    for alibi in ("h", "bh")
    for causal in (None, "top_left", "bottom_right")
    for sq, sk in ((140, 270), (200, 90))
]
SINKS = [Case(sq=140, sk=270, sink=True, d=16, **more) for more in ({}, {"dlse": True}, {"mask": "11qk"})]
SINKS += [Case(sq=270, sk=140, sink=True, causal="bottom_right", dlse=True)]


@over_dtypes()
@over_cases(SCALES + SOFTCAPS + ALIBI + SINKS)
def test_matches_float64(case, dtype, backend):
    check_case(case, dtype, backend)


def test_default_scale_is_of_the_head_dim(backend):
    inputs = make_inputs(Case(sq=40, sk=50, d=40, dv=7), torch.float32, backend.device)
    explicit = inputs.replace(case=Case(sq=40, sk=50, d=40, dv=7, scale=40**-0.5))
    assert torch.equal(run_ours(inputs, backend)["out"], run_ours(explicit, backend)["out"])


@over_dtypes()
def test_allow_tf32_changes_nothing_on_a_cpu(dtype):
    inputs = make_inputs(Case(sq=140, sk=270), dtype)
    single, three = run_ours(inputs, allow_tf32=True), run_ours(inputs)
    assert all(torch.equal(single[name], three[name]) for name in three)


def test_scale_zero_is_a_uniform_average(backend):
    inputs = make_inputs(Case(sq=40, sk=270, scale=0.0), torch.float32, backend.device)
    result = run_ours(inputs, backend)
    torch.testing.assert_close(result["out"], inputs.v.mean(2, keepdim=True).expand_as(result["out"]))
    assert bool((result["dq"] == 0).all()) and bool((result["dk"] == 0).all())


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("length", [270, 1300])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_scores_far_outside_exp_range(scale, length, dtype, backend):
    """The largest score takes all the weight; nothing overflows."""
    inputs = make_inputs(Case(sq=40, sk=length, scale=scale), dtype, backend.device)
    result = run_ours(inputs, backend)
    best = (scale * inputs.q.double() @ inputs.k.double().mT).argmax(-1, keepdim=True)
    # Scores of 1e5 are 0.01 apart in float32, so in 16 bits a weight may be the number next to 1.
    rtol = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(result["out"], inputs.v.gather(2, best.expand_as(result["out"])), rtol=rtol, atol=1e-4)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.values())


def test_softcap_bounds_the_scores(backend):
    """With scores in [-cap, cap] no weight can exceed another by more than exp(2 cap)."""
    q = torch.full((1, 1, 1, 1), 1e4, device=backend.device)
    k = torch.tensor([-1.0, 1.0], device=backend.device).reshape(1, 1, 2, 1)
    v = torch.eye(2, device=backend.device).reshape(1, 1, 2, 2)
    weights = flash_attn_ext.attention(q, k, v, softcap=1.5, scale=1.0, backend=backend.name).flatten()
    torch.testing.assert_close(weights.log()[1] - weights.log()[0], torch.tensor(3.0, device=backend.device))


@over_cases([Case(sq=7, sk=11, alibi="h", causal=causal) for causal in (None, "top_left", "bottom_right")])
def test_alibi_by_hand(case, backend):
    """-slope x distance from the diagonal, added to zero scores; read back through an identity V."""
    slopes = torch.tensor([0.25, 0.5], device=backend.device)
    zeros = [torch.zeros(1, 2, n, 1, device=backend.device) for n in (case.sq, case.sk)]
    identity = torch.eye(case.sk, device=backend.device).expand(1, 2, -1, -1)
    options = dict(alibi_slopes=slopes, causal=case.causal, backend=backend.name)
    weights = flash_attn_ext.attention(zeros[0], zeros[1], identity, **options)
    scores = (-slopes.cpu()[:, None, None] * offsets(case).abs()).masked_fill(~visible(case), -float("inf"))
    torch.testing.assert_close(weights[0].cpu(), scores.softmax(-1))


def test_sink_takes_its_share(backend):
    """Four equal scores of 0 and a sink logit of log 4: the keys share one half."""
    q, k = (torch.zeros(1, 1, n, 2, device=backend.device) for n in (1, 4))
    v = torch.ones(1, 1, 4, 3, device=backend.device)
    sink = torch.tensor([4.0], device=backend.device).log()
    out, lse = flash_attn_ext.attention(q, k, v, sink=sink, return_lse=True, backend=backend.name)
    torch.testing.assert_close(out, torch.full_like(out, 0.5))
    torch.testing.assert_close(lse.exp(), torch.full_like(lse, 8.0))


@over_dtypes()
@pytest.mark.parametrize("sink", [-math.inf, -30.0, 0.0, 6.0, 30.0])
@over_cases([Case(sq=140, sk=270, sink=True, d=16, dlse=True), Case(sq=200, sk=90, sink=True, window=(7, 0))])
def test_sinks_of_every_size(case, sink, dtype, backend):
    def draw(seed: int) -> Inputs:
        inputs = make_inputs(case, dtype, backend.device, seed)
        return inputs.replace(sink=torch.full_like(inputs.sink, sink))

    check_drawn(draw, backend)


def test_sink_of_a_row_without_keys(backend):
    """Only the sink is left: out 0, LSE the sink, and d sink = d lse there."""
    inputs = make_inputs(Case(sq=5, sk=7, mask="11qk", sink=True, dlse=True), torch.float32, backend.device)
    inputs.mask[:] = False
    result = run_ours(inputs, backend)
    assert bool((result["out"] == 0).all())
    torch.testing.assert_close(result["lse"], inputs.sink[:, None].expand_as(result["lse"]))
    torch.testing.assert_close(result["dsink"], inputs.dlse.sum((0, 2)))
    assert bool((result["dq"] == 0).all())
