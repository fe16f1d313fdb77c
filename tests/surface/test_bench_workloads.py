"""What bench's workloads count, and what of it their rows report."""

import dataclasses

from flash_attn_ext.cli.bench import rows, suites, timing, workload


def test_bench_inputs_have_the_lengths_that_are_counted():
    load = dataclasses.replace(suites.SUITES["cuda"]["few_queries"][0], num_heads=2)
    inputs = workload.make_inputs(load, "cpu")
    assert inputs.q.shape == inputs.dout.shape == (1, 2, 128, 128)
    assert inputs.k.shape == inputs.v.shape == (1, 2, 4096, 128)


def test_bench_counts_operations():
    base = workload.Workload("grid", "full", 2, 3, seqlen=8, head_dim=4)
    full = 4 * 2 * 3 * 8 * 8 * 4
    assert base.flops("forward") == full and base.flops("backward") == 2.5 * full
    assert dataclasses.replace(base, causal=True).flops("forward") == full / 2
    assert dataclasses.replace(base, head_dim_v=12).flops("forward") == 2 * full
    assert dataclasses.replace(base, window=(0, 0)).flops("forward") == full / 8
    assert dataclasses.replace(base, window=(7, 7)).flops("forward") == full
    assert dataclasses.replace(base, window=(7, 0), causal=True).flops("forward") == full * 36 / 64
    assert dataclasses.replace(base, lengths=(8, 8)).flops("forward") == full


def test_bench_reports_calls_in_a_row():
    measured = timing.Measurement(times={"ours": [0.5], "cudnn": [1.0]})
    load = suites.SUITES["cuda"]["in_a_row"][0]
    row = rows.make_row(load, "forward", "sm90", measured)
    assert row["calls"] == load.calls == 12
    assert row["ratio"] == 2.0
    assert "calls" not in rows.make_row(suites.SUITES["cuda"]["short"][0], "forward", "sm90", measured)
