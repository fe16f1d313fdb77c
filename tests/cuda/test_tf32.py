"""allow_tf32: without it float32 is as exact as PyTorch's, whatever PyTorch's switches say; with it, as TF32 is."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.checks import check_case
from support.errors import assert_rule, compare, errors_of
from support.params import over_cases
from support.runners import Result, dropout_bits, run_ours, run_reference

CASES = [
    Case(sq=256, sk=512, d=64),
    Case(sq=256, sk=512, d=128, causal="bottom_right"),
    Case(sq=200, sk=300, d=40, dv=72, heads=4, kv_heads=2, bias="1hqk", mask="b11k", dlse=True),
    Case(sq=200, sk=300, d=256, alibi="h", sink=True, softcap=9.0, dropout_p=0.1),
    Case(sq=1000, sk=64, d=16),
]

# Of a TF32 error: a kernel may cut off what the yardstick rounds, which is twice the error, in two products.
TF32_RATIO = 4.0


@contextlib.contextmanager
def switch_of_pytorch():
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@over_cases(CASES)
def test_off_keeps_the_float32_rule(case, gpu):
    check_case(case, torch.float32, gpu)


@over_cases(CASES)
def test_the_switch_of_pytorch_changes_nothing(case, gpu):
    inputs = make_inputs(case, torch.float32, "cuda")
    before = run_ours(inputs, gpu)
    with switch_of_pytorch():
        under = run_ours(inputs, gpu)
    for name in before:
        assert torch.equal(before[name], under[name]), name


def test_the_sdpa_entry_keeps_its_accuracy_under_the_switch(gpu):
    inputs = make_inputs(CASES[0], torch.float32, "cuda")
    tensors = (inputs.q, inputs.k, inputs.v)
    exact = F.scaled_dot_product_attention(*(t.double() for t in tensors))
    with switch_of_pytorch():
        ours = flash_attn_ext.scaled_dot_product_attention(*tensors)
        theirs = F.scaled_dot_product_attention(*tensors)
    assert_rule({"out": compare(ours, theirs, exact)})


def plain_in_tf32(inputs: Inputs, keep: torch.Tensor | None) -> Result:
    """The plain formula on operands that were rounded to TF32's 11 bits: what a TF32 product starts from.

    cuBLAS may or may not take TF32 for a product, by its sizes; rounding the inputs ourselves always does.
    """

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        step = 1 << 13
        return ((tensor.view(torch.int32) + step // 2) & ~(step - 1)).view(torch.float32)

    names = ("q", "k", "v", "dout")
    with switch_of_pytorch():
        return run_reference(inputs.replace(**{name: rounded(getattr(inputs, name)) for name in names}), keep)


@over_cases(CASES)
def test_on_stays_within_tf32(case, gpu):
    """As the plain formula on rounded operands; but weights are operands too, and bits may be cut off, not rounded."""
    inputs = make_inputs(case, torch.float32, "cuda")
    keep = dropout_bits(inputs, gpu) if case.dropout_p > 0 else None
    exact, plain = run_reference(inputs.to(torch.float64), keep), plain_in_tf32(inputs, keep)
    ours = run_ours(inputs, gpu, allow_tf32=True)
    for name in ours:
        c = compare(ours[name], plain[name], exact[name])
        assert c.ours.largest <= TF32_RATIO * c.theirs.largest + c.slack, name
        assert c.ours.mean <= TF32_RATIO * c.theirs.mean + c.slack, name


def test_each_call_has_its_own(gpu):
    """With it and without again: what comes after is exact again."""
    inputs = make_inputs(CASES[0], torch.float32, "cuda")
    before = run_ours(inputs, gpu)
    between = run_ours(inputs, gpu, allow_tf32=True)
    after = run_ours(inputs, gpu)
    exact = run_reference(inputs.to(torch.float64))
    for name in before:
        assert torch.equal(before[name], after[name]), name
        assert errors_of(before[name], exact[name]).mean <= 1.1 * errors_of(between[name], exact[name]).mean, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_do_not_look(dtype, gpu):
    inputs = make_inputs(CASES[2], dtype, "cuda")
    off = run_ours(inputs, gpu)
    on = run_ours(inputs, gpu, allow_tf32=True)
    for name in off:
        assert torch.equal(off[name], on[name]), name
