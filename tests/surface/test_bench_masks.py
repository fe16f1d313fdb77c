"""The suite of structured masks: all forms of a mask say the same, rates count visible pairs, and rows say so."""

import dataclasses
import sys
import types

import pytest
import torch

from flash_attn_ext import masks
from flash_attn_ext.cli.bench import contestants, cudnn_flex, flex, peers, rows, structures, suites, table, timing
from flash_attn_ext.cli.bench.workload import OWN_CAUSAL, OWN_VARLEN, Workload, make_inputs

LOADS = suites.SUITES["cuda"]["masks"]
CPU = torch.device("cpu")
SIZES = dict(DOCUMENT=12, PREFIX=9, CHUNK=10, SHARED_PREFIX=9, BRANCH=7, NUM_GLOBAL=3, WINDOW=6, IMAGE_PERIOD=16)
TOKENS = 40


@pytest.fixture
def small(monkeypatch):
    """The masks at sizes for a few tokens, of which several fit."""
    for name, size in (SIZES | dict(IMAGE_BEGIN=4, IMAGE_END=9)).items():
        monkeypatch.setattr(structures, name, size)
    structures.visible_pairs.cache_clear()
    yield
    structures.visible_pairs.cache_clear()


def pairs_of(name: str, tokens: int) -> torch.Tensor:
    at = torch.arange(tokens)
    return structures.STRUCTURES[name].rule(tokens, CPU)(at[:, None], at[None])


@pytest.mark.parametrize("name", structures.STRUCTURES)
def test_intervals_are_what_flex_attention_gets(name, small):
    seen = structures.STRUCTURES[name].intervals(TOKENS, CPU)
    expected = pairs_of(name, TOKENS)
    assert torch.equal(seen.dense(TOKENS)[0, 0], expected)
    assert structures.visible_pairs(name, TOKENS) == int(expected.sum())
    if name != "causal":
        assert not torch.equal(expected, pairs_of("causal", TOKENS))


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.case)
def test_masks_of_the_suite_have_their_structure(load):
    """At some rows of the real size, each of which has more than itself to see and less than everything."""
    at, begin = torch.arange(load.seqlen), load.seqlen - load.seqlen // 5
    seen = make_inputs(dataclasses.replace(load, num_heads=1, head_dim=1), "cpu").intervals
    rule = structures.STRUCTURES[load.structure].rule(load.seqlen, CPU)
    part = structures.Intervals(seen[:, :, begin : begin + 16]).dense(load.seqlen)[0, 0]
    assert torch.equal(part, rule(at[begin : begin + 16, None], at[None]))
    assert load.causal is False and load.window is None and load.num_heads == 16 and load.head_dim == 128
    share = structures.visible_pairs(load.structure, load.seqlen) / load.seqlen**2
    assert (share > 0.5) == (load.structure in ("images", "prefix", "causal"))


