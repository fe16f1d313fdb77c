"""The suite of bias tables: our call with the table, and PyTorch's with the bias of all pairs, have one result."""

import dataclasses

import pytest
import torch

from flash_attn_ext.cli.bench.contestant import OURS
from flash_attn_ext.cli.bench.contestants import contestants, explain_ours, prepare
from flash_attn_ext.cli.bench.table_suites import bias_table, table_of

WORKLOADS = {
    load.table: dataclasses.replace(load, batch=2, num_heads=2, seqlen=min(load.seqlen, 128), dtype=torch.float32)
    for load in bias_table()
}


@pytest.mark.parametrize("table", WORKLOADS)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_contestants_agree(pass_, table):
    workload = WORKLOADS[table]
    inputs = prepare(workload, pass_, "cpu")
    found = contestants(workload, inputs, "cpu")
    ours, theirs = (found[name].make_call(pass_, inputs.dout)() for name in (OURS, "efficient"))
    if pass_ == "backward":
        assert ours[3].shape == inputs.table.shape and theirs[3].shape == inputs.bias.shape
        ours, theirs = ours[:3], theirs[:3]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert explain_ours(workload, inputs, "cpu").backend == "cpu"


def test_entries_of_swin():
    """Windows of 7 x 7 pixels: a pixel's own place is in the middle of 13 x 13, and all places occur."""
    _, entries, num_entries = table_of(WORKLOADS["table of Swin"], torch.device("cpu"))
    assert num_entries == 169 and entries.unique().tolist() == list(range(169))
    assert (entries.diagonal() == 84).all() and entries[0, 48] == 0 and entries[48, 0] == 168
