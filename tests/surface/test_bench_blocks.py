"""The suite of lists of blocks: lists have their share of the pairs, and FlexAttention gets the same."""

import dataclasses

import pytest
import torch

from flash_attn_ext.cli.bench import contestants, rows, suites, table, timing
from flash_attn_ext.cli.bench.block_patterns import BlockPattern
from flash_attn_ext.cli.bench.workload import OWN_DENSE

LOADS = suites.SUITES["cuda"]["blocks"]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.case}, {load.head_dim}")
def test_lists_have_their_share(load):
    assert load.seqlen == 32768 and load.num_heads == 16 and load.causal is False
    seen = load.blocks.block_mask(load.seqlen, 2, torch.device("cpu"))
    assert seen.shape == (1, 2, load.seqlen // load.blocks.size, load.seqlen // load.blocks.size)
    assert bool((seen.float().mean(-1) == load.blocks.share).all())
    in_runs = seen.unflatten(-1, (-1, load.blocks.run // load.blocks.size))
    assert torch.equal(in_runs.all(-1), in_runs.any(-1))
    if load.blocks.share < 1:
        assert not torch.equal(seen[:, 0], seen[:, 1])


@pytest.mark.parametrize(("share", "size"), [(0.5, 64), (0.25, 128), (1.0, 64)])
def test_contestants_compute_the_same(share, size, monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None, raising=False)
    small = dict(num_heads=2, seqlen=512, head_dim=16, dtype=torch.float32)
    load = dataclasses.replace(LOADS[0], blocks=BlockPattern(share, size, 128), **small)
    inputs = contestants.prepare(load, "backward", "cpu")
    entrants = contestants.contestants(load, inputs, None)
    assert entrants.keys() == {"ours", "flex", OWN_DENSE}
    assert not entrants[OWN_DENSE].comparable
    for pass_ in ("forward", "backward"):
        ours, theirs, dense = (entrants[name].make_call(pass_, inputs.dout)() for name in ("ours", "flex", OWN_DENSE))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert torch.allclose(ours[0], dense[0], atol=1e-4) == (share == 1)


def test_rows_have_the_share_of_the_dense_rate():
    load = LOADS[0]
    times = {"ours": [1.0], "flex": [2.0], OWN_DENSE: [4.0]}
    row = rows.make_row(load, "forward", "sm90", timing.Measurement(times=times, rounds=1))
    assert row["visible"] == load.blocks.share == 1 / 8
    assert row["ours_tflops"] == pytest.approx(4 * 16 * load.head_dim * load.seqlen**2 / 8 * 1e-9, rel=1e-3)
    assert row["own_tflops"][OWN_DENSE] == pytest.approx(2 * row["ours_tflops"], rel=1e-3)
    assert row["share_of_dense"] == pytest.approx(0.5, abs=1e-3)
    assert row["ratio"] == 2.0 and row["against"] == "best"
    assert f"{row['share_of_dense']:.2f} of own dense call's TFLOP/s" in table.line(row, LOADS)
