"""Packed sequences: each attends inside itself only, whatever its length, zero included."""

import pytest
import torch

import flash_attn_ext
from support.cases import Case
from support.checks import SM_COUNT_SWITCH, check_packed_drawn
from support.errors import assert_same_answer
from support.packed import PackedCase, call_packed, cu_seqlens, make_packed, run_by_sequence, run_packed
from support.params import over_cases, over_dtypes
from support.runners import dropout_bits

RAGGED_Q, RAGGED_K = (1, 128, 33, 0, 257, 64), (300, 31, 129, 17, 64, 1)
SQUARE = (65, 1, 128, 0, 200)
PLAIN = [
    PackedCase(RAGGED_Q, RAGGED_K),
    PackedCase((3,), (4,)),
    PackedCase((0, 5, 0), (7, 0, 0)),
    PackedCase((70, 40), (90, 30), Case(d=40, dv=72)),
    PackedCase(RAGGED_Q, RAGGED_K, Case(heads=6, kv_heads=2, d=16)),
]
FEATURES = [
    PackedCase(RAGGED_Q, RAGGED_K, Case(d=16, **features))
    for features in (
        dict(causal="top_left"),
        dict(causal="bottom_right", dlse=True),
        dict(window=(20, 5)),
        dict(window=(64, 0), causal="bottom_right"),
        dict(bias="bhqk"),
        dict(bias="1h1k", mask="b1qk"),
        dict(bias="11q1", dlse=True),
        dict(mask="b11k", sink=True, dlse=True),
        dict(alibi="h", causal="top_left"),
        dict(alibi="bh", softcap=5.0),
        dict(heads=4, kv_heads=2, sink=True, softcap=9.0, bias="b1qk", window=(100, 30), dlse=True),
    )
]
# One long sequence and short ones. With few SMs, Hopper's kernels list the work tiles that exist.
SEVEN_SMS = "7"
ONE_LONG = (1300, 5, 0, 70, 1, 129, 64, 33)
UNEVEN = [
    PackedCase(lengths_q, lengths_k, Case(heads=4, **{"kv_heads": 4, "d": 64} | features))
    for lengths_q, lengths_k in ((ONE_LONG, ONE_LONG), ((40, 1, 300, 0, 3, 64, 0, 7), (129, 0, 1, 40, 1500, 2, 0, 70)))
    for features in (
        dict(dlse=True),
        dict(d=96, causal="top_left"),
        dict(d=128, kv_heads=1, causal="bottom_right"),
        dict(d=80, kv_heads=2, window=(200, 30)),
        dict(d=192, dv=128, causal="bottom_right"),
        dict(softcap=9.0, sink=True),
        dict(alibi="h", causal="bottom_right"),
        dict(mask="b11k"),
    )
]
UNEVEN += [
    PackedCase(ONE_LONG, ONE_LONG, Case(heads=4, d=128, dropout_p=0.2)),
    # Few queries: Hopper's key-stationary kernel splits keys.
    *(PackedCase((40, 1, 120, 0, 64), (129, 0, 40, 1500, 70), Case(heads=4, d=d)) for d in (64, 128)),
]


