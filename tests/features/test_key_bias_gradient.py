"""The gradient of a bias that is broadcast along queries, as forget gates and learned weights of keys have. On Hopper
the kernels that compute dQ, dK and dV sum it, where queries see all keys or those up to a diagonal."""

import math

import pytest
import torch

from flash_attn_ext import attention
from support.cases import DIFFERENTIABLE, Case, Inputs, make_inputs
from support.checks import check_drawn, check_inputs, check_on_sm_counts
from support.disturbance import assert_repeats
from support.masks import visible
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours, run_reference

RUNS = 100
over_16_bits = over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
over_bfloat16 = over_dtypes((torch.bfloat16,))

LENGTHS = ((300, 257), (640, 577), (513, 1096), (1031, 290))
POSITIONS = (None, "top_left", "bottom_right")
PATTERNS = ("b11k", "bh1k", "1h1k", "111k")
OPTIONS = (dict(), dict(sink=True, dlse=True), dict(bias_float32=True), dict(bias_float32=True, dlse=True))
EDGES = [
    Case(sq=sq, sk=sk, heads=4, kv_heads=kv_heads, d=d, causal=causal, bias=PATTERNS[(n + m + i) % 4], **OPTIONS[m])
    for i, (d, kv_heads) in enumerate(((64, 4), (128, 4), (96, 2), (40, 1)))
    for n, (sq, sk) in enumerate(LENGTHS)
    for j, causal in enumerate(POSITIONS)
    for m in ((n + j) % 4, (n + j + 2) % 4)
]
# Query heads that share key heads, with a bias of each: with all keys, another kernel computes the gradient.
GROUPED = [
    Case(sq=640, sk=700, heads=heads, kv_heads=2, d=d, causal=causal, bias="bh1k", bias_float32=d == 128)
    for heads in (4, 6)
    for d in (64, 128)
    for causal in POSITIONS
]
# Few key tiles, whose query tiles are divided into shares, and many.
SHARES = [
    Case(sq=4096, sk=sk, batch=1, heads=4, d=64, causal=causal, bias="bh1k")
    for sk in (130, 300, 2100)
    for causal in (None, "bottom_right")
]
# More work tiles than CTAs, in phases that have room for more key tiles than there are.
WAVES = [
    Case(sq=sq, sk=sk, batch=40, heads=4, kv_heads=kv_heads, d=d, bias=bias)
    for sq, sk, kv_heads, d, bias in ((300, 300, 4, 64, "bh1k"), (257, 257, 2, 128, "b11k"), (300, 1025, 4, 64, "1h1k"))
]
# Other head dims, windows and lengths.
OTHERS = [
    Case(sq=200, sk=333, heads=2, d=72, dv=64, bias="bh1k", bias_float32=True, causal="bottom_right"),
    Case(sq=333, sk=200, heads=2, d=64, dv=128, bias="bh1k", bias_float32=True, sink=True, causal="bottom_right"),
    Case(sq=200, sk=333, heads=2, d=64, bias="bh1k", bias_float32=True, window=(None, 40)),
    Case(sq=200, sk=333, heads=2, d=64, bias="bh1k", bias_float32=True, window=(40, None)),
    Case(sq=200, sk=333, heads=2, d=128, bias="bh1k", window=(90, 30)),
    Case(sq=64, sk=64, heads=2, d=64, bias="bh1k", bias_float32=True, causal="top_left"),
    Case(sq=200, sk=200, heads=2, d=44, bias="bh1k", bias_float32=True, causal="top_left"),
]
ON_CPU = [*EDGES[::16], OTHERS[1]]


@over_16_bits
@over_cases([*ON_CPU, *for_gpus([case for case in (*EDGES, *GROUPED, *SHARES, *WAVES, *OTHERS) if case not in ON_CPU])])
def test_edges_of_tiles(case, dtype, backend):
    check_drawn(lambda seed: make_inputs(case, dtype, backend.device, seed), backend)


def with_forget_gates(inputs: Inputs, forgets: float) -> Inputs:
    """The bias of key j is the negative sum of the gates' logarithms up to j. forgets: what they are on average."""
    generator = torch.Generator().manual_seed(5)
    gates = forgets * torch.rand(inputs.bias.shape, generator=generator).mul_(2)
    return inputs.replace(bias=gates.cumsum(-1).to(inputs.bias))


