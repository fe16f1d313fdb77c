"""Split-KV: few queries and long keys, split among as many CTAs as GPUs of different sizes would take.

FLASH_ATTN_EXT_MULTIPROCESSORS has a plan made for a GPU with so many SMs. Whatever that number is, results obey the
error rule and are bitwise reproducible.
"""

from collections.abc import Callable

import pytest
import torch

import flash_attn_ext
from support.caches import CacheCase, check_cache_case
from support.cases import Case, Inputs, make_inputs
from support.checks import (
    SM_COUNT_SWITCH,
    answers_to,
    answers_to_packed,
    check_draws_on_sm_counts,
    check_on_sm_counts,
)
from support.disturbance import Disturbance
from support.packed import PackedCase, call_packed, make_packed
from support.params import computes_in, over_cases, over_dtypes
from support.runners import Result, call_ours, poisoned_memory, run_ours

SM_COUNTS = (1, 2, 7, 50, 132, 300)
RUNS = 100


def case_of(sq: int, sk: int, **features) -> Case:
    return Case(sq=sq, sk=sk, **(dict(d=64, heads=4, kv_heads=2) | features))


SHAPES = [
    case_of(sq, sk, batch=batch, heads=heads, kv_heads=kv_heads, d=d, dv=dv)
    for sq, sk, batch, heads, kv_heads, d, dv in (
        (1, 513, 2, 4, 4, 64, None),
        (1, 5000, 1, 8, 2, 128, None),
        (1, 4097, 3, 16, 1, 128, None),
        (1, 20001, 1, 2, 1, 128, None),  # up to 156 splits of a row
        (1, 2049, 1, 2, 1, 256, None),
        (1, 3000, 2, 4, 2, 64, 128),
        (1, 1000, 1, 1, 1, 3, 1),
        (4, 1023, 2, 8, 2, 128, None),
        (4, 5000, 1, 40, 8, 72, 40),
        (33, 513, 1, 2, 2, 64, None),
        (33, 4100, 2, 4, 2, 128, None),
        (64, 2000, 1, 3, 3, 64, None),
        (64, 5000, 1, 8, 1, 128, None),
        (256, 1024, 1, 4, 4, 128, None),
        (256, 5000, 1, 8, 2, 128, None),
        (256, 3001, 2, 2, 1, 192, 128),
        (256, 2000, 1, 2, 2, 256, None),
    )
]
WIDE = [
    case_of(sq, 1500, d=d, dv=dv) for sq in (1, 33) for d, dv in ((257, None), (512, None), (320, 64), (64, 512))
] + [
    case_of(sq, 1500, batch=1, heads=heads, kv_heads=1, d=576, dv=512, **features)
    for sq, heads, features in (
        (1, 16, {}),
        (1, 128, {}),
        (2, 32, dict(causal="bottom_right")),
        (1, 20, dict(alibi="h")),
    )
]
FEATURES = [
    case_of(sq, sk, **features)
    for sq, sk in ((1, 2500), (4, 700), (33, 5000), (256, 1600))
    for features in (
        dict(causal="bottom_right"),
        dict(causal="top_left"),
        dict(window=(700, 30)),
        dict(window=(600, 0), causal="bottom_right", d=128),
        dict(mask="b11k"),
        dict(mask="bhqk", mask_keep=0.05, sink=True),
        dict(bias="bhqk"),
        dict(bias="1h1k", causal="bottom_right", d=128),
        dict(bias="11qk", bias_float32=True),
        dict(alibi="h"),
        dict(alibi="bh", softcap=5.0),
        dict(sink=True),
        dict(dropout_p=0.3),
        dict(mask="b11k", dropout_p=0.2, d=256),
        dict(scale=-0.2),
        dict(layout="bshd", window=(900, 300), bias="b1qk", mask="1hqk", alibi="h", softcap=9.0, sink=True),
        dict(layout="bshd", causal="bottom_right", bias="bh1k", mask="b1qk", dropout_p=0.2, sink=True),
    )
]
PACKED = [
    PackedCase(lengths_q, lengths_k, Case(d=64, heads=4, kv_heads=2, **features))
    for lengths_q, lengths_k in (
        ((1, 1, 1, 1, 1, 1), (5000, 1, 0, 513, 2048, 100)),
        ((1, 4, 33, 0, 64), (5000, 513, 0, 17, 1200)),
        ((256, 1, 30), (3000, 5000, 17)),
    )
    for features in (
        dict(),
        dict(causal="bottom_right", sink=True),
        dict(causal="top_left", window=(900, 0)),
        dict(bias="bhqk", mask="b11k", alibi="h"),
        dict(dropout_p=0.3, softcap=9.0),
    )
]
CACHES = [
    CacheCase(lengths, new, 5120, page_size, base=case_of(sq, 0, causal="bottom_right", **features))
    for lengths, new, sq, features in (
        ((5000, 100, 0, 2047), 1, 1, dict(d=128, heads=8)),
        ((512, 4999), 33, 33, dict(window=(2500, 0), sink=True)),
        ((3000, 1, 0), 0, 256, dict(bias="1h1k", alibi="h")),
    )
    for page_size in (None, 16, 512)
]
GRADIENTS = [
    case_of(8, 2000, batch=1, **features)
    for features in (
        dict(d=128, heads=8),
        dict(causal="bottom_right", dlse=True),
        dict(window=(700, 30), sink=True),
        dict(bias="bhqk", mask="b11k"),
        dict(bias="1h1k", alibi="h", softcap=5.0),
        dict(dropout_p=0.3),
    )
] + [case_of(128, 4500, batch=1, d=128, heads=2), case_of(64, 5000, d=192, dv=128, causal="bottom_right")]
REPEATED = [
    case_of(1, 5000, d=128, heads=32, kv_heads=8),
    case_of(4, 2049, causal="bottom_right", sink=True),
    case_of(64, 3000, mask="b11k", alibi="h"),
    case_of(256, 4000, d=128, heads=8),
]


