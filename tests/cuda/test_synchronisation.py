"""A call never waits for the GPU: PyTorch raises at every synchronisation inside."""

import contextlib
import dataclasses

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import masks
from support.caches import CacheCase, call_with_cache, make_cache_inputs
from support.cases import Case, Inputs, make_inputs
from support.packed import PackedCase, call_packed, cu_seqlens, make_packed
from support.params import computes_in, over_cases, over_dtypes
from support.runners import call_ours, gradients
from support.strides import with_stride_zero

DENSE = [
    Case(sq=140, sk=270, d=64),
    Case(sq=140, sk=270, d=300, dv=512, causal="top_left"),
    Case(sq=1100, sk=1100, d=128, dv=512, causal="top_left"),
    Case(sq=140, sk=270, d=40, dv=72, bias="1hqk", mask="b11k", alibi="bh", sink=True, softcap=9.0, dlse=True),
    Case(sq=140, sk=270, d=64, heads=4, kv_heads=1, window=(50, 3), dropout_p=0.2, layout="bshd"),
]
CACHES = [
    CacheCase((100, 0, 257, 1), new, 320, page_size, rotary_dim=rotary_dim, base=Case(sq=sq, d=64, **features))
    for page_size in (None, 16)
    for new, sq, rotary_dim, features in (
        (0, 1, 0, dict(causal="bottom_right")),
        (1, 1, 64, dict(causal="bottom_right", heads=4, kv_heads=1, window=(50, 0))),
        (40, 40, 32, dict(causal="bottom_right", bias="1hqk", mask="b11k", alibi="bh", sink=True, softcap=9.0)),
        (3, 7, 0, dict(causal=None, layout="bshd")),
    )
]
PACKED = [
    PackedCase((100, 0, 257, 1), (64, 30, 300, 1), Case(d=64, causal="bottom_right")),
    PackedCase((100, 0, 257), (64, 30, 300), Case(d=40, bias="b1qk", mask="1h1k", alibi="h", sink=True, dlse=True)),
    PackedCase((100, 20, 257), (64, 30, 300), Case(d=64, heads=4, kv_heads=2, dropout_p=0.2, window=(9, 9))),
]


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_dense(inputs: Inputs, leaves: dict[str, torch.Tensor], gpu) -> None:
    out, lse = call_ours(inputs, leaves, gpu)
    gradients({"out": out, "lse": lse}, inputs, leaves)


def test_a_synchronisation_would_be_noticed(gpu):
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@over_dtypes()
@over_cases(DENSE)
def test_dense(case, dtype, gpu):
    inputs = make_inputs(case, dtype, "cuda")
    leaves = inputs.leaves()
    train_dense(inputs, leaves, gpu)  # kernels are loaded at their first call
    with no_synchronisation():
        train_dense(inputs, leaves, gpu)


@over_dtypes()
@over_cases(PACKED)
@pytest.mark.parametrize("bounds", ["exact", "larger", "none"])
def test_packed(bounds, case, dtype, gpu):
    """The lengths stay on the GPU, whether the host is told an upper bound or not."""
    if bounds != "exact" and case.base.bias is not None:
        pytest.skip("bias and mask have the size of the bounds")
    inputs = make_packed(case, dtype, "cuda")
    leaves = inputs.leaves()
    longest = (max(case.lengths_q), max(case.lengths_k))
    max_q, max_k = {"exact": longest, "larger": (1000, 700), "none": (None, None)}[bounds]
    cu = [cu_seqlens(lengths, "cuda") for lengths in (case.lengths_q, case.lengths_k)]
    expected = call_packed(case, inputs, leaves, gpu)[0]

    def train() -> torch.Tensor:
        out, lse = flash_attn_ext.attention_varlen(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            *cu,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            **case.base.options(),
            bias=leaves.get("bias"),
            mask=inputs.mask,
            alibi_slopes=leaves.get("alibi_slopes"),
            sink=leaves.get("sink"),
            dropout_p=case.base.dropout_p,
            return_lse=True,
            backend=gpu.name,
        )
        gradients({"out": out, "lse": lse}, inputs, leaves)
        return out

    train()
    with no_synchronisation():
        out = train()
    if case.base.dropout_p == 0:
        torch.testing.assert_close(out, expected)


