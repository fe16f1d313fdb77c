"""ALiBi slopes, with their gradient and, as most models have them, without.

On Hopper calls in which queries see later keys take other forward kernels than causal ones, and more statistics in the
backward pass. The gradient of slopes is computed after those of q, k and v.
"""

import math

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.checks import check_inputs, check_packed_drawn
from support.packed import PackedCase, make_packed
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours

CASES = {
    d: [
        Case(sq=sq, sk=sk, d=d, batch=1 + (d == 64), heads=4, kv_heads=kv_heads, alibi=alibi, **more)
        for sq, sk, kv_heads, alibi, more in (
            (257, 257, 4, "h", dict(causal="top_left")),
            (300, 700, 2, "bh", dict(causal="bottom_right", dlse=True)),
            (700, 300, 1, "h", dict(causal="top_left")),
            (700, 620, 2, "h", dict(causal="bottom_right")),
            (520, 520, 1, "bh", dict(window=(100, 0))),
            (300, 420, 4, "h", dict()),
            (700, 620, 2, "bh", dict(dlse=True)),
            (520, 700, 1, "h", dict(window=(None, 90), sink=True)),
            (513, 513, 2, "h", dict()),
            (200, 1153, 4, "h", dict(window=(None, 3))),
            (1153, 200, 4, "h", dict(window=(250, 40), dlse=True)),
            (420, 700, 2, "h", dict(window=(0, None))),
        )
    ]
    for d in (40, 64, 96, 128)
}


# All keys of a sequence in one tile on Hopper, or few tiles of them.
SHORT = [
    Case(sq=sq, sk=sk, d=d, heads=4, kv_heads=kv_heads, batch=3, alibi=alibi, **more)
    for d in (64, 40, 128)
    for sq, sk, kv_heads, alibi, more in (
        (33, 40, 4, "h", dict()),
        (64, 64, 2, "bh", dict(causal="top_left", dlse=True)),
        (300, 77, 4, "h", dict()),
        (128, 128, 1, "h", dict(window=(30, 20))),
        (100, 120, 4, "bh", dict(causal="bottom_right")),
        (150, 150, 2, "h", dict(sink=True, dlse=True)),
        (200, 200, 4, "h", dict()),
        (70, 208, 4, "h", dict(window=(100, 9))),
        (256, 256, 4, "bh", dict(dlse=True)),
        (600, 230, 2, "h", dict()),
        (180, 180, 4, "h", dict(mask="b11k", padding=True)),
    )
]