def forward(inputs: Inputs, gpu) -> Result:
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    with torch.no_grad(), poisoned_memory():
        return dict(zip(("out", "lse"), call_ours(inputs, tensors, gpu), strict=True))


def packed_forward(case: PackedCase, inputs: Inputs, gpu) -> Result:
    tensors = {name: getattr(inputs, name) for name in Inputs.TENSORS}
    with torch.no_grad(), poisoned_memory():
        return dict(zip(("out", "lse"), call_packed(case, inputs, tensors, gpu), strict=True))


def check_forward(case: Case, dtype: torch.dtype, gpu, monkeypatch) -> None:
    check_draws_on_sm_counts(
        SM_COUNTS,
        lambda seed: make_inputs(case, dtype, "cuda", seed, draw_on="cuda"),
        gpu,
        monkeypatch,
        run=lambda inputs: forward(inputs, gpu),
        answers=lambda inputs: answers_to(inputs, gpu),
    )


@over_dtypes((torch.bfloat16, torch.float16, torch.float32))
@over_cases(SHAPES)
def test_shapes(case, dtype, gpu, monkeypatch):
    check_forward(case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16,))
@over_cases(WIDE)
def test_wide_head_dims(case, dtype, gpu, monkeypatch):
    check_forward(case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16, torch.float32))
@over_cases(FEATURES)
def test_features(case, dtype, gpu, monkeypatch):
    check_forward(case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16, torch.float32))
@over_cases(PACKED)
def test_packed(case, dtype, gpu, monkeypatch):
    """Sequences of different lengths, whose keys form one work list that CTAs share."""
    check_draws_on_sm_counts(
        SM_COUNTS,
        lambda seed: make_packed(case, dtype, "cuda", seed, draw_on="cuda"),
        gpu,
        monkeypatch,
        run=lambda inputs: packed_forward(case, inputs, gpu),
        answers=lambda inputs: answers_to_packed(case, inputs, gpu),
    )


@over_dtypes((torch.bfloat16, torch.float32))
@over_cases(CACHES)
@pytest.mark.parametrize("num_sms", SM_COUNTS)
def test_caches(num_sms, case, dtype, gpu, monkeypatch):
    monkeypatch.setenv(SM_COUNT_SWITCH, str(num_sms))
    check_cache_case(case, dtype, gpu)


@over_dtypes((torch.bfloat16, torch.float32))
@over_cases(GRADIENTS)
def test_gradients(case, dtype, gpu, monkeypatch):
    check_on_sm_counts(SM_COUNTS, case, dtype, gpu, monkeypatch)


@over_dtypes((torch.bfloat16, torch.float32))
@over_cases(REPEATED)
@pytest.mark.parametrize("num_sms", [None, 7, 300], ids=lambda n: f"as-on-{n}" if n else "as-it-is")
def test_a_hundred_runs_give_the_same_bits(num_sms, case, dtype, gpu, monkeypatch):
    """While other work comes and goes, so that CTAs start in another order each time."""
    if num_sms is not None:
        monkeypatch.setenv(SM_COUNT_SWITCH, str(num_sms))
    inputs = make_inputs(case, dtype, "cuda", draw_on="cuda")
    assert_repeats(lambda: forward(inputs, gpu))


@over_dtypes((torch.bfloat16, torch.float32))
@over_cases([GRADIENTS[0], GRADIENTS[1], GRADIENTS[-1]])
def test_gradients_repeat(case, dtype, gpu):
    inputs = make_inputs(case, dtype, "cuda", draw_on="cuda")
    assert_repeats(lambda: run_ours(inputs, gpu))


@over_dtypes((torch.bfloat16, torch.float32))
@over_cases(PACKED[:2])
def test_packed_sequences_repeat(case, dtype, gpu):
    inputs = make_packed(case, dtype, "cuda", draw_on="cuda")
    assert_repeats(lambda: packed_forward(case, inputs, gpu))


def assert_repeats(run: Callable[[], Result]) -> None:
    disturbance = Disturbance()
    torch.cuda.synchronize()
    first = run()
    for number in range(RUNS):
        disturbance.start(3 * number % 7)
        again = run()
        for name in first:
            assert torch.equal(first[name], again[name]), f"{name}, run {number}"
    torch.cuda.synchronize()


@computes_in(torch.bfloat16)
@pytest.mark.parametrize(("sq", "always"), [(1, True), (16, True), (256, False)])
def test_the_counts_differ(sq, always, gpu, monkeypatch):
    """The other tests here would mean nothing otherwise. 256 queries: only where SMs would be idle."""
    q, k = (torch.empty(1, heads, n, 128, device="cuda", dtype=torch.bfloat16) for heads, n in ((8, sq), (2, 60000)))
    counts = {}
    for num_sms in SM_COUNTS:
        monkeypatch.setenv(SM_COUNT_SWITCH, str(num_sms))
        plan = flash_attn_ext.explain(q, k, k, backend=gpu.name).forward
        counts[num_sms] = plan.persistent_ctas or plan.splits
    if always:
        assert len(set(counts.values())) == len(SM_COUNTS) and None not in counts.values()
    else:
        assert (counts[1], counts[7]) == (None, None)
        assert None not in (counts[50], counts[132], counts[300])
        assert counts[50] < counts[132] < counts[300]
