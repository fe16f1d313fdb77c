"""attention_with_kvcache as an operator, which writes two of its arguments: torch.library, compilers, fake tensors."""

import dataclasses
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn_ext
from flash_attn_ext._call.problem import KvCache
from support.binding import problem
from support.caches import CacheCase, bits, call_with_cache, make_cache_inputs, run_with_cache
from support.cases import Case
from support.params import over_cases

CASES = [
    CacheCase((5, 0), capacity=32, base=Case(sq=1, d=8, causal="bottom_right")),
    CacheCase((5, 17), new=3, capacity=32, page_size=16, base=Case(sq=3, d=8, dv=16, heads=4, kv_heads=2)),
    CacheCase((5, 9), new=2, indexed=True, capacity=32, rotary_dim=8, base=Case(sq=2, d=8, causal="bottom_right")),
    CacheCase((5, 9), new=2, capacity=32, base=Case(sq=2, d=8, intervals="b1", num_intervals=2)),
    CacheCase((5, 9), new=1, capacity=32, base=Case(sq=1, d=8, bias="b1qk", mask="1h1k", alibi="bh", sink=True)),
]
OPERATOR = torch.ops.flash_attn_ext.attention_with_kvcache.default


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def arguments(case: CacheCase, backend, sequence_first: bool = False) -> tuple:
    inputs = make_cache_inputs(case, torch.float32, backend.device)
    inputs.k_cache.nan_to_num_(0.0)  # opcheck compares what is written by value
    inputs.v_cache.nan_to_num_(0.0)
    tensors = dict(inputs.tensors)
    scores = {name: tensors.pop(name) for name in ("bias", "mask", "intervals", "alibi_slopes", "sink")}
    q, k, v = inputs.q, inputs.k_cache, inputs.v_cache
    if sequence_first:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    call = problem(q, k, v, **scores, causal=case.base.causal, backend=backend.name, sequence_first=sequence_first)
    return *call, *KvCache(**tensors, rotary_interleaved=case.interleaved)


@pytest.mark.parametrize("sequence_first", [False, True])
@over_cases(CASES)
def test_opcheck(case, sequence_first, backend):
    torch.library.opcheck(OPERATOR, arguments(case, backend, sequence_first))


def test_the_schema_says_what_is_written():
    written = [argument.name for argument in OPERATOR._schema.arguments if argument.alias_info is not None]
    assert written == ["k", "v"]
    assert all(argument.alias_info.is_write for argument in OPERATOR._schema.arguments if argument.name in written)


@over_cases(CASES)
def test_operator_equals_binding(case, backend):
    inputs = make_cache_inputs(case, torch.float32, backend.device)
    expected = run_with_cache(inputs, backend)
    tensors = dict(inputs.tensors)
    scores = {name: tensors.pop(name) for name in ("bias", "mask", "intervals", "alibi_slopes", "sink")}
    call = problem(
        inputs.q, inputs.k_cache, inputs.v_cache, **scores, scale=None, causal=case.base.causal, backend=backend.name
    )
    out, lse, _ = OPERATOR(*call, *KvCache(**tensors, rotary_interleaved=case.interleaved))
    for name, tensor in dict(out=out, lse=lse, k_cache=inputs.k_cache, v_cache=inputs.v_cache).items():
        assert torch.equal(bits(tensor), bits(expected[name])), name


class DecodeStep(torch.nn.Module):
    """A layer that appends one token for each sequence, between other operators."""

    def __init__(self, backend, layout: str):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.projection = torch.nn.Parameter(torch.randn(64, (4 + 2 + 2) * 16, generator=generator) / 8)
        self.backend, self.layout = backend, layout

    def forward(self, x, k_cache, v_cache, lengths):
        q, k, v = (x @ self.projection).unflatten(-1, (8, 16)).split((4, 2, 2), dim=-2)
        if self.layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = flash_attn_ext.attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            k_new=k,
            v_new=v,
            cache_seqlens=lengths,
            layout=self.layout,
            backend=self.backend.name,
        )
        if self.layout == "bhsd":
            out = out.transpose(1, 2)
        lengths += 1
        return x + out.flatten(-2)


def generate(step, model: DecodeStep, device: str, num_steps: int = 4):
    shape = (3, 2, 32, 16) if model.layout == "bhsd" else (3, 32, 2, 16)
    caches = [torch.zeros(shape, device=device) for _ in range(2)]
    lengths = torch.tensor([0, 3, 17], dtype=torch.int32, device=device)
    x = torch.linspace(-1, 1, 3 * 64, device=device).reshape(3, 1, 64)
    for _ in range(num_steps):
        x = step(x, *caches, lengths)
    return x, *caches, lengths


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_full_graph_of_a_decode_step(compiler, layout, backend):
    """One graph for all steps, and the caches that were passed in are the ones that grow. Inductor copies none."""
    model = DecodeStep(backend, layout).to(backend.device)
    counter = CompileCounterWithBackend(compiler)
    step = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        ours, code = torch._inductor.utils.run_and_get_code(generate, step, model, backend.device)
        expected = generate(model, model, backend.device)
    for tensor, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(tensor, other)
    assert counter.frame_count == 1
    if compiler == "inductor":
        assert_no_cache_is_copied(code)


def assert_no_cache_is_copied(code: list[str]) -> None:
    """Caches that are arguments of the graph are written where they are."""
    assert "attention_with_kvcache" in code[0]
    copies = re.findall(r"empty_strided_\w+\(\(3, (?:2, 32|32, 2), 16\)", code[0])
    assert not copies, code[0]


def test_compiling_a_gradient_is_refused(backend):
    model = DecodeStep(backend, "bhsd").to(backend.device)
    with pytest.raises(Exception, match="requires grad, but attention_with_kvcache has no backward pass"):
        generate(torch.compile(model, fullgraph=True, backend="aot_eager"), model, backend.device)


def test_fake_tensors(backend):
    case = CASES[1]
    expected = run_with_cache(make_cache_inputs(case, torch.float32, backend.device), backend)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        real = make_cache_inputs(case, torch.float32, "cpu")
        fake = dataclasses.replace(
            real,
            q=mode.from_tensor(real.q),
            k_cache=mode.from_tensor(real.k_cache),
            v_cache=mode.from_tensor(real.v_cache),
            tensors={n: t if t is None else mode.from_tensor(t) for n, t in real.tensors.items()},
        )
        out, lse = call_with_cache(fake, backend)
    assert (out.shape, lse.shape) == (expected["out"].shape, expected["lse"].shape)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
