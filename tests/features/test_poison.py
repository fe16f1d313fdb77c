"""NaN and Inf in what a row does not attend never reach it; in what it attends, they do."""

import math

import pytest
import torch

from support.backends import Backend
from support.cases import Case, Inputs, make_inputs
from support.errors import assert_same_answer
from support.masks import attended
from support.packed import PackedCase, make_packed, run_packed
from support.params import FOR_GPUS, over_cases
from support.runners import Result, run_ours

POISONS = [float("nan"), float("inf"), -float("inf")]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
over_poisons = pytest.mark.parametrize("poison", POISONS, ids=str)
# The CPU has one template of code for all dtypes, and distinguishes none of the poisons.
over_poisoned_dtypes = pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        pytest.param(dtype, poison, marks=() if dtype == torch.float32 or math.isnan(poison) else FOR_GPUS)
        for dtype in DTYPES
        for poison in POISONS
    ],
    ids=str,
)

# Keys that no query attends: hidden by the mask, outside every window, or in the future of every query.
UNATTENDED = [
    Case(sq=140, sk=300, mask="111k"),
    Case(sq=140, sk=300, mask="111k", bias="bhqk", alibi="h", softcap=5.0, sink=True, dlse=True),
    Case(sq=140, sk=300, causal="top_left"),
    # Sums over queries: the rows of a tile past the last query would see more keys than any query does.
    Case(sq=140, sk=300, causal="top_left", bias="1h1k", alibi="bh"),
    Case(sq=40, sk=300, causal="bottom_right", window=(50, None)),
    Case(sq=40, sk=300, window=(7, 7)),
    Case(sq=2, sk=4200, heads=4, kv_heads=2, causal="bottom_right", window=(2500, None)),
    Case(sq=2, sk=4200, batch=1, mask="111k", mask_keep=0.01),
    Case(sq=140, sk=300, heads=4, kv_heads=2, causal="top_left", dropout_p=0.3),
    # Keys of dQ that blocks share, of kernels that recompute scores, store dS, or store P and dS.
    Case(sq=100, sk=4200, d=64, batch=1, heads=1, causal="top_left"),
    Case(sq=100, sk=4200, d=64, batch=1, heads=1, mask="111k"),
    Case(sq=100, sk=4200, d=128, batch=1, heads=1, causal="top_left"),
    Case(sq=20, sk=4200, d=128, batch=1, heads=1, mask="111k"),
    # Long enough for kernels that short sequences do not take.
    Case(sq=300, sk=420, d=64, batch=1, causal="top_left"),
    Case(sq=1100, sk=1300, d=64, batch=1, causal="top_left"),
    Case(sq=1100, sk=1300, d=128, batch=1, heads=1, mask="111k"),
]


def assert_same(result: Result, expected: Result, backend: Backend) -> None:
    for name in expected:
        assert_same_answer(result[name], expected[name], backend, name)


def poisoned(inputs: Inputs, poison: float, rows: torch.Tensor, names: tuple[str, ...]) -> Inputs:
    """`poison` in the rows (a bool vector along dimension 2) of the named tensors."""
    where = rows.to(inputs.q.device)[:, None]
    return inputs.replace(**{name: getattr(inputs, name).masked_fill(where, poison) for name in names})


@over_poisoned_dtypes
@over_cases(UNATTENDED)
def test_keys_that_no_query_attends(case, dtype, poison, backend):
    """Outputs and all gradients are those of clean keys, and the poisoned keys' own gradients are 0."""
    inputs = make_inputs(case, dtype, backend.device)
    hidden = ~attended(case, inputs.mask).any(2).any(1).any(0)
    assert bool(hidden.any())
    result = run_ours(poisoned(inputs, poison, hidden, ("k", "v")), backend)
    assert_same(result, run_ours(inputs, backend), backend)
    assert bool((result["dk"][:, :, hidden] == 0).all())
    assert bool((result["dv"][:, :, hidden] == 0).all())


@over_poisoned_dtypes
@pytest.mark.parametrize("d", [32, 128])
def test_keys_that_a_bias_hides(d, dtype, poison, backend):
    """A bias of -inf hides a key as a mask does, NaN included, from every gradient too."""
    inputs = make_inputs(Case(sq=140, sk=300, d=d, bias="1hqk"), dtype, backend.device)
    hidden = torch.zeros(300, dtype=torch.bool)
    hidden[[0, 64, 65, 200, 299]] = True
    inputs.bias[..., hidden] = -float("inf")
    result = run_ours(poisoned(inputs, poison, hidden, ("k", "v")), backend)
    assert_same(result, run_ours(inputs, backend), backend)
    for name, gradient in (("dk", result["dk"][:, :, hidden]), ("dv", result["dv"][:, :, hidden])):
        assert bool((gradient == 0).all()), name
    assert bool((result["dbias"][..., hidden] == 0).all())