@pytest.fixture
def cudnn_package(monkeypatch):
    """cuDNN's package as its documentation has it: tensors (B, S, H, D), and bounds (heads, bounds, B · S)."""

    def create_mask_plan(bounds, q, k, v):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.shape[1] % 2 == 1
        assert bounds.shape[0] in (1, q.shape[2]) and bounds.shape[2] == q.shape[0] * q.shape[1]
        assert bool((bounds.diff(dim=1) >= 0).all()) and int(bounds.min()) >= 0 and int(bounds.max()) <= k.shape[1]
        return masks.from_cudnn(bounds, batch=q.shape[0]).dense(k.shape[1])

    def flex_attn_func(q, k, v, *, mask_plan):
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        transposed = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*transposed, attn_mask=mask_plan)
        return out.transpose(1, 2)

    package = types.SimpleNamespace(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", package)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.case)
def test_contestants_compute_the_same(load, small, cudnn_package, monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    monkeypatch.setattr(flex_attention(), "_validate_device", lambda query, key, value: None, raising=False)
    load = dataclasses.replace(load, batch=2, num_heads=2, seqlen=TOKENS, head_dim=16, dtype=torch.float32)
    if load.own == OWN_VARLEN:  # which has one row of documents
        load = dataclasses.replace(load, batch=1)
    inputs = contestants.prepare(load, "backward", "cpu")
    entrants = contestants.contestants(load, inputs, None)
    assert {"ours", *load.peers, load.own} == entrants.keys()
    ours, *others = (entrant for entrant in entrants.values() if entrant.comparable)
    assert len(others) == max(1, len(load.peers))
    for pass_ in ("forward", "backward"):
        expected = ours.make_call(pass_, inputs.dout)()
        for other in others:
            torch.testing.assert_close(other.make_call(pass_, inputs.dout)(), expected, atol=1e-4, rtol=1e-4)
    for entrant in entrants.values():
        entrant.make_call("backward", inputs.dout)()


@pytest.mark.parametrize("name", structures.STRUCTURES)
def test_cudnn_gets_as_few_bounds_as_can_be(name, small):
    seen = structures.STRUCTURES[name].intervals(TOKENS, CPU)
    bounds = cudnn_flex.cudnn_bounds(seen, 3)
    assert torch.equal(masks.from_cudnn(bounds, batch=3).dense(TOKENS), seen.dense(TOKENS).expand(3, -1, -1, -1))
    begins_with_the_first_key = bool(pairs_of(name, TOKENS)[:, 0].all())
    most = int((pairs_of(name, TOKENS).int().diff(prepend=torch.zeros(TOKENS, 1), dim=1) == 1).sum(1).max())
    assert bounds.shape == (1, 2 * most + (-1 if begins_with_the_first_key else 1), 3 * TOKENS)


def test_cudnn_gets_the_bounds_of_each_head():
    seen = masks.Intervals(torch.tensor([[[[4, 6, 0, 2], [3, 3, 1, 5]], [[2, 9, 0, 3], [7, 8, 7, 9]]]]).int())
    bounds = cudnn_flex.cudnn_bounds(seen, 1)
    assert torch.equal(masks.from_cudnn(bounds, batch=1).dense(9), seen.dense(9))


def test_cudnn_is_said_to_be_missing(monkeypatch):
    def import_module(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(peers.importlib, "import_module", import_module)
    lines = peers.absences(peers.missing_packages(LOADS, "cuda"))
    assert "cuDNN's FlexAttention (cudnn flex) takes no part: ImportError: no cudnn.flex_attention" in lines


def flex_attention():
    from torch.nn.attention import flex_attention

    return flex_attention


def test_flex_gets_a_mask_by_a_rule(small):
    load = Workload("masks", "", 1, 1, TOKENS, 16, structure="shared prefix")
    (rule,) = flex._mask_rules(load, make_inputs(load, "cpu"))
    at = torch.arange(TOKENS)
    assert torch.equal(rule((0, 0, at[:, None], at[None])), pairs_of("shared prefix", TOKENS))


def test_documents_end_where_packed_sequences_do(small):
    ends = structures.ends_of_documents(TOKENS, CPU)
    assert ends.dtype == torch.int32 and ends.tolist() == [0, 12, 24, 36, 40]
    assert structures.ends_of_documents(36, CPU).tolist() == [0, 12, 24, 36]


def test_rows_have_the_share_of_the_causal_rate():
    load = LOADS[0]
    times = {"ours": [1.0], "flex": [2.0], OWN_CAUSAL: [4.0]}
    row = rows.make_row(load, "forward", "sm90", timing.Measurement(times=times, rounds=1))
    pairs = structures.visible_pairs(load.structure, load.seqlen)
    assert row["visible"] == pytest.approx(pairs / load.seqlen**2, rel=1e-3)
    assert row["ours_tflops"] == pytest.approx(4 * 16 * 128 * pairs * 1e-9, rel=1e-3)
    assert row["own_tflops"][OWN_CAUSAL] == pytest.approx(4 * 16 * 128 * load.seqlen**2 / 2 / 4 * 1e-9, rel=1e-3)
    assert row["share_of_causal"] == pytest.approx(row["ours_tflops"] / row["own_tflops"][OWN_CAUSAL], abs=1e-4)
    assert row["ratio"] == 2.0 and row["against"] == "best"
    assert f"{row['share_of_causal']:.2f} of own causal's TFLOP/s" in table.line(row, LOADS)


def test_packed_documents_and_a_causal_mask_are_beside_our_own_calls():
    by_case = {load.case: load for load in LOADS}
    packed, causal = by_case["documents, packed"], by_case["secretly causal"]
    for load, own in ((packed, OWN_VARLEN), (causal, OWN_CAUSAL)):
        times = {"ours": [1.0], own: [0.5]}
        row = rows.make_row(load, "backward", "sm90", timing.Measurement(times=times, rounds=9))
        assert row["ratio"] == 0.5 and rows.is_against_own(row)
        assert row["own_tflops"][own] == pytest.approx(2 * row["ours_tflops"], rel=1e-3)
