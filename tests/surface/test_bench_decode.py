"""The suites decode and decode_host of bench, at tiny sizes on the CPU. No times are checked."""

import dataclasses
import json
import types

import pytest
import torch

from flash_attn_ext.__main__ import main
from flash_attn_ext.cli.bench import command, decode, decode_suites, peers, suites, timing, workload


@pytest.fixture
def tiny(monkeypatch):
    """Runs these workloads as the CPU's suite `decode`, each call timed once; returns their rows."""
    monkeypatch.setattr(command, "EFFORTS", {("cpu", quick): timing.Effort(1, 1, 1, 0.0) for quick in (False, True)})
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 2**16})

    def run(folder, *loads):
        sizes = dict(num_heads=4, num_key_heads=2, head_dim=16, seqlen_k=512)
        small = tuple(dataclasses.replace(load, **sizes) for load in loads)
        monkeypatch.setattr(suites, "SUITES", {"cpu": {"decode": small}})
        status = main(["bench", "--device", "cpu", "--no-plot", "--output", str(folder)])
        return status, json.loads((folder / "cpu.json").read_text())["rows"]

    return run


def test_decode_rows_have_microseconds_and_bytes_per_second(tiny, tmp_path, capsys):
    loads = [load for load in decode_suites.decode_on_cpu() if load.entry is None]
    status, rows = tiny(tmp_path, *loads)
    assert status == 0 and len(rows) == 3
    for load, row in zip(loads, rows, strict=True):
        assert (row["suite"], row["case"], row["against"]) == ("decode", load.case, "torch sdpa")
        assert (row["seqlen_q"], row["seqlen_k"], row["causal"]) == (load.seqlen, 512, True)
        assert row["ours_us"] > 0 and row["peer_us"]["torch sdpa"] > 0 and row["difference"] < 1e-3
        cache_bytes = 2 * load.batch * 2 * 512 * 16 * 4
        assert row["ours_tbs"] == pytest.approx(cache_bytes / row["ours_us"] * 1e-6, rel=0.01)
        assert row["copy_tbs"] > 0 and "ours_tflops" not in row
    assert set(rows[1]["own_us"]) == {"1 query"} and rows[1]["own_us"]["1 query"] > 0
    text = capsys.readouterr().out
    assert "TB/s (a copy " in text and "x own 1 query" in text


def test_decode_caches_give_the_result_of_attention(tiny, tmp_path, capsys):
    """Or a row would fail: each compares with our own other call."""
    loads = [load for load in decode_suites.decode_on_cpu() if load.entry is not None]
    status, rows = tiny(tmp_path, *loads)
    assert status == 0
    assert [row["against"] for row in rows] == ["attention", "contiguous", "contiguous", "contiguous"]
    for load, row in zip(loads, rows, strict=True):
        assert row["case"] == load.case and row["difference"] < 1e-5
        # Stored with four decimals, of which a small ratio has few.
        assert row["ratio"] == pytest.approx(row["own_us"][row["against"]] / row["ours_us"], rel=1e-3, abs=6e-5)
    assert [load.page_size for load in loads] == [None, 16, 64, 256]
    assert "x own contiguous" in capsys.readouterr().out


def test_decode_host_rows_have_microseconds_only(tiny, tmp_path):
    """Of a call that appends too: it writes the last key of its full cache again."""
    status, rows = tiny(tmp_path, *decode_suites.decode_host())
    assert status == 0
    assert [row["case"] for row in rows] == ["attention", "with_kvcache, cache", "with_kvcache, append"]
    for row in rows:
        assert row["ours_us"] > 0 and row["ratio"] > 0 and row["difference"] < 1e-2
        assert "ours_tbs" not in row and "copy_tbs" not in row


def test_decode_says_which_peer_has_no_such_causality():
    few, one = (decode_suites.DecodeWorkload("decode", "", 1, 1, seqlen, 16, seqlen_k=64) for seqlen in (8, 1))
    assert [dataclasses.replace(load, peers=("flash", "cudnn")).non_causal_peers for load in (few, one)] == [
        ("cudnn",),
        (),
    ]


def test_decode_counts_pairs_and_bytes():
    load = decode_suites.DecodeWorkload("decode", "", 2, 6, 3, 4, num_key_heads=2, seqlen_k=10, head_dim_v=8)
    assert load.cache_bytes == 2 * 2 * 10 * (4 + 8) * 2
    assert load.flops("forward") == 4 * 6 * 2 * (10 + 9 + 8) * 6
    assert dataclasses.replace(load, causal=False).flops("forward") == 4 * 6 * 2 * 30 * 6


def test_decode_copies_are_more_than_l2_holds(monkeypatch):
    l2 = types.SimpleNamespace(L2_cache_size=50 * 2**20)
    monkeypatch.setattr(decode.torch.cuda, "get_device_properties", lambda device: l2)
    copies = {load.case: decode.num_copies(load, "cuda") for load in decode_suites.decode()}
    assert (copies["B1 4k"], copies["B1 32k"], copies["B64 8k"]) == (13, 2, 1)
    assert all(decode.num_copies(load, "cuda") == 1 for load in decode_suites.decode_host())


def test_decode_flash_attention_3_gets_its_own_layout_and_pages(monkeypatch):
    """Its function for caches, the only one with split-KV."""
    seen = {}

    def flash_attn_with_kvcache(q, k, v, **options):
        seen.update(options, shape=tuple(k.shape))
        return q

    package = types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: package)
    table, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.full((1,), 64, dtype=torch.int32)
    q, pages = torch.zeros(1, 1, 4, 16), torch.zeros(4, 16, 2, 16)
    out = peers.package_decode("fa3", True, lengths, table)(q, pages, pages)
    assert out.shape == (1, 4, 1, 16)
    assert seen == dict(causal=True, cache_seqlens=lengths, page_table=table, shape=(4, 16, 2, 16))


def test_bench_plain_workloads_have_as_many_keys_as_queries():
    assert workload.Workload("grid", "full", 1, 1, seqlen=8, head_dim=4).num_keys == 8
