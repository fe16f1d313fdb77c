"""Work goes to the stream and the device of the call: side streams, and a second GPU that is not the current one."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case, Inputs, make_inputs
from support.packed import PackedCase, cu_seqlens, make_packed
from support.params import computes_in, over_cases, over_dtypes
from support.runners import Result, call_ours, gradients

pytestmark = computes_in(torch.bfloat16)

CASES = [
    Case(sq=140, sk=270, d=64),
    Case(sq=140, sk=270, d=64, bias="1hqk", mask="b11k", alibi="bh", sink=True, dlse=True, causal="bottom_right"),
]
LATER = 50_000_000  # clock cycles; some 25 ms
# One of each kind of first launch, which begins while whatever was last in the stream runs.
FIRST_LAUNCHES = [
    Case(sq=300, sk=300, d=128, causal="top_left"),
    Case(sq=300, sk=300, d=64, heads=8),
    Case(sq=100, sk=100, d=64, heads=8),  # all keys in one tile
    Case(sq=1, sk=5000, d=128, heads=8),  # keys divided among blocks
    Case(sq=300, sk=300, d=128, mask="11qk"),
    Case(sq=300, sk=300, d=64, mask="b11k", padding=True, batch=4),
    Case(sq=100, sk=100, d=64, mask="b11k", padding=True, batch=4),
    Case(sq=300, sk=300, d=96, mask="bhqk", bias="1111"),
    Case(sq=300, sk=300, d=128, bias="1hqk"),
    Case(sq=300, sk=300, d=256, heads=4),
    Case(sq=128, sk=9000, d=64),
]
CALLS = 12


def train(inputs: Inputs, gpu) -> Result:
    leaves = inputs.leaves()
    out, lse = call_ours(inputs, leaves, gpu)
    result = {"out": out, "lse": lse}
    return {name: t.detach() for name, t in (result | gradients(result, inputs, leaves)).items()}


def moved(inputs: Inputs, device: str) -> Inputs:
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    return inputs.replace(**{name: t.to(device) for name, t in tensors.items() if t is not None})


@over_dtypes()
@over_cases(CASES)
def test_side_stream(case, dtype, gpu):
    """The inputs are there only when earlier work of the side stream is done: a kernel on another one would read NaN.

    The backward pass runs on the stream of its forward pass, which PyTorch sees to, with our kernels on it.
    """
    right = make_inputs(case, dtype, "cuda")
    expected = train(right, gpu)
    late = moved(right, "cuda")
    tensors = [name for name in Inputs.TENSORS if getattr(late, name) is not None]
    side = torch.cuda.Stream()
    for name in tensors:
        tensor = getattr(right, name).clone()
        late = late.replace(**{name: tensor.fill_(True if tensor.dtype == torch.bool else float("nan"))})
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATER)
        for name in tensors:
            getattr(late, name).copy_(getattr(right, name))
        result = train(late, gpu)
    torch.cuda.current_stream().wait_stream(side)
    for name in expected:
        assert torch.equal(result[name], expected[name]), name


@over_cases(FIRST_LAUNCHES)
def test_each_call_waits_for_what_comes_before(case, gpu):
    """Launches begin early, and each one reads what the call before wrote, and a kernel of PyTorch's in between."""

    def chain(between) -> list[Result]:
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        results = []
        for _ in range(CALLS):
            results.append(train(inputs, gpu))
            inputs.k.add_(results[-1]["dk"])
            inputs = inputs.replace(q=results[-1]["out"])
            between()
        return results

    expected = chain(torch.cuda.synchronize)
    for ours, right in zip(chain(lambda: None), expected, strict=True):
        for name in right:
            assert torch.equal(ours[name], right[name]), name


def test_packed_on_a_side_stream(gpu):
    """cu_seqlens are read by kernels of the same stream, not by the host before."""
    case = PackedCase((100, 30), (100, 30), Case(d=64, causal="top_left"))
    inputs = make_packed(case, torch.bfloat16, "cuda")
    cu = cu_seqlens(case.lengths_q, "cuda")
    options = dict(max_seqlen_q=100, max_seqlen_k=100, causal="top_left", backend=gpu.name)
    expected = flash_attn_ext.attention_varlen(inputs.q, inputs.k, inputs.v, cu, cu, **options)
    late, side = torch.zeros_like(cu), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATER)
        late.copy_(cu)
        out = flash_attn_ext.attention_varlen(inputs.q, inputs.k, inputs.v, late, late, **options)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, expected)


def test_streams_at_the_same_time(gpu):
    """Calls that overlap share nothing."""
    problems = [make_inputs(Case(sq=500, sk=700, d=64, bias="11qk"), torch.bfloat16, "cuda", seed) for seed in range(4)]
    expected = [train(inputs, gpu) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results: list[Result] = []
    for _ in range(3):
        results.clear()
        for stream, inputs in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                results.append(train(inputs, gpu))
    torch.cuda.synchronize()
    for result, right in zip(results, expected, strict=True):
        for name in right:
            assert torch.equal(result[name], right[name]), name


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
@over_dtypes()
@over_cases(CASES)
def test_second_device(case, dtype, gpu):
    """Tensors on cuda:1 while cuda:0 is the current device, and stays it."""
    first = make_inputs(case, dtype, "cuda:0")
    expected = train(first, gpu)
    second = moved(first, "cuda:1")
    assert torch.cuda.current_device() == 0
    result = train(second, gpu)
    assert torch.cuda.current_device() == 0
    for name in expected:
        assert result[name].device == torch.device("cuda:1"), name
        assert torch.equal(result[name].to("cuda:0"), expected[name]), name


@two_gpus
def test_dropout_on_the_second_device(gpu):
    """Its own generator gives the seed."""
    inputs = make_inputs(Case(sq=140, sk=270, d=64), torch.bfloat16, "cuda:1")
    before = [torch.cuda.get_rng_state(device) for device in (0, 1)]
    flash_attn_ext.attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5, backend=gpu.name)
    assert torch.equal(before[0], torch.cuda.get_rng_state(0))
    assert not torch.equal(before[1], torch.cuda.get_rng_state(1))


@two_gpus
def test_side_stream_of_the_second_device(gpu):
    first = make_inputs(CASES[1], torch.bfloat16, "cuda:0")
    expected, second = train(first, gpu), moved(first, "cuda:1")
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):
        result = train(second, gpu)
    side.synchronize()
    for name in expected:
        assert torch.equal(result[name].to("cuda:0"), expected[name]), name


@two_gpus
@pytest.mark.parametrize("name", ["k", "v", "bias", "mask"])
def test_tensors_on_two_devices_are_an_error(name, gpu):
    inputs = make_inputs(Case(sq=5, sk=7, d=8, bias="11qk", mask="11qk"), torch.bfloat16, "cuda:1")
    inputs = inputs.replace(**{name: getattr(inputs, name).to("cuda:0")})
    with pytest.raises(RuntimeError, match=r"cuda:0") as error:
        call_ours(inputs, {n: getattr(inputs, n) for n in ("q", "k", "v", "bias")}, gpu)
    assert name in str(error.value) and "cuda:1" in str(error.value)