@over_dtypes()
@over_cases(PLAIN + FEATURES)
def test_matches_float64_sequence_by_sequence(case, dtype, backend):
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(UNEVEN)
def test_one_long_sequence(case, dtype, backend, monkeypatch):
    monkeypatch.setenv(SM_COUNT_SWITCH, SEVEN_SMS)
    check_packed_drawn(case, lambda seed: make_packed(case, dtype, backend.device, seed), backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases([PackedCase(SQUARE, SQUARE, Case(causal="top_left")), PackedCase(RAGGED_Q, RAGGED_K)])
def test_equals_dense_attention_on_each_sequence(case, dtype, backend):
    """The same kernels on the same rows: a sequence does not notice its neighbours."""
    inputs = make_packed(case, dtype, backend.device)

    def dense(*tensors, **options):
        return flash_attn_ext.attention(*tensors, **options, backend=backend.name)

    packed, dense_result = run_packed(case, inputs, backend), run_by_sequence(case, inputs, dense)
    for name in packed:
        assert_same_answer(packed[name], dense_result[name], backend, name)


@over_dtypes((torch.float32, torch.bfloat16))
@pytest.mark.parametrize("lengths", [(None, None), (300, 400), (257, None)], ids=str)
def test_max_seqlen_is_optional_or_an_upper_bound(lengths, dtype, backend):
    """On a GPU the bound may choose the kernel."""
    case = PackedCase(RAGGED_Q, RAGGED_K)
    inputs = make_packed(case, dtype, backend.device)
    exact = run_packed(case, inputs, backend)
    bound = run_packed(case, inputs, backend, max_seqlen_q=lengths[0], max_seqlen_k=lengths[1])
    for name in exact:
        assert_same_answer(bound[name], exact[name], backend, name)


@over_dtypes((torch.float32, torch.bfloat16))
def test_self_attention_shares_one_cu_seqlens(dtype, backend):
    case = PackedCase(SQUARE, SQUARE)
    inputs = make_packed(case, dtype, backend.device)
    cu = cu_seqlens(SQUARE, backend.device)
    out = flash_attn_ext.attention_varlen(inputs.q, inputs.k, inputs.v, cu, cu, backend=backend.name)
    expected, _ = call_packed(case, inputs, {"q": inputs.q, "k": inputs.k, "v": inputs.v}, backend)
    assert_same_answer(out, expected, backend, "out")


def test_strided_cu_seqlens(backend):
    """The columns of a (batch + 1, 2) table."""
    case = PackedCase(RAGGED_Q, RAGGED_K)
    inputs = make_packed(case, torch.float32, backend.device)
    columns = [cu_seqlens(lengths, backend.device) for lengths in (RAGGED_Q, RAGGED_K)]
    tensors = (inputs.q, inputs.k, inputs.v)
    strided = torch.stack(columns, dim=1).unbind(1)
    assert not strided[0].is_contiguous()
    ours, expected = (flash_attn_ext.attention_varlen(*tensors, *cu, backend=backend.name) for cu in (strided, columns))
    torch.testing.assert_close(ours, expected)


@over_dtypes((torch.float32, torch.bfloat16))
def test_strided_packed_tensors(dtype, backend):
    """q, k, v as views of one (T, 3, H, D) projection, as models make them."""
    total = sum(SQUARE)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(total, 3, 2, 16, generator=generator).to(backend.device, dtype)
    cu = cu_seqlens(SQUARE, backend.device)
    views, copies = qkv.unbind(1), [t.contiguous() for t in qkv.unbind(1)]
    strided = flash_attn_ext.attention_varlen(*views, cu, cu, backend=backend.name)
    torch.testing.assert_close(strided, flash_attn_ext.attention_varlen(*copies, cu, cu, backend=backend.name))


def test_dropout_is_keyed_by_position_inside_the_sequence(backend):
    """Bits of (sequence, head, query, key): the same as a dense batch of the same sequences draws."""
    case = PackedCase((70, 33, 0, 130), (40, 64, 9, 90), Case(d=16, dropout_p=0.3, dlse=True))
    inputs = make_packed(case, torch.float64, backend.device)
    keep = dropout_bits(inputs.replace(case=case.padded()), backend)
    ours, exact = run_packed(case, inputs, backend), run_by_sequence(case, inputs, keep=keep)
    for name in ours:
        torch.testing.assert_close(ours[name], exact[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("features", [dict(bias="b1qk", dlse=True), dict(mask="bhqk"), dict(bias="1hq1", mask="b11k")])
def test_tables_of_the_longest_length_need_no_max_seqlen(features, backend):
    """The same results as with max_seqlen; on a GPU the host does not know the lengths, and the table says them."""
    case = PackedCase((30, 7, 41), (12, 50, 33), Case(d=16, **features))
    inputs = make_packed(case, torch.float32, backend.device)
    with_bounds = run_packed(case, inputs, backend)
    without = run_packed(case, inputs, backend, max_seqlen_q=None, max_seqlen_k=None)
    for name, expected in with_bounds.items():
        torch.testing.assert_close(without[name], expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("length", "fits"), [(1, True), (4, False), (5, True), (9, True), (10, False)])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_what_a_table_may_say_about_unknown_lengths(name, length, fits):
    """Two sequences of 9 tokens together, on a device whose memory the host does not read: one has 5 at least."""
    q = torch.empty(9, 3, 8, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    table = torch.empty(2, 1, length, length, dtype=torch.bool if name == "mask" else torch.float32, device="meta")
    with pytest.raises(RuntimeError) as error:  # at the latest because there is no memory to compute on
        flash_attn_ext.explain(q, q, q, cu, cu, **{name: table})
    assert ("broadcasts to [2, 3, 9, 9]" not in str(error.value)) == fits


def test_a_given_max_seqlen_decides_over_the_table():
    q = torch.empty(9, 3, 8, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    mask = torch.empty(2, 1, 6, 6, dtype=torch.bool, device="meta")
    with pytest.raises(RuntimeError, match=r"mask has shape \[2, 1, 6, 6\], .* \[2, 3, 8, 6\]"):
        flash_attn_ext.explain(q, q, q, cu, cu, mask=mask, max_seqlen_q=8)
    bias = torch.empty(2, 1, 7, 6, device="meta")
    with pytest.raises(RuntimeError, match=r"mask has shape \[2, 1, 6, 6\], .* \[2, 3, 7, 6\]"):
        flash_attn_ext.explain(q, q, q, cu, cu, mask=mask, bias=bias)


def test_leading_ones_of_a_table(backend):
    q = torch.randn(9, 3, 8, device=backend.device)
    cu = cu_seqlens((4, 5), backend.device)
    mask = torch.rand(5, 5, device=backend.device) < 0.6
    expected = flash_attn_ext.attention_varlen(q, q, q, cu, cu, mask=mask, backend=backend.name)
    more = flash_attn_ext.attention_varlen(q, q, q, cu, cu, mask=mask[None, None, None, None], backend=backend.name)
    assert torch.equal(more, expected)
