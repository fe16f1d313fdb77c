"""GPU memory at 65536 tokens, where a table of scores would take 8 GiB in 16 bits; and calls that run out of memory."""

import contextlib

import pytest
import torch

import flash_attn_ext
from support.backends import SM80, SM90, Backend
from support.cases import Case, make_inputs
from support.device_memory import extra_memory
from support.packed import cu_seqlens
from support.params import computes_in, over_dtypes
from support.runners import call_ours, gradients

pytestmark = computes_in(torch.bfloat16)

LENGTH = 65536
MIB = 2**20
# At head dim 64 in 16 bits, where sm80 keeps no scores of such a head; a backend that does may keep a sixth of them.
WORKSPACE = 1.3 * 2**30
ROUNDING = 2 * MIB  # the allocator's, over a few tensors
SCORES = LENGTH * LENGTH * 2
# As many scores, in heads of which a few fit the workspace.
HEADS, SHORT = 64, LENGTH // 8


def long_inputs(**features) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, 1, LENGTH, 64)
    tensors = {name: torch.randn(shape, generator=generator, device="cuda").bfloat16() for name in ("q", "k", "v")}
    return {name: t.requires_grad_() for name, t in tensors.items()} | features


def block_mask() -> torch.Tensor:
    """(1, 1, S, S) bool, 4 GiB: squares of 128 along the diagonal, so that there are tiles to skip."""
    blocks = torch.arange(LENGTH // 128, device="cuda")
    kept = (blocks[:, None] - blocks).abs() < 64
    return kept.repeat_interleave(128, 0).repeat_interleave(128, 1)[None, None]


FEATURES = {
    "plain": dict,
    "causal": lambda: dict(causal="bottom_right"),
    "mask": lambda: dict(mask=block_mask()),
    "dropout": lambda: dict(dropout_p=0.1),
    "bias per key": lambda: dict(bias=torch.randn(LENGTH, device="cuda", requires_grad=True)),
    "slopes and sink": lambda: dict(
        alibi_slopes=torch.tensor([0.01], device="cuda", requires_grad=True),
        sink=torch.zeros(1, device="cuda", requires_grad=True),
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_forward_holds_out_and_lse(name, gpu):
    inputs = long_inputs(**FEATURES[name]())
    with torch.no_grad():
        extra = extra_memory(lambda: flash_attn_ext.attention(**inputs, return_lse=True, backend=gpu.name))
    out_and_lse = LENGTH * 64 * 2 + LENGTH * 4
    residual = LENGTH * 4 if "bias" in inputs else 0
    # A mask may be summed up in a table of tiles; of 64 x 64 elements, say, at 4 bytes each.
    tiles = (LENGTH // 64) ** 2 * 4 if "mask" in inputs else 0
    if gpu == SM90 and "mask" in inputs:  # which packs it: a bit for each element, and 128 more for each row
        tiles += (LENGTH + 128) * LENGTH // 8
    assert extra <= out_and_lse + residual + tiles + ROUNDING, f"{extra / MIB:.1f} MiB"


@pytest.mark.parametrize("name", FEATURES)
def test_forward_and_backward_stay_linear(name, gpu):
    """Beyond inputs, output and gradients: the LSE, delta, and a bounded workspace."""
    inputs = long_inputs(**FEATURES[name]())
    dout = torch.randn(1, 1, LENGTH, 64, device="cuda").bfloat16()
    leaves = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]

    def train() -> None:
        torch.autograd.grad(flash_attn_ext.attention(**inputs, backend=gpu.name), leaves, dout)

    results = LENGTH * 64 * 2 + sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    extra = extra_memory(train) - results
    assert extra < WORKSPACE < SCORES / 4, f"{extra / MIB:.1f} MiB"


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, LENGTH // 2), (torch.float64, LENGTH // 4)], ids=str)
def test_other_dtypes_stay_linear(dtype, length, gpu):
    """At lengths that they get through in time; a table of scores would take 4 and 2 GiB."""
    q, k, v = (torch.randn(1, 1, length, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def train() -> None:
        torch.autograd.grad(flash_attn_ext.attention(q, k, v, backend=gpu.name), (q, k, v), dout)

    extra = extra_memory(train) - 4 * q.numel() * q.element_size()
    assert extra < WORKSPACE, f"{extra / MIB:.1f} MiB"


def extra_to_train(heads: int, length: int, head_dim: int, dtype: torch.dtype, gpu: Backend) -> int:
    """Bytes at the peak of a forward and backward pass beyond inputs, output, gradients, LSE and delta."""
    q, k, v, dout = (torch.randn(1, heads, length, head_dim, device="cuda", dtype=dtype) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def train() -> None:
        torch.autograd.grad(flash_attn_ext.attention(q, k, v, backend=gpu.name), leaves, dout)

    return extra_memory(train) - 4 * q.numel() * q.element_size() - 2 * heads * length * 4


def most_for_materialised_scores() -> int:
    """max_materialised_bytes in csrc/host/library/limits.cpp."""
    return min(2 * 2**30, torch.cuda.get_device_properties(0).total_memory // 40)


def sums_of_dq(heads: int, length: int, head_dim: int) -> int:
    """What Hopper's kernel for head dims up to 128 takes: dQ in float32, and LSE and delta once more."""
    return heads * length * (head_dim + 2) * 4 + 4 * ROUNDING


@pytest.mark.parametrize(
    ("dtype", "head_dim", "matrices"),
    [(torch.bfloat16, 128, 1), (torch.bfloat16, 256, 2), (torch.float32, 64, 1)],
    ids=str,
)
def test_materialised_scores_stay_under_their_limit(dtype, head_dim, matrices, gpu):
    """Above head dim 64, and in float32, the backward pass keeps dS between its kernels, above 128 P too, of as many
    whole heads as fit (csrc/kernels/plan/sm80/backward.cpp; on Hopper above 128). Those of all 64 would take 8 GiB, or
    16."""
    extra = extra_to_train(HEADS, SHORT, head_dim, dtype, gpu)
    limit, head = most_for_materialised_scores(), matrices * SHORT * SHORT * dtype.itemsize
    materialises = gpu == SM80 or (gpu == SM90 and head_dim > 128)
    if gpu == SM90 and not materialises:
        limit = sums_of_dq(HEADS, SHORT, head_dim)
    assert extra <= limit + 4 * ROUNDING, f"{extra / MIB:.1f} MiB"
    if materialises:  # else the limit would mean nothing; launches of equal size may leave half of it
        assert extra >= limit // head * head / 2, f"{extra / MIB:.1f} MiB"


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_head_beyond_the_limit(head_dim, gpu):
    """dS of one head of 65536 tokens takes 8 GiB, so it is computed again. On Hopper, above head dim 128, as many
    queries as fit are worked on at a time. Sums of dK and dV are kept from one chunk of queries to the next."""
    extra = extra_to_train(1, LENGTH, head_dim, torch.bfloat16, gpu)
    limit = 0
    if gpu == SM90:
        sums = sums_of_dq(1, LENGTH, head_dim)
        limit = 3 * sums if head_dim <= 128 else most_for_materialised_scores() + 2 * sums
    assert extra <= limit + 4 * ROUNDING, f"{extra / MIB:.1f} MiB"


def test_packed_stays_linear(gpu):
    lengths = (LENGTH // 2, LENGTH // 4, LENGTH // 4)
    q, k, v = (torch.randn(LENGTH, 1, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    cu, dout = cu_seqlens(lengths, "cuda"), torch.randn(LENGTH, 1, 64, device="cuda").bfloat16()

    def train() -> None:
        out = flash_attn_ext.attention_varlen(q, k, v, cu, cu, max_seqlen_q=max(lengths), backend=gpu.name)
        torch.autograd.grad(out, (q, k, v), dout)

    assert extra_memory(train) - 4 * q.numel() * 2 < WORKSPACE


@contextlib.contextmanager
def only_more(num_bytes: int):
    """PyTorch's allocator has no block left of this size, and may not take one from the device."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    filler = []
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                filler.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
        yield
    finally:
        del filler
        torch.cuda.set_per_process_memory_fraction(1.0)


LARGE = Case(sq=16384, sk=300, d=64, batch=1, heads=32)  # out: 64 MiB in 16 bits


@over_dtypes((torch.bfloat16, torch.float32))
def test_out_of_memory_in_the_forward_pass(dtype, gpu):
    """PyTorch's own error, and the next call is right."""
    inputs = make_inputs(LARGE, dtype, "cuda", draw_on="cuda")
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v")}
    expected = call_ours(inputs, tensors, gpu)[0]
    copy = expected.clone()
    del expected
    with only_more(8 * MIB), pytest.raises(torch.OutOfMemoryError):
        call_ours(inputs, tensors, gpu)
    assert torch.equal(call_ours(inputs, tensors, gpu)[0], copy)


@over_dtypes((torch.bfloat16, torch.float32))
def test_out_of_memory_in_the_backward_pass(dtype, gpu):
    """The graph is still there, so the same backward pass works once there is memory."""
    inputs = make_inputs(LARGE, dtype, "cuda", draw_on="cuda")
    leaves = inputs.leaves()
    out, lse = call_ours(inputs, leaves, gpu)
    result = {"out": out, "lse": lse}
    with only_more(8 * MIB), pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad(out, list(leaves.values()), inputs.dout, retain_graph=True)
    again = gradients(result, inputs, leaves)
    fresh = inputs.leaves()
    out, lse = call_ours(inputs, fresh, gpu)
    for name, expected in gradients({"out": out, "lse": lse}, inputs, fresh).items():
        assert torch.equal(again[name], expected), name
