"""explain(): the backend that would run, and for each other one why not."""

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import explain
from support.backends import BACKENDS, generator_state
from support.cases import DTYPES, Case, make_inputs
from support.packed import cu_seqlens
from support.params import over_dtypes
from support.plans import F32, F64, Call


def tensors_of(backend, dtype=torch.float32):
    inputs = make_inputs(Case(sq=5, sk=7, d=8), dtype, backend.device)
    return inputs.q, inputs.k, inputs.v


@over_dtypes(DTYPES)
def test_names_every_backend_of_the_build(dtype, backend):
    explanation = explain(*tensors_of(backend, dtype))
    assert list(explanation.reasons) == flash_attn_ext._C.build_info()["backends"]
    assert explanation.backend in explanation.reasons
    assert not explanation.reasons[explanation.backend]


@over_dtypes(DTYPES)
def test_the_first_without_reasons_runs(dtype, backend):
    explanation = explain(*tensors_of(backend, dtype))
    possible = [name for name, reasons in explanation.reasons.items() if not reasons]
    assert explanation.backend == possible[0]


@over_dtypes(DTYPES)
def test_asking_for_a_backend_is_a_reason_against_the_others(dtype, backend):
    explanation = explain(*tensors_of(backend, dtype), backend=backend.name)
    assert explanation.backend == backend.name
    for name, reasons in explanation.reasons.items():
        assert (name == backend.name) == (not reasons)


def test_cpu_tensors_are_refused_by_cuda_backends_and_the_other_way_round(backend):
    explanation = explain(*tensors_of(backend))
    others = [other.name for other in BACKENDS if other.device != backend.device]
    for name in explanation.reasons.keys() & set(others):
        assert explanation.reasons[name]
        assert any("CPU" in reason or "cpu" in reason for reason in explanation.reasons[name])


@pytest.mark.parametrize("other", BACKENDS, ids=lambda other: other.name)
def test_forcing_a_backend_of_another_device_is_an_error_with_all_reasons(other, device):
    names = flash_attn_ext._C.build_info()["backends"]
    if other.device == device or other.name not in names:
        pytest.skip("not a backend of another device in this build")
    q = torch.zeros(1, 1, 2, 8, device=device)
    assert explain(q, q, q, backend=other.name).backend is None
    with pytest.raises(RuntimeError, match=r"no backend can run this call") as error:
        flash_attn_ext.attention(q, q, q, backend=other.name)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal="bottom_right", window=(3, 0), softcap=2.0, scale=0.5),
        dict(dropout_p=0.5, return_lse=True),
        dict(layout="bshd"),
    ],
    ids=str,
)
def test_takes_the_arguments_of_the_call(options, backend):
    q, k, v = tensors_of(backend)
    if options.get("layout") == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    state = generator_state(backend.device)
    assert explain(q, k, v, **options).backend is not None
    assert torch.equal(state, generator_state(backend.device))


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)], ids=["no batch entry", "no head"])
def test_nothing_to_do(shape, backend):
    q = torch.empty(*shape, 5, 8, device=backend.device, requires_grad=True)
    k = torch.empty(*shape, 700, 8, device=backend.device)
    explanation = explain(q, k, k)
    assert explanation.forward.kernel == explanation.backward.kernel == "nothing: there are no heads"


def test_packed(backend):
    q, k = (torch.zeros(n, 2, 8, device=backend.device) for n in (5, 7))
    cu_q, cu_k = cu_seqlens((2, 3), backend.device), cu_seqlens((3, 4), backend.device)
    assert explain(q, k, k, cu_q, cu_k, backend=backend.name).backend == backend.name


def test_reads_as_text(backend):
    explanation = explain(*tensors_of(backend))
    text = str(explanation)
    assert text.startswith(f"backend: {explanation.backend}")
    for name in explanation.reasons:
        assert name in text


def test_raises_what_the_call_would_raise(backend):
    q, k, _ = tensors_of(backend)
    with pytest.raises(RuntimeError, match="sequence length"):
        explain(q, k, k[:, :, :3])
    with pytest.raises(ValueError, match="dropout_p"):
        explain(q, k, k, dropout_p=1.5)


def test_every_part_of_the_workspace_is_named():
    """Shares of a KV group, whose dK and dV are summed, take the most parts. Each begins at a multiple of 256."""
    shares = Call(4096, key_heads=2, options=dict(backend="sm90", causal="top_left")).plans()[1]
    assert shares.group_shares == 8
    slopes = Call(4096, slopes=True, options=dict(backend="sm90")).plans()[1]
    assert "statistics for later keys" in slopes.workspace
    for plan in (shares, slopes):
        assert sum(-(-size // 256) * 256 for size in plan.workspace.values()) == plan.workspace_bytes


WORDS = [
    (Call(500, dtype=F64), 0, "one warp per row, without tensor cores (portable); no workspace"),
    (
        Call(500, batch=1, heads=8, dtype=F32, options={"allow_tf32": True}),
        0,
        "streaming (portable, score mode scale only, tf32, head dims 64 x 64, tile 128 x 64, stages 1); no workspace",
    ),
    (
        Call(500, d=128, bias=(1, 1, 500, 500), wanted=("q", "k", "v", "bias")),
        1,
        "materialise P and dS with dQ (portable, dq score mode bias and mask, dq head dim 128, launches 1, "
        "key heads per launch 128); delta within another kernel; dBias from the materialised dS; "
        "workspace 134477824 bytes (delta 256000, materialised scores 134217728, dQ NaN flags 4096)",
    ),
    (
        Call(2048, mask=(8, 1, 1, 2048), options={"backend": "sm90"}),
        0,
        "warp-specialised (score mode mask, head dims 64 x 64, tile 128 x 128, stages 2, ping pong); "
        "workspace 49920 bytes (mask tiles 256, mask bits 2176, NaN flags 16384, tile list 8192, key intervals 64, "
        "plan of key intervals 22528); batch entries whose mask leaves one key interval: "
        "warp-specialised (score mode scale only, head dims 64 x 64, tile 192 x 128, stages 2, ping pong); "
        "workspace 22528 bytes (NaN flags 16896, tile list 5632)",
    ),
]


def test_plans_in_words():
    """The one test of their wording: each kind of field, the workspace, and a plan inside a plan."""
    for call, number, words in WORDS:
        assert str(call.plans()[number]) == words