WANTED = {"all": DIFFERENTIABLE, "q, k and v": ("q", "k", "v")}


@over_bfloat16
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("forgets", [0.01, 1.0, 60.0])
@over_cases(
    [
        Case(sq=700, sk=700, d=64, causal="top_left", bias="bh1k", bias_float32=True),
        *for_gpus([Case(sq=1500, sk=1500, d=128, causal="top_left", bias="bh1k", bias_float32=True)]),
    ]
)
def test_forget_gates(case, forgets, wanted, dtype, backend):
    """Biases of up to 90,000, beside which a query sees little but the last keys."""

    def draw(seed: int) -> Inputs:
        inputs = make_inputs(case, dtype, backend.device, seed).replace(differentiable=WANTED[wanted])
        return with_forget_gates(inputs, forgets)

    check_drawn(draw, backend)


LOWERED = {
    "every second key": lambda keys: keys % 2 == 0,
    "at the beginning": lambda keys: keys < 70,
    "at the end": lambda keys: keys >= 150,
    "the first tile": lambda keys: keys < 128,
    "all": lambda keys: keys >= 0,
}


@over_bfloat16
@pytest.mark.parametrize("size", [2.0**14, 2.0**18, 1e9, 1e30, 3e38])
@pytest.mark.parametrize("lowered", LOWERED)
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize(("d", "causal"), [(64, "top_left"), *for_gpus([(64, None), (128, "top_left")])])
def test_large_biases(d, causal, lowered, wanted, size, dtype, backend):
    """Beside such a number the digits of a score are lost, so queries that see no other key have no gradient here."""
    case = Case(sq=200, sk=300, d=d, causal=causal, bias="bh1k", bias_float32=True)
    inputs = make_inputs(case, dtype, backend.device)
    low = LOWERED[lowered](torch.arange(300))
    inputs.bias[..., low] -= size
    # A number that dominates q.k leaves equal weights, in float64, too.
    sees_others = (visible(case) & ~low).any(-1) | (size < 2.0**18) | (size > 2.0**100)
    inputs.dout[:, :, ~sees_others] = 0
    result = run_ours(inputs.replace(differentiable=WANTED[wanted]), backend)
    exact = run_reference(inputs.to(torch.float64))
    for name in sorted({"out", "dq", "dk", "dv", "dbias"} & result.keys()):
        rows = sees_others if name == "out" else slice(None)
        found, expected = result[name].double()[:, :, rows], exact[name][:, :, rows]
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2, msg=name)


@over_bfloat16
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(("d", "causal"), [(64, None), *for_gpus([(64, "top_left"), (128, None)])])
def test_nan_in_hidden_keys(d, causal, poison, dtype, backend):
    """Keys of which the bias is -inf, and in a causal call those behind the last query."""
    inputs = make_inputs(Case(sq=500, sk=700, d=d, causal=causal, bias="bh1k"), dtype, backend.device)
    inputs.bias[..., 100:150] = -math.inf
    clean = run_ours(inputs, backend)
    dirty = {name: getattr(inputs, name).clone() for name in ("k", "v")}
    for tensor in dirty.values():
        tensor[:, :, 100:150] = poison
        if causal:
            tensor[:, :, 500:] = poison
    result = run_ours(inputs.replace(**dirty), backend)
    for name, tensor in result.items():
        assert bool(tensor.isfinite().all()), name
        torch.testing.assert_close(tensor.float(), clean[name].float(), rtol=2e-2, atol=2e-2, msg=name)
    assert bool((result["dbias"][..., 100:150] == 0).all())


@over_bfloat16
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
def test_nan_of_one_key_reaches_its_own_gradient(d, dtype, backend):
    inputs = make_inputs(Case(sq=300, sk=300, d=d, heads=3, causal="top_left", bias="bh1k"), dtype, backend.device)
    v = inputs.v.clone()
    v[1, 2, 290] = math.nan
    clean, result = run_ours(inputs, backend)["dbias"], run_ours(inputs.replace(v=v), backend)["dbias"]
    # The queries from 290 on see it, and so every key has a NaN.
    assert bool(result[1, 2].isnan().all())
    result[1, 2] = clean[1, 2] = 0
    torch.testing.assert_close(result.float(), clean.float(), rtol=2e-2, atol=2e-2)


