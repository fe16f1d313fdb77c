"""The suite of structured masks: both forms of a mask say the same, rates count visible pairs, and rows say so."""

import dataclasses

import pytest
import torch

from flash_attn_ext.cli.bench import contestants, flex, rows, structures, suites, table, timing
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


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.case)
def test_contestants_compute_the_same(load, small, monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    monkeypatch.setattr(flex_attention(), "_validate_device", lambda query, key, value: None, raising=False)
    load = dataclasses.replace(load, num_heads=2, seqlen=TOKENS, head_dim=16, dtype=torch.float32)
    inputs = contestants.prepare(load, "backward", "cpu")
    entrants = contestants.contestants(load, inputs, None)
    assert {"ours", *load.peers, load.own} == entrants.keys()
    same = [entrant for entrant in entrants.values() if entrant.comparable]
    assert len(same) == 2
    for pass_ in ("forward", "backward"):
        ours, theirs = (entrant.make_call(pass_, inputs.dout)() for entrant in same)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for entrant in entrants.values():
        entrant.make_call("backward", inputs.dout)()


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
