"""One named range for each pass in profiles, with the backend and the kernels that explain() names."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import flash_attn_ext
from flash_attn_ext._explanation import Plan
from support.caches import CacheCase, call_with_cache, make_cache_inputs
from support.cases import Case, make_inputs
from support.packed import cu_seqlens
from support.params import computes_in

pytestmark = computes_in(torch.bfloat16)
PREFIX = "flash_attn_ext "


def ranges(function) -> list:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        function()
    return [event for event in profiler.events() if event.name.startswith(PREFIX)]


def named(pass_name: str, backend, plan: Plan) -> str:
    """Without delta, dBias and workspace, which come behind the kernels."""
    return f"{PREFIX}{pass_name}, {backend.name}: {str(plan).partition(';')[0]}"


def leaves_of(backend) -> list[torch.Tensor]:
    inputs = make_inputs(Case(sq=65, sk=97, d=16), torch.bfloat16, backend.device)
    return list(inputs.leaves().values())


def train(leaves, **options) -> torch.Tensor:
    out = flash_attn_ext.attention(*leaves, **options)
    out.backward(torch.ones_like(out))
    return out


def test_forward_and_backward(backend):
    leaves = leaves_of(backend)
    options = dict(causal="bottom_right", backend=backend.name)
    plans = flash_attn_ext.explain(*leaves, **options)
    events = ranges(lambda: train(leaves, **options))
    expected = [named("forward", backend, plans.forward), named("backward", backend, plans.backward)]
    assert [event.name for event in events] == expected


def test_packed(backend):
    q, k, v = (torch.randn(30, 2, 16, device=backend.device, dtype=torch.bfloat16) for _ in range(3))
    cu = cu_seqlens((10, 20), backend.device)
    options = dict(max_seqlen_q=20, max_seqlen_k=20, backend=backend.name)
    plan = flash_attn_ext.explain(q, k, v, cu, cu, **options).forward
    (event,) = ranges(lambda: flash_attn_ext.attention_varlen(q, k, v, cu, cu, **options))
    assert event.name == named("forward", backend, plan)


def test_a_call_with_a_cache(backend):
    inputs = make_cache_inputs(CacheCase((5, 17), new=2, capacity=32), torch.bfloat16, backend.device)
    (event,) = ranges(lambda: call_with_cache(inputs, backend))
    assert event.name.startswith(f"{PREFIX}forward, {backend.name}: ")


def test_the_forward_range_has_the_number_of_its_node(backend):
    """By which profilers join it with the backward pass."""
    leaves = leaves_of(backend)
    nodes = []
    forward, _ = ranges(lambda: nodes.append(train(leaves, backend=backend.name).grad_fn))
    assert forward.sequence_nr == nodes[0]._sequence_nr()
    with torch.no_grad():
        (forward,) = ranges(lambda: flash_attn_ext.attention(*leaves, backend=backend.name))
    assert forward.sequence_nr == -1


def test_a_call_without_rows_has_no_range(backend):
    q, k, v = (torch.randn(1, 2, n, 16, device=backend.device, dtype=torch.bfloat16) for n in (0, 5, 5))
    assert ranges(lambda: flash_attn_ext.attention(q, k, v, backend=backend.name)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="emit_nvtx needs a GPU")
def test_emit_nvtx(backend):
    """NVTX ranges come from the same records; that results are as ever is all that can be seen from here."""
    leaves = leaves_of(backend)
    expected = flash_attn_ext.attention(*leaves, backend=backend.name)
    with torch.autograd.profiler.emit_nvtx():
        out = train(leaves, backend=backend.name)
    assert torch.equal(out, expected)