@over_poisoned_dtypes
@pytest.mark.parametrize("names", [("k",), ("v",), ("k", "v")], ids="".join)
@over_cases(
    [
        Case(sq=300, sk=300, causal="top_left"),
        Case(sq=140, sk=300, causal="bottom_right"),
        Case(sq=300, sk=300, window=(40, 40)),
        Case(sq=140, sk=300, mask="11qk"),
        Case(sq=140, sk=300, mask="bhqk", heads=4, kv_heads=2),
        Case(sq=140, sk=300, d=128, mask="11qk"),
        Case(sq=1100, sk=1300, d=64, batch=1, causal="top_left"),
        Case(sq=1100, sk=1300, d=128, batch=1, heads=1, mask="11qk"),
    ]
)
def test_keys_that_some_rows_attend(case, names, dtype, poison, backend):
    """Rows that do not attend them keep output and dq, and keys that share no row with them keep dk and dv.

    NaN shows in every row that does attend them.
    """
    inputs = make_inputs(case, dtype, backend.device)
    rows = torch.zeros(case.sk, dtype=torch.bool)
    rows[[200, 203]] = True
    dirty = run_ours(poisoned(inputs, poison, rows, names), backend)
    clean = run_ours(inputs, backend)
    attends = attended(case, inputs.mask).to(backend.device)
    touched = attends[..., rows].any(-1)
    assert bool(touched.any()) and not bool(touched.all())
    for name in ("out", "dq", "lse"):
        assert_same_answer(dirty[name], clean[name], backend, name, ~touched)
    reached = (attends & touched.unsqueeze(-1)).any(2).unflatten(1, (case.num_kv_heads, -1)).any(2)
    for name in ("dk", "dv"):
        assert_same_answer(dirty[name], clean[name], backend, name, ~reached)
    if math.isnan(poison):
        for name in ("out", "lse") if "k" in names else ("out",):
            assert bool(dirty[name][touched].isnan().all()), name


@over_poisoned_dtypes
@pytest.mark.parametrize("names", [("q",), ("dout",), ("q", "dout")], ids="".join)
@over_cases(
    [
        Case(sq=300, sk=300, causal="top_left"),
        Case(sq=300, sk=140, causal="bottom_right"),
        Case(sq=300, sk=300, window=(40, 40)),
        Case(sq=300, sk=140, mask="11qk"),
    ]
)
def test_queries(case, names, dtype, poison, backend):
    """A poisoned query row reaches its own output and the gradients of the keys it attends, and nothing else."""
    inputs = make_inputs(case, dtype, backend.device)
    rows = torch.zeros(case.sq, dtype=torch.bool)
    rows[[220, 223]] = True
    dirty = run_ours(poisoned(inputs, poison, rows, names), backend)
    clean = run_ours(inputs, backend)
    for name in ("out", "lse", "dq"):
        assert_same_answer(dirty[name], clean[name], backend, name, (slice(None), slice(None), ~rows))
    touched = attended(case, inputs.mask)[:, :, rows].any(2).to(backend.device)
    assert bool(touched.any()) and not bool(touched.all())
    for name in ("dk", "dv"):
        assert_same_answer(dirty[name], clean[name], backend, name, ~touched)


@over_poisoned_dtypes
@pytest.mark.parametrize("where", ["q, dout", "q, dout, dlse"])
@over_cases([Case(sq=140, sk=300, mask="11qk", dlse=True), Case(sq=140, sk=300, mask="11qk", dlse=True, sink=True)])
def test_query_rows_without_keys(case, where, dtype, poison, backend):
    """What such rows hold, in q or dout or dlse, reaches no gradient; their output stays 0.

    With a sink their LSE is the sink: it gets the LSE's gradient, and 0 for one that is poisoned.
    """
    inputs = make_inputs(case, dtype, backend.device)
    inputs.mask[:, :, [3, 130]] = False
    rows = torch.zeros(140, dtype=torch.bool)
    rows[[3, 130]] = True
    dirty = poisoned(inputs, poison, rows, ("q", "dout"))
    if "dlse" in where:
        dirty.dlse = inputs.dlse.masked_fill(rows.to(backend.device), poison)
        inputs.dlse = inputs.dlse.masked_fill(rows.to(backend.device), 0)
    clean = run_ours(inputs, backend)
    assert_same(run_ours(dirty, backend), clean, backend)
    assert bool((clean["out"][:, :, rows] == 0).all())