@over_16_bits
@pytest.mark.parametrize(("d", "causal"), [(64, "top_left"), *for_gpus([(64, None), (128, "top_left")])])
def test_views(d, causal, dtype, backend):
    """Rows of a bias that are further apart than they are long, or whose keys are."""
    for is_float32 in (False, True):
        case = Case(sq=300, sk=420, d=d, heads=4, causal=causal, bias="bh1k", bias_float32=is_float32)
        inputs = make_inputs(case, dtype, backend.device)
        wide = inputs.bias.new_full((*inputs.bias.shape[:3], 451), math.nan)
        wide[..., :420] = inputs.bias
        check_inputs(inputs.replace(bias=wide[..., :420]), backend)
        check_inputs(inputs.replace(bias=inputs.bias.repeat_interleave(2, -1)[..., ::2]), backend)


@over_bfloat16
@pytest.mark.parametrize("causal", [None, "top_left"])
@pytest.mark.parametrize(("d", "expanded"), [(64, 1), *for_gpus([(64, 2), (128, 1)])])
def test_an_expanded_bias(d, expanded, causal, dtype, backend):
    """Over heads that share key heads, or over queries. Its gradient has the expanded shape."""
    case = Case(sq=300, sk=420, d=d, heads=4, kv_heads=2, causal=causal, bias="b11k")
    inputs = make_inputs(case, dtype, backend.device)
    shape = list(inputs.bias.shape)
    shape[expanded] = (2, 4, 300, 420)[expanded]
    leaves = inputs.leaves()
    bias = leaves["bias"].detach().expand(shape).requires_grad_()
    out = attention(*(leaves[name] for name in "qkv"), bias=bias, causal=causal, backend=backend.name)
    found = torch.autograd.grad(out, [*(leaves[name] for name in "qkv"), bias], inputs.dout)
    assert found[3].shape == bias.shape
    whole = run_ours(inputs, backend)
    summed = (*found[:3], found[3].float().sum(expanded, keepdim=True))
    for name, gradient in zip(("q", "k", "v", "bias"), summed, strict=True):
        torch.testing.assert_close(gradient.float(), whole[f"d{name}"].float(), rtol=3e-2, atol=6e-2, msg=name)


@over_bfloat16
@pytest.mark.parametrize("largest", ["head", "row"])
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
def test_the_largest_score(d, largest, dtype, backend):
    """Beside a bias in float32 that grows with the length."""
    case = Case(sq=300, sk=300, d=d, causal="top_left", bias="bh1k", bias_float32=True, sink=True)
    inputs = with_forget_gates(make_inputs(case, dtype, backend.device), 20.0)
    options = dict(bias=inputs.bias, sink=inputs.sink, causal="top_left", backend=backend.name)
    out, rows = attention(inputs.q, inputs.k, inputs.v, return_max_logit=largest == "head" or "row", **options)
    plain = attention(inputs.q, inputs.k, inputs.v, **options)
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)
    scores = inputs.q.double() @ inputs.k.double().mT * d**-0.5 + inputs.bias.double()
    exact = scores.masked_fill(scores.new_ones(300, 300).triu(1) > 0, -math.inf).amax(-1)
    exact = exact.amax((0, 2)) if largest == "head" else exact
    torch.testing.assert_close(rows.double(), exact, rtol=1e-6, atol=2e-2)


@over_bfloat16
@pytest.mark.parametrize("wanted", [("bias",), ("q", "bias"), ("k", "v", "bias"), ("v", "bias")], ids="+".join)
@over_cases([EDGES[2], *for_gpus([EDGES[4], EDGES[26]])])
def test_gradients_in_part(case, wanted, dtype, backend):
    inputs = make_inputs(case, dtype, backend.device)
    whole = run_ours(inputs, backend)
    for name, tensor in run_ours(inputs.replace(differentiable=wanted), backend).items():
        torch.testing.assert_close(tensor, whole[name], rtol=2e-2, atol=2e-2, msg=name)


@over_bfloat16
@over_cases(for_gpus([*EDGES[::7], *SHARES[1:3]]))
def test_repeats(case, dtype, backend):
    assert_repeats(make_inputs(case, dtype, backend.device), backend, RUNS)


@over_bfloat16
@over_cases(for_gpus([SHARES[0], SHARES[3], GROUPED[1], WAVES[0]]))
def test_numbers_of_sms(case, dtype, backend, monkeypatch):
    check_on_sm_counts((3, 20), case, dtype, backend, monkeypatch)
