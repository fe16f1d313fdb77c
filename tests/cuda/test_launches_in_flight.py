"""Launches that overlap: on several streams, in a graph that is replayed beside eager calls, and very many of them.

The CTAs of a launch of the sm90 kernel fetch their work tiles from a counter. No two launches in flight may share one.
"""

import torch

from support.cases import Case, Inputs, make_inputs
from support.params import computes_in, over_cases
from support.runners import call_ours, run_ours

pytestmark = computes_in(torch.bfloat16)

# So few tiles that two launches run side by side, and more than there are SMs.
CASES = [
    Case(sq=1100, sk=3000, d=64, batch=1, heads=4),
    Case(sq=1100, sk=3000, d=128, batch=1, heads=4, causal="bottom_right"),
    Case(sq=1500, sk=1500, d=64, batch=4, heads=16, causal="top_left"),
    Case(sq=1500, sk=1500, d=128, batch=4, heads=8, mask="11qk"),
    # Split-KV: a second kernel, launched early, combines the splits.
    Case(sq=1, sk=5000, d=128, batch=2, heads=32, kv_heads=8),
    Case(sq=8, sk=30000, d=128, batch=1, heads=8, kv_heads=1, causal="bottom_right"),
    Case(sq=1, sk=600, d=128, batch=100, heads=16, kv_heads=8),
]
ROUNDS = 20
MANY = 70_000  # more launches than a device has counters for those outside graphs


def attend(inputs: Inputs, gpu) -> tuple[torch.Tensor, torch.Tensor]:
    return call_ours(inputs, {name: getattr(inputs, name) for name in ("q", "k", "v")}, gpu)


def fresh_streams(count: int) -> list[torch.cuda.Stream]:
    streams = [torch.cuda.Stream() for _ in range(count)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    return streams


def assert_all_equal(results: list[tuple[torch.Tensor, ...]], expected: tuple[torch.Tensor, ...]) -> None:
    for number, result in enumerate(results):
        for ours, right in zip(result, expected, strict=True):
            assert torch.equal(ours, right), f"result {number}"


@torch.no_grad()
@over_cases(CASES)
def test_two_streams(case, gpu):
    problems = [make_inputs(case, torch.bfloat16, "cuda", seed, draw_on="cuda") for seed in range(2)]
    expected = [attend(inputs, gpu) for inputs in problems]
    results: list[list] = [[], []]
    streams = fresh_streams(2)
    for _ in range(ROUNDS):
        for stream, inputs, own in zip(streams, problems, results, strict=True):
            with torch.cuda.stream(stream):
                own.append(attend(inputs, gpu))
    torch.cuda.synchronize()
    for own, right in zip(results, expected, strict=True):
        assert_all_equal(own, right)


def test_backward_passes_of_two_priorities(gpu):
    """The CTAs of a pass may wait for each other: none may start before all can, whatever else takes SMs."""
    cases = [Case(sq=sq, sk=sq, d=d, batch=2, heads=16) for sq, d in ((2048, 128), (1500, 64), (900, 128))]
    problems = [make_inputs(case, torch.bfloat16, "cuda", draw_on="cuda") for case in cases]
    expected = [tuple(run_ours(inputs, gpu)[name] for name in ("dq", "dk", "dv")) for inputs in problems]
    other = torch.randn(3000, 3000, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, -2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results: list[list] = [[] for _ in cases]
    for number in range(ROUNDS):
        for place, stream in enumerate(streams[:2]):
            which = (number + place) % len(cases)
            with torch.cuda.stream(stream):
                result = run_ours(problems[which], gpu)
                results[which].append(tuple(result[name] for name in ("dq", "dk", "dv")))
        with torch.cuda.stream(streams[2]):
            torch.mm(other[: 100 + 140 * number], other)
    torch.cuda.synchronize()
    for own, right in zip(results, expected, strict=True):
        assert_all_equal(own, right)


@torch.no_grad()
@over_cases(CASES)
def test_replays_beside_eager_calls(case, gpu):
    """A graph of three calls, replayed again and again while another stream has calls of its own."""
    graphed, eager = (make_inputs(case, torch.bfloat16, "cuda", seed, draw_on="cuda") for seed in range(2))
    expected_graphed, expected_eager = attend(graphed, gpu), attend(eager, gpu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [attend(graphed, gpu) for _ in range(3)]
    replayed, called = [], []
    of_graph, of_calls = fresh_streams(2)
    for _ in range(ROUNDS):
        with torch.cuda.stream(of_graph):
            for tensor in (t for pair in outputs for t in pair):
                tensor.fill_(float("nan"))
            graph.replay()
            replayed += [tuple(t.clone() for t in pair) for pair in outputs]
        with torch.cuda.stream(of_calls):
            called += [attend(eager, gpu) for _ in range(3)]
    torch.cuda.synchronize()
    assert_all_equal(replayed, expected_graphed)
    assert_all_equal(called, expected_eager)


@torch.no_grad()
def test_two_graphs_at_the_same_time(gpu):
    case = CASES[0]
    problems = [make_inputs(case, torch.bfloat16, "cuda", seed, draw_on="cuda") for seed in range(2)]
    expected = [attend(inputs, gpu) for inputs in problems]
    torch.cuda.synchronize()
    graphs, outputs, results = [], [], [[], []]
    for inputs in problems:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append(attend(inputs, gpu))
    streams = fresh_streams(2)
    for _ in range(ROUNDS):
        for stream, graph, output, own in zip(streams, graphs, outputs, results, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                own.append(tuple(t.clone() for t in output))
    torch.cuda.synchronize()
    for own, right in zip(results, expected, strict=True):
        assert_all_equal(own, right)


@torch.no_grad()
def test_more_launches_than_counters(gpu):
    inputs = make_inputs(Case(sq=1024, sk=1024, d=64, batch=1, heads=2), torch.bfloat16, "cuda", draw_on="cuda")
    expected = attend(inputs, gpu)
    for _ in range(MANY):
        result = attend(inputs, gpu)
    assert_all_equal([result, attend(inputs, gpu)], expected)
