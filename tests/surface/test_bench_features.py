"""The suites of options that PyTorch lacks, and of models: their inputs, their peers and what they hold in memory."""

import dataclasses
import types

import pytest
import torch

from flash_attn_ext.cli.bench import contestants, peers, plot, suites
from flash_attn_ext.cli.bench.contestant import SDPA_BACKENDS
from flash_attn_ext.cli.bench.workload import (
    BATCH_MASK,
    EXPANDED_PADDING,
    FORGET_BIAS,
    FULL_BIAS,
    HEAD_BIAS,
    LOW_PADDING_BIAS,
    PADDING_MASK,
    Workload,
    make_inputs,
)

SMALL = dict(batch=2, num_heads=4, seqlen=48, head_dim=16, dtype=torch.float32)
NEW = ("softcap", "alibi", "sinks", "masks", "workloads")
ROWS = [load for name in NEW for load in suites.SUITES["cuda"][name]]
GIB = 2**30


def name_of(load: Workload) -> str:
    return f"{load.suite}, {load.case}, D{load.head_dim} S{load.seqlen}"


def tiny(load: Workload) -> Workload:
    """The same options at a size for the CPU."""
    small = dict(batch=min(load.batch, 2), seqlen=min(load.seqlen, 32), head_dim=16, dtype=torch.float32)
    small |= dict(num_heads=4, num_key_heads=4 if load.num_key_heads is None else 2, head_dim_v=None)
    if load.lengths:
        small["lengths"] = (7, 32)
    if load.seqlen_k is not None:
        small["seqlen_k"] = 40
    return dataclasses.replace(load, peers=(), own=None, **small)


@pytest.mark.parametrize("load", ROWS, ids=name_of)
def test_every_row_runs(load):
    """Ours, on the CPU and tiny, in the passes that the row has."""
    for pass_ in load.passes:
        inputs = contestants.prepare(tiny(load), pass_, "cpu")
        (ours,) = contestants.contestants(tiny(load), inputs, None).values()
        result = ours.make_call(pass_, inputs.dout)()
        results = result if isinstance(result, tuple) else (result,)
        assert all(tensor.isfinite().all() for tensor in results)
        wanted = 1 if pass_ == "forward" else 3 + load.extras_need_grad
        assert len(results) == wanted


@pytest.mark.parametrize("load", ROWS, ids=name_of)
def test_no_row_holds_more_than_a_gpu_does(load):
    """Of q, k, v, out and their gradients, and of what the masks and biases of a row are, or are for PyTorch."""
    tokens = sum(load.lengths) or load.batch * load.seqlen
    keys = sum(load.lengths) or load.batch * load.num_keys
    of_queries = tokens * load.num_heads * (load.head_dim + load.dim_v)
    of_keys = keys * load.key_heads * (load.head_dim + load.dim_v)
    assert 2 * load.dtype.itemsize * (of_queries + of_keys) <= 8 * GIB
    square = load.seqlen * load.num_keys * load.dtype.itemsize
    is_alibi_a_bias = load.has_alibi and not set(load.peers).isdisjoint(SDPA_BACKENDS)
    heads = load.num_heads if load.bias in (HEAD_BIAS, FULL_BIAS) or is_alibi_a_bias else 0
    entries = load.batch if load.mask == BATCH_MASK or load.bias == FULL_BIAS else 0
    assert (heads + entries + heads * entries) * square <= 8 * GIB


@pytest.mark.parametrize("suite", ["workloads", "softcap", "alibi", "sinks", "masks"])
def test_rows_have_places_of_their_own(suite):
    loads = suites.SUITES["cuda"][suite]
    places = {(load.case, load.head_dim, load.head_dim_v, load.seqlen, load.batch, load.num_heads) for load in loads}
    assert len(places) == len(loads)


@pytest.mark.parametrize("device", suites.SUITES)
def test_peers_of_a_suite_differ_in_the_picture(device):
    for name, loads in suites.SUITES[device].items():
        styles = [plot.style_of(peer) for peer in dict.fromkeys(peer for load in loads for peer in load.peers)]
        for key in ("color", "marker", "label"):
            values = [style[key] for style in (*styles, plot.style_of("ours"))]
            assert None not in values and len(set(values)) == len(values), (name, key)


def test_slopes_and_sinks_are_those_of_the_papers():
    inputs = make_inputs(Workload("alibi", "", has_alibi=True, has_sink=True, **SMALL | dict(num_heads=8)), "cpu")
    assert inputs.alibi_slopes.tolist() == [2.0**-power for power in range(1, 9)]
    assert inputs.sink.shape == (8,) and inputs.sink.dtype == inputs.alibi_slopes.dtype == torch.float32
    assert inputs.extras == (inputs.alibi_slopes, inputs.sink)


@pytest.mark.parametrize(
    "options",
    [
        dict(has_alibi=True),
        dict(has_alibi=True, causal=True),
        dict(bias=HEAD_BIAS, mask=PADDING_MASK, extras_need_grad=True),
        dict(bias=HEAD_BIAS, mask=BATCH_MASK, extras_need_grad=True),
        dict(bias=FULL_BIAS, extras_need_grad=True),
        dict(mask=EXPANDED_PADDING),
        dict(bias=LOW_PADDING_BIAS),
        dict(bias=FORGET_BIAS, extras_need_grad=True),
    ],
    ids=str,
)
def test_pytorch_computes_what_our_call_does(options):
    load = Workload("workloads", "", peers=("math",), **SMALL, **options)
    inputs = contestants.prepare(load, "backward", "cpu")
    entrants = contestants.contestants(load, inputs, None)
    for pass_ in ("forward", "backward"):
        ours, theirs = (entrant.make_call(pass_, inputs.dout)() for entrant in entrants.values())
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_memory_efficient_kernel_gets_a_key_head_for_each_query_head(monkeypatch):
    """And key heads get the sum of their gradients."""
    load = Workload("workloads", "", peers=("efficient",), causal=True, num_key_heads=2, **SMALL)
    inputs = contestants.prepare(load, "backward", "cpu")
    seen = []
    right = contestants.F.scaled_dot_product_attention

    def attend(q, k, v, **options):
        seen.append((k.shape, v.shape))
        return right(q, k, v, **options)

    monkeypatch.setattr(contestants.F, "scaled_dot_product_attention", attend)
    ours, theirs = contestants.contestants(load, inputs, None).values()
    theirs = dataclasses.replace(theirs, backend=None)
    torch.testing.assert_close(*(entrant.make_call("backward", inputs.dout)() for entrant in (ours, theirs)))
    assert seen == [(inputs.q.shape, inputs.q.shape)]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (dict(causal=True), dict(causal=True)),
        (dict(causal=True, window=(9, 5)), dict(causal=True, window_size=(9, 0))),
        (dict(window=(9, 5)), dict(causal=False, window_size=(9, 5))),
        (dict(softcap=50.0), dict(causal=False, softcap=50.0)),
    ],
    ids=str,
)
def test_packages_get_windows_and_softcaps(options, given, monkeypatch):
    seen = {}

    def flash_attn_func(q, k, v, **keywords):
        seen.update(keywords)
        return q

    package = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: package)
    load = Workload("workloads", "", **SMALL, **options)
    peers.package_contestant("fa3", load, make_inputs(load, "cpu")).forward()
    assert seen == given
