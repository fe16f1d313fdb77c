"""Sequences of up to 256 tokens with a bias of all queries and keys, and a mask of keys, such as the rows of an
Evoformer; and the gradient of a bias that all batch entries share.

On Hopper one CTA computes a head, and CTAs share the batch entries of a tile of the bias's gradient. Lengths lie at
edges of 16, 32, 64 and 128 tokens, and batches are no multiples of the number of CTAs of a tile.
"""

import math

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import check_case, check_drawn, check_inputs
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours

SIZES = ((65, 136), (96, 160), (97, 192), (128, 256), (129, 200), (200, 136), (224, 248), (256, 256))
HEAD_DIMS = ((32, 32), (8, 8), (24, 16), (16, 32), (32, 8))
MASKS = (None, "b11k", "111k", "bh1k", "b111")


def sized(count: int, **features) -> Case:
    (sq, sk), (d, dv) = SIZES[count % len(SIZES)], HEAD_DIMS[count % len(HEAD_DIMS)]
    return Case(sq=sq, sk=sk, d=d, dv=dv, **({"batch": 3} | features))


SHORT = [
    *(sized(i, bias="1hqk", mask=MASKS[i % len(MASKS)]) for i in range(len(SIZES))),
    *(sized(i + 3, bias="1hqk", mask=mask, padding=True) for i, mask in enumerate(("b11k", "bh1k"))),
    *(sized(i + 1, bias=bias, mask="b11k") for i, bias in enumerate(("11qk", "bhqk", "b1qk"))),
    *(Case(sq=256, sk=256, d=d, dv=dv, bias="1hqk", mask="b11k") for d, dv in HEAD_DIMS),
    Case(sq=250, sk=256, bias="1hqk", mask="b11k", mask_keep=0.03, batch=5),
    Case(sq=256, sk=256, bias="1hqk", batch=1),
    Case(sq=144, sk=136, bias="1hqk", mask="b11k", batch=37),
    Case(sq=136, sk=144, bias="11qk", mask="b11k", batch=7, heads=5, dlse=True),
    Case(sq=256, sk=248, bias="1hqk", mask="b11k", sink=True, dlse=True),
    Case(sq=200, sk=256, bias="11qk", batch=5, heads=4, kv_heads=2, sink=True),
    Case(sq=200, sk=256, bias="1hqk", mask="b11k", layout="bshd", scale=0.7),
    Case(sq=200, sk=256, bias="1hqk", mask="b11k", heads=4, kv_heads=2),
    Case(sq=200, sk=256, bias="1hqk", mask="b1qk"),  # these take kernels of any mask, and of any lengths
    Case(sq=200, sk=201, bias="1hqk", mask="b11k"),
    Case(sq=200, sk=256, bias="1hqk", causal="bottom_right"),
]
# The gradient of a shared bias beside kernels of longer sequences.
LONGER = [
    Case(sq=300, sk=264, d=64, bias="1hqk", batch=5),
    Case(sq=129, sk=264, d=40, dv=64, bias="11qk", batch=3, heads=3),
    Case(sq=384, sk=384, d=64, bias="1hqk", causal="top_left", batch=3, dlse=True),
    Case(sq=290, sk=400, d=32, bias="1hqk", causal="bottom_right", batch=2),
    Case(sq=400, sk=272, d=64, bias="11qk", window=(100, 30), heads=4, kv_heads=2),
    Case(sq=272, sk=272, d=64, bias="1hqk", batch=1, sink=True),  # sums of dSink overwrite delta, which dBias reads
    Case(sq=600, sk=264, d=64, bias="1hqk", batch=3, sink=True, dlse=True, heads=4, kv_heads=2),
    Case(sq=300, sk=300, d=32, bias="11qk", batch=2, heads=3, sink=True, causal="top_left"),
]
ROWS = Case(sq=256, sk=256, batch=40, heads=2, bias="1hqk", mask="b11k")


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(SHORT + LONGER)
def test_biases_and_masks(case, dtype, backend):
    check_case(case, dtype, backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("case", [SHORT[0], ROWS, LONGER[0]], ids=str)
@pytest.mark.parametrize("wanted", [("bias",), ("q",), ("k", "bias"), ("q", "v"), ("q", "k", "v")], ids="".join)
def test_wanted_gradients(case, wanted, dtype, backend):
    inputs = make_inputs(case, dtype, backend.device)
    everything = run_ours(inputs, backend)
    some = run_ours(inputs.replace(differentiable=wanted), backend)
    for name in wanted:
        torch.testing.assert_close(some[f"d{name}"], everything[f"d{name}"], rtol=2e-2, atol=2e-2)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("hides", ["mask", "bias"])
def test_hidden_keys_reach_nothing(hides, poison, dtype, backend):
    """What a mask hides in one batch entry, or a bias of -inf in all of them. Rows that met NaN are computed again."""
    inputs = make_inputs(Case(sq=200, sk=256, batch=5, bias="1hqk", mask="b11k"), dtype, backend.device)
    inputs.mask[..., 0] = True
    if hides == "mask":
        inputs.mask[3, ..., 40:77] = False
    else:
        inputs.bias[..., 40:77] = -math.inf
    clean = run_ours(inputs, backend)
    for tensor in (inputs.k, inputs.v):
        (tensor[3] if hides == "mask" else tensor)[..., 40:77, :] = poison
    met = run_ours(inputs, backend)
    for name, value in met.items():
        assert bool(value.isfinite().all()), name
        torch.testing.assert_close(value.float(), clean[name].float(), rtol=2e-2, atol=2e-2)
    if hides == "mask":
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(met[name][[0, 1, 2, 4]], clean[name][[0, 1, 2, 4]]), name
    else:
        assert bool((met["dbias"][..., 40:77] == 0).all())
    hidden = (slice(3, 4) if hides == "mask" else slice(None), slice(None), slice(40, 77))
    assert bool((met["dk"][hidden] == 0).all()) and bool((met["dv"][hidden] == 0).all())


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("value", ["-inf", "finfo.min", "-1e4"])
def test_low_and_empty_rows(value, dtype, backend):
    """-inf rows are empty; of others the LSE does not hold the weights, or is far from 0."""

    def draw(seed: int) -> Inputs:
        inputs = make_inputs(Case(sq=200, sk=256, bias="1hqk", mask="b11k", dlse=True), dtype, backend.device, seed)
        inputs.bias[:, :, [0, 17, 63, 64, 150]] = torch.finfo(dtype).min if value == "finfo.min" else float(value)
        inputs.bias[:, :, 70:140, 7:200] = -math.inf
        inputs.mask[1] = False
        return inputs

    check_drawn(draw, backend)
    result = run_ours(draw(0), backend)
    assert bool((result["out"][1] == 0).all()) and bool((result["dq"][1] == 0).all())
    assert bool((result["lse"][1] == -math.inf).all())


@over_dtypes((torch.bfloat16,))
def test_a_sequence_does_not_depend_on_the_others(dtype, backend):
    """Bit by bit, but for the bias of all: its gradient is a sum over them."""
    inputs = make_inputs(ROWS, dtype, backend.device)
    together = run_ours(inputs, backend)
    some = slice(17, 23)
    parts = {name: getattr(inputs, name)[some] for name in ("q", "k", "v", "dout", "mask")}
    alone = run_ours(inputs.replace(**parts), backend)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(alone[name], together[name][some]), name


@over_dtypes((torch.bfloat16,))
@over_cases([ROWS, LONGER[0], LONGER[1]])
def test_results_are_reproducible(case, dtype, backend):
    inputs = make_inputs(case, dtype, backend.device)
    first, *others = (run_ours(inputs, backend) for _ in range(5))
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


@over_dtypes((torch.bfloat16,))
def test_a_batch_that_is_shared_among_many(dtype, backend):
    check_inputs(make_inputs(ROWS, dtype, backend.device), backend)
