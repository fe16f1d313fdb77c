"""Bitwise repeatable: every sum has one order, whatever the scheduling."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flash_attn_ext
from support.cases import Case, make_inputs
from support.params import over_cases, over_dtypes
from support.runners import call_ours, gradients, poisoned_memory, run_ours

CASES = [
    Case(sq=300, sk=600, d=64, heads=4, kv_heads=2, causal="bottom_right"),
    Case(sq=200, sk=300, batch=3, bias="1h1k", alibi="h", sink=True, dlse=True),
    Case(sq=200, sk=300, bias="1111", dropout_p=0.2, mask="b11k"),
    # Biases to whose gradient several tiles of keys, heads and batch entries add.
    Case(sq=200, sk=600, heads=4, kv_heads=2, bias="11qk", causal="top_left"),
    Case(sq=200, sk=600, batch=3, bias="1hq1", window=(100, 100)),
]

# Few queries, so that split-KV divides the keys; with one head, so that all threads work on its splits.
LONG_KEYS = [
    Case(sq=1, sk=9000, d=128, batch=1, heads=1),
    Case(sq=3, sk=5000, heads=4, kv_heads=2, causal="bottom_right", sink=True, dropout_p=0.2),
    Case(sq=40, sk=5000, batch=1, heads=1, mask="111k", dlse=True),
    Case(sq=100, sk=5000, d=64, batch=1, heads=4, kv_heads=2),
    Case(sq=100, sk=5000, d=128, batch=1, heads=4, kv_heads=2),
]


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases([*CASES, *LONG_KEYS])
def test_twenty_runs(case, dtype, backend):
    inputs = make_inputs(case, dtype, backend.device)
    first = run_ours(inputs, backend)
    for _ in range(19):
        again = run_ours(inputs, backend)
        for name in first:
            assert torch.equal(first[name], again[name]), name


@over_dtypes()
@over_cases([*CASES, *LONG_KEYS, Case(sq=1, sk=1000, d=128), Case(sq=1000, sk=33, d=40, heads=1, batch=1)])
def test_across_thread_counts(case, dtype, backend):
    if not backend.is_cpu:
        pytest.skip("threads of the CPU play no part in a CUDA backend")
    inputs = make_inputs(case, dtype)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run_ours(inputs, backend))
    for other in results[1:]:
        for name in other:
            assert torch.equal(results[0][name], other[name]), name


@over_dtypes((torch.float32, torch.bfloat16))
def test_calls_from_several_threads(dtype, backend):
    """Python threads that call at the same time (the extension lets the interpreter go on) do not mix anything up."""
    problems = [make_inputs(Case(sq=140, sk=200 + n, d=16, bias="b1qk"), dtype, backend.device) for n in range(4)]
    expected = [run_ours(inputs, backend) for inputs in problems]

    def repeat(inputs):
        return [train(inputs, backend) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for results, right in zip(pool.map(repeat, problems), expected, strict=True):
            for result in results:
                for name in result:
                    assert torch.equal(result[name], right[name]), name


def train(inputs, backend):
    """run_ours without the process-wide switch of poisoned memory."""
    leaves = inputs.leaves()
    out, lse = call_ours(inputs, leaves, backend)
    result = {"out": out, "lse": lse}
    return result | gradients(result, inputs, leaves)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases([Case(sq=140, sk=270, batch=3, heads=3), Case(sq=3, sk=5000, batch=3, heads=3)])
def test_a_batch_entry_does_not_depend_on_the_batch(case, dtype, backend):
    """The same rows alone and inside a larger batch give the same bits."""
    if not backend.is_cpu and case.sk > 1000:
        pytest.skip("a GPU divides the keys of few queries by how many heads there are")
    inputs = make_inputs(case, dtype, backend.device)
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout")}
    alone = inputs.replace(case=dataclasses.replace(case, batch=1, heads=1))
    alone = alone.replace(**{name: tensor[1:2, 2:3] for name, tensor in tensors.items()})
    together, single = run_ours(inputs, backend), run_ours(alone, backend)
    for name in together:
        assert torch.equal(together[name][1:2, 2:3], single[name]), name


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
def test_fresh_memory_is_filled_where_pytorch_is_asked_to(layout, device):
    """torch.use_deterministic_algorithms has torch.empty filled; results and workspace are made by it then."""
    q = torch.randn(1, 2, 8, 16, device=device, dtype=torch.float32).permute(layout)

    def makes_tensors_by_pytorch() -> bool:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            flash_attn_ext.attention(q, q, q, return_lse=True)
        return any(event.name.startswith("aten::empty") for event in profile.events())

    assert not makes_tensors_by_pytorch()
    with poisoned_memory():
        assert makes_tensors_by_pytorch()