@over_dtypes()
@over_cases(CACHES)
def test_a_cache(case, dtype, gpu):
    """Lengths, tables and indices stay on the GPU."""
    case = dataclasses.replace(case, indexed=case.page_size is None)
    inputs = make_cache_inputs(case, dtype, "cuda")
    expected, _ = call_with_cache(inputs, gpu)
    with no_synchronisation():
        out, _ = call_with_cache(inputs, gpu)
    assert torch.equal(out, expected)


@computes_in(torch.bfloat16)
def test_a_cache_of_one_length(gpu):
    inputs = make_cache_inputs(CacheCase((70, 70), new=1), torch.bfloat16, "cuda")
    call_with_cache(inputs, gpu, cache_seqlens=70)
    with no_synchronisation():
        call_with_cache(inputs, gpu, cache_seqlens=70)


@computes_in(torch.bfloat16)
def test_checking_a_cache_synchronises(gpu, monkeypatch):
    """As FLASH_ATTN_EXT_CHECK=1 asks for."""
    inputs = make_cache_inputs(CacheCase((70, 3), new=1), torch.bfloat16, "cuda")
    call_with_cache(inputs, gpu)
    monkeypatch.setenv("FLASH_ATTN_EXT_CHECK", "1")
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        call_with_cache(inputs, gpu)


@computes_in(torch.bfloat16)
def test_copies_of_what_cannot_be_read_in_place(gpu):
    inputs = make_inputs(Case(sq=140, sk=270, d=33), torch.bfloat16, "cuda")
    inputs = inputs.replace(dout=with_stride_zero(inputs.dout, (0, 1, 2, 3)), k=inputs.k.mT.contiguous().mT)
    leaves = inputs.leaves()
    train_dense(inputs, leaves, gpu)
    with no_synchronisation():
        train_dense(inputs, leaves, gpu)


def test_the_sdpa_entry(gpu):
    q, k, v = (torch.randn(2, 3, n, 64, device="cuda", requires_grad=True) for n in (65, 97, 97))
    mask = torch.randn(65, 97, device="cuda", requires_grad=True)

    def train() -> None:
        out = flash_attn_ext.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.autograd.grad(out, (q, k, v, mask), torch.ones_like(out))

    train()
    with no_synchronisation():
        train()


def test_masks_of_a_known_number_of_intervals(gpu):
    """Each constructor whose docstring does not say otherwise, and what is combined of them."""
    ids, lengths = torch.tensor([[0, 0, 1, -1], [0, 1, 1, 2]], device="cuda"), torch.tensor([3, 2], device="cuda")
    ends = torch.tensor([0, 2, 4], dtype=torch.int32, device="cuda")

    def make() -> None:
        documents, window = masks.documents(ids), masks.window(4, (1, 0), device="cuda")
        assert (documents & window).tensor.is_cuda and (documents | window).tensor.is_cuda
        masks.documents(cu_seqlens=ends, tokens=4)
        masks.prefix_lm(4, lengths) & masks.prefix_lm(4, 2, device="cuda")
        masks.chunked(4, 2, offset=lengths) & masks.padding(4, lengths, "left")
        masks.blocks_within_causal(ids) & masks.causal(4, device="cuda")
        masks.global_and_window(4, 1, 1, device="cuda") & masks.block_causal(4, 2, device="cuda")
        masks.shared_prefix(ids).packed(ends, tokens=4)
        masks.block_diffusion(2, 1, device="cuda")

    make()
    with no_synchronisation():
        make()