@over_poisons
@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("dout",)], ids="".join)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(sq=140, sk=300, heads=4, kv_heads=2, batch=2), torch.float32),
        # A kernel whose blocks go from head to head.
        pytest.param(Case(sq=90, sk=100, d=64, heads=4, kv_heads=2, batch=150), torch.bfloat16, marks=FOR_GPUS),
    ],
    ids=str,
)
def test_other_heads_and_batch_entries(case, dtype, names, poison, backend):
    """One (batch entry, key head) is poisoned entirely; only its own query heads notice."""
    inputs = make_inputs(case, dtype, backend.device)
    dirty_inputs = inputs.replace(**{name: getattr(inputs, name).clone() for name in names})
    for name in names:
        heads = slice(2, 4) if name in ("q", "dout") else slice(1, 2)
        getattr(dirty_inputs, name)[1, heads] = poison
    dirty, clean = run_ours(dirty_inputs, backend), run_ours(inputs, backend)
    for name in clean:
        own = slice(2, 4) if clean[name].shape[1] == 4 else slice(1, 2)
        others = torch.ones_like(clean[name], dtype=torch.bool)
        others[1, own] = False
        assert_same_answer(dirty[name], clean[name], backend, name, others)


@over_poisoned_dtypes
@pytest.mark.parametrize("base", [Case(), Case(causal="bottom_right", dlse=True), Case(window=(30, 30))], ids=str)
def test_neighbouring_sequences(base, dtype, poison, backend):
    """A packed batch whose middle sequence is poisoned everywhere: the first and last do not notice."""
    case = PackedCase((70, 45, 60), (90, 37, 130), base)
    inputs = make_packed(case, dtype, backend.device)
    middle = {"q": slice(70, 115), "dout": slice(70, 115), "k": slice(90, 127), "v": slice(90, 127)}
    dirty_inputs = inputs.replace(**{name: getattr(inputs, name).clone() for name in middle})
    for name, rows in middle.items():
        getattr(dirty_inputs, name)[rows] = poison
    dirty, clean = run_packed(case, dirty_inputs, backend), run_packed(case, inputs, backend)
    for name, rows in {**middle, "dq": middle["q"], "dk": middle["k"], "dv": middle["v"], "out": middle["q"]}.items():
        if name in clean:
            keep = torch.ones(clean[name].shape[0], dtype=torch.bool)
            keep[rows] = False
            assert_same_answer(dirty[name], clean[name], backend, name, keep)
    for others in (slice(0, 70), slice(115, None)):
        assert_same_answer(dirty["lse"], clean["lse"], backend, "lse", (slice(None), others))


@over_poisoned_dtypes
@pytest.mark.parametrize("d", [32, 128])
def test_keys_past_the_last_query_of_a_packed_sequence(d, dtype, poison, backend):
    """Causality hides keys 1 and 2 from the first sequence's only query, not from the rows of the second one behind it.

    They share a bias, whose gradient must not take those rows for the first sequence's.
    """
    case = PackedCase((1, 65), (3, 70), Case(d=d, heads=2, causal="top_left", bias="11qk"))
    inputs = make_packed(case, dtype, backend.device)
    dirty_inputs = inputs.replace(k=inputs.k.clone(), v=inputs.v.clone())
    for keys in (dirty_inputs.k, dirty_inputs.v):
        keys[1:3] = poison
        keys[3 + 65 :] = poison
    assert_same(run_packed(case, dirty_inputs, backend), run_packed(case, inputs, backend), backend)


@over_poisoned_dtypes
def test_bias_where_the_mask_hides(dtype, poison, backend):
    """NaN in the bias of a hidden element is as absent as the key, and gets no gradient."""
    inputs = make_inputs(Case(sq=140, sk=300, bias="bhqk", mask="bhqk"), dtype, backend.device)
    dirty = run_ours(inputs.replace(bias=inputs.bias.masked_fill(~inputs.mask, poison)), backend)
    assert_same(dirty, run_ours(inputs, backend), backend)
    assert bool((dirty["dbias"][~inputs.mask] == 0).all())