def without_slopes(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    return make_inputs(case, dtype, device).replace(differentiable=("q", "k", "v"))


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases([*CASES[40], *for_gpus(CASES[64] + CASES[96] + CASES[128])])
def test_gradients_of_matrices(case, dtype, backend):
    check_inputs(without_slopes(case, dtype, backend.device), backend)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases([*SHORT[:3], *for_gpus(SHORT[3:])])
def test_short_sequences(case, dtype, backend):
    check_inputs(without_slopes(case, dtype, backend.device), backend)


MORE = [
    Case(sq=300, sk=420, d=64, heads=4, alibi="h", causal="bottom_right", sink=True, dlse=True),
    Case(sq=300, sk=420, d=128, heads=4, kv_heads=2, alibi="bh", causal="top_left", dropout_p=0.2, dlse=True),
    Case(sq=300, sk=420, d=128, heads=2, alibi="h", bias="1h1k", mask="b1qk"),
    Case(sq=300, sk=420, d=64, heads=2, alibi="h", bias="1h1k", dlse=True),
    Case(sq=300, sk=420, d=64, heads=2, alibi="h", bias="1h11", bias_float32=True, dlse=True),
    Case(sq=300, sk=420, d=192, heads=2, alibi="h", softcap=5.0, window=(70, 9)),
    Case(sq=300, sk=420, d=64, heads=2, alibi="h", intervals="11", num_intervals=2),
    Case(sq=300, sk=420, d=64, heads=2, alibi="h", mask="bhqk"),
    Case(sq=140, sk=130, d=320, heads=2, alibi="h", causal="top_left"),
    Case(sq=300, sk=420, d=128, heads=2, alibi="h", window=(100, 30), scale=0.0, dlse=True),
    Case(sq=300, sk=420, d=64, heads=2, alibi="h", causal="bottom_right", scale=-0.2),
    *(
        Case(sq=sq, sk=sk, d=d, dv=dv, heads=4, kv_heads=2, batch=2, alibi="bh", **more)
        for d, dv in ((256, 192), (96, 128))
        for sq, sk, more in (
            (385, 513, dict(window=(200, 90), dlse=True)),
            (513, 385, dict(causal="bottom_right", sink=True)),
            (640, 257, {}),
        )
    ),
]


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases([*CASES[40], *for_gpus(CASES[64] + CASES[128] + MORE)])
def test_gradient_of_slopes(case, dtype, backend):
    check_inputs(make_inputs(case, dtype, backend.device), backend)


@over_dtypes((torch.bfloat16,))
@over_cases([*CASES[40][:2], *for_gpus(CASES[64][:2] + CASES[128][:2])])
def test_gradient_of_slopes_where_out_is_far_from_zero(case, dtype, backend):
    """Rounding out moves delta by as much as dS is large, for all keys of a query."""
    inputs = make_inputs(case, dtype, backend.device)
    check_inputs(inputs.replace(v=inputs.v + 16.0), backend)


PACKED = [
    PackedCase(
        (300, 0, 77, 520), (300, 40, 90, 520), Case(d=d, heads=4, kv_heads=2, alibi="h", causal=causal, dlse=True)
    )
    for d, causal in ((64, "bottom_right"), (128, None))
]


@over_dtypes((torch.bfloat16,))
@over_cases([PACKED[0], *for_gpus(PACKED[1:])])
def test_gradient_of_slopes_of_packed_sequences(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("d", [40, *for_gpus([128])])
def test_rows_without_keys_add_nothing(d, dtype, backend):
    """The first queries see no key, and the gradient of their LSE is not finite."""
    case = Case(sq=400, sk=300, d=d, heads=2, alibi="h", causal="bottom_right", dlse=True)
    inputs = make_inputs(case, dtype, backend.device)
    clean = run_ours(inputs, backend)["dalibi_slopes"]
    dlse = inputs.dlse.clone()
    dlse[:, :, : case.sq - case.sk] = math.inf
    assert torch.equal(run_ours(inputs.replace(dlse=dlse), backend)["dalibi_slopes"], clean)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("d", [64, *for_gpus([128])])
def test_vanished_weights_add_nothing_to_the_gradient_of_slopes(d, dtype, backend):
    """All weights of far keys underflow, so that an infinite v of theirs reaches no slope."""
    case = Case(sq=300, sk=1300, d=d, heads=2, batch=1, alibi="h", causal="bottom_right")
    inputs = make_inputs(case, dtype, backend.device)
    inputs = inputs.replace(alibi_slopes=torch.full_like(inputs.alibi_slopes, 3.0))
    infinite = inputs.v.clone()
    infinite[:, :, :500] = math.inf
    found = run_ours(inputs.replace(v=infinite), backend)["dalibi_slopes"]
    torch.testing.assert_close(found, run_ours(inputs, backend)["dalibi_slopes"], rtol=1e-3, atol=1e-3)


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@pytest.mark.parametrize("causal", ["top_left", None])
@pytest.mark.parametrize("slope", [0.0, 1e-4, 3.0, -0.01], ids=str)
def test_slopes_of_any_size(slope, causal, dtype, backend):
    """Far keys of a steep slope have no weight, and with a negative slope they have the most."""
    case = Case(sq=1300, sk=1300, d=64, heads=2, batch=1, alibi="h", causal=causal)
    inputs = without_slopes(case, dtype, backend.device)
    check_inputs(inputs.replace(alibi_slopes=torch.full_like(inputs.alibi_slopes, slope)), backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("causal", ["bottom_right", None])
@pytest.mark.parametrize("d", [64, 128])
def test_packed_sequences(d, causal, dtype, backend):
    lengths = (300, 0, 77, 520)
    alone = [
        without_slopes(
            Case(sq=n, sk=n, d=d, heads=4, kv_heads=2, batch=1, alibi="h", causal=causal), dtype, backend.device
        )
        for n in lengths
    ]
    slopes = alone[0].alibi_slopes
    q, k, v, dout = (
        torch.cat([getattr(inputs, name)[0].transpose(0, 1) for inputs in alone]) for name in ("q", "k", "v", "dout")
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ends = torch.tensor((0, *lengths), device=backend.device).cumsum(0).int()
    options = dict(max_seqlen_q=520, max_seqlen_k=520, causal=causal, backend=backend.name)
    out = flash_attn_ext.attention_varlen(*leaves, ends, ends, alibi_slopes=slopes, **options)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    results = [run_ours(inputs.replace(alibi_slopes=slopes), backend) for inputs in alone]
    for tensor, name in zip(found, ("out", "dq", "dk", "dv"), strict=True):
        expected = torch.cat([result[name][0].transpose(0, 1) for result in results])
        torch.testing.assert_close(tensor.float(), expected.float(), rtol=2e-2, atol=2e-2)
