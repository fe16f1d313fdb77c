"""Each aten operator on ours: the bits of flash_attn_ext.attention, in the shapes and strides that PyTorch declares.

Without a GPU the operators of CUDA run on CPU tensors (support/aten.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import flash_attn_ext
from support import aten
from support.params import over_cases

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """One operator with one set of arguments, and what it means."""

    operator: str
    lengths: tuple[int, int] = (33, 33)
    options: dict = field(default_factory=dict)  # of flash_attn_ext.attention
    arguments: tuple = ()  # after query, key, value and, where it has one, the bias
    keywords: dict = field(default_factory=dict)
    bias: tuple[int, ...] | None = None
    key_heads: int = 4
    sequence_first: bool = False  # (B, L, H, D), as the operators without "scaled_dot_product" have it

    def __str__(self) -> str:
        return f"{self.operator.strip('_')}-{self.arguments}-{self.keywords}-{self.bias}".replace(" ", "")


SDP_FLASH, SDP_CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
SDP_EFFICIENT, CPU_FLASH = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu"
FLASH, CUDNN, EFFICIENT = "_flash_attention_forward", "_cudnn_attention_forward", "_efficient_attention_forward"
HAS_BIAS = (SDP_CUDNN, SDP_EFFICIENT, CUDNN, EFFICIENT)
TOP_LEFT, BOTTOM_RIGHT = dict(causal="top_left"), dict(causal="bottom_right")
DROPOUT = dict(dropout_p=0.3)

CALLS = [
    Call(SDP_FLASH),
    Call(SDP_FLASH, (20, 33), BOTTOM_RIGHT, (0.0, True)),
    Call(SDP_FLASH, (33, 20), BOTTOM_RIGHT, (0.0, True)),
    Call(SDP_FLASH, options=DROPOUT, arguments=(0.3,)),
    Call(SDP_FLASH, options=dict(scale=0.3), keywords=dict(scale=0.3)),
    Call(SDP_FLASH, key_heads=2),
    Call(SDP_CUDNN, arguments=(True,)),
    Call(SDP_CUDNN, (20, 33), TOP_LEFT, (True, 0.0, True)),
    Call(SDP_CUDNN, options=DROPOUT, arguments=(True, 0.3), bias=(2, 4, 33, 33)),
    Call(SDP_CUDNN, arguments=(True,), bias=(2, 1, 1, 33), key_heads=2),
    Call(SDP_EFFICIENT, arguments=(True,)),
    Call(SDP_EFFICIENT, (64, 33), TOP_LEFT, (True, 0.0, True)),
    Call(SDP_EFFICIENT, options=DROPOUT, arguments=(True, 0.3), bias=(2, 4, 33, 33)),
    Call(
        SDP_EFFICIENT,
        (33, 48),
        arguments=(True,),
        keywords=dict(scale=0.2),
        options=dict(scale=0.2),
        bias=(2, 4, 33, 48),
    ),
    Call(CPU_FLASH),
    Call(CPU_FLASH, (20, 33), TOP_LEFT, (0.0, True)),
    Call(CPU_FLASH, keywords=dict(scale=0.3), options=dict(scale=0.3), key_heads=2),
    Call(FLASH, (20, 33), BOTTOM_RIGHT, (None, None, 20, 33, 0.0, True, False), sequence_first=True),
    Call(FLASH, options=DROPOUT, arguments=(None, None, 33, 33, 0.3, False, False), sequence_first=True),
    Call(
        FLASH,
        (20, 33),
        dict(window=(5, 2)),
        (None, None, 20, 33, 0.0, False, False),
        dict(window_size_left=5, window_size_right=2),
        sequence_first=True,
    ),
    Call(CUDNN, options=TOP_LEFT, arguments=(None, None, 33, 33, True, 0.0, True)),
    Call(EFFICIENT, (20, 33), TOP_LEFT, (None, None, None, None, 0.0, 1, True), sequence_first=True),
    Call(EFFICIENT, (33, 20), BOTTOM_RIGHT, (None, None, None, None, 0.0, 2, True), sequence_first=True),
    Call(
        EFFICIENT,
        options=DROPOUT,
        arguments=(None, None, None, None, 0.3, 0, True),
        bias=(2, 4, 33, 33),
        sequence_first=True,
    ),
]
NO_META = (CUDNN,)
LAYOUTS = ("bhld", "blhd", "packed")


def operand(layout: str, length: int, heads: int, dtype, device) -> torch.Tensor:
    """(2, heads, length, 16) at these strides."""
    draw = torch.randn
    if layout == "bhld":
        return draw(2, heads, length, 16, dtype=dtype, device=device)
    if layout == "blhd":
        return draw(2, length, heads, 16, dtype=dtype, device=device).transpose(1, 2)
    return draw(2, length, 3, heads, 16, dtype=dtype, device=device)[:, :, 1].transpose(1, 2)


def operands_of(call: Call, layout: str, dtype, device) -> list[torch.Tensor]:
    """query, key, value and a bias, in (B, H, L, D)."""
    tensors = [
        operand(layout, length, heads, dtype, device)
        for length, heads in zip(
            (call.lengths[0], call.lengths[1], call.lengths[1]), (4, call.key_heads, call.key_heads), strict=True
        )
    ]
    if call.bias is not None:
        tensors.append(torch.randn(call.bias, dtype=dtype, device=device))
    return tensors


def run_operator(call: Call, tensors) -> tuple:
    q, k, v, *bias = tensors
    if call.sequence_first:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    extra = [bias[0] if bias else None] if call.operator in HAS_BIAS else []
    return getattr(ATEN, call.operator).default(q, k, v, *extra, *call.arguments, **call.keywords)


def run_ours(call: Call, tensors) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, *bias = tensors
    return flash_attn_ext.attention(q, k, v, bias=bias[0] if bias else None, **call.options, return_lse=True)


def leaves_of(call: Call, tensors) -> list[torch.Tensor]:
    """What the operator has a gradient for."""
    return tensors if call.operator in (SDP_EFFICIENT, EFFICIENT) else tensors[:3]


def skip_unless_runnable(call: Call, device: str, dtype) -> None:
    if (call.operator == CPU_FLASH) != (device == "cpu") and call.operator == CPU_FLASH:
        pytest.skip("the operator is for CPU tensors")


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def assert_as_declared(results, declared) -> None:
    """The seed and the offset (of no or one dimension, integers) are declared on no device."""
    assert len(results) == len(declared)
    for result, meta in zip(results, declared, strict=True):
        if isinstance(meta, torch.Tensor):
            assert result.shape == meta.shape and result.dtype == meta.dtype, (result.shape, meta.shape)
            assert same_strides(result, meta), (result.stride(), meta.stride())
            assert result.storage_offset() == meta.storage_offset()
        else:
            assert result is None or result == meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@over_cases(CALLS)
def test_bits_and_layout(case, layout, dtype, device):
    skip_unless_runnable(case, device, dtype)
    tensors = operands_of(case, layout, dtype, device)
    leaves = [tensor.requires_grad_() for tensor in leaves_of(case, tensors)]
    torch.manual_seed(1)
    out, lse = run_ours(case, tensors)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, dout)
    with aten.on_device(device), aten.recorded() as passes:
        torch.manual_seed(1)
        results = run_operator(case, tensors)
        got = results[0].transpose(1, 2) if case.sequence_first else results[0]
        assert torch.equal(got, out)
        their_lse = results[1].squeeze(-1) if case.operator in (SDP_CUDNN, CUDNN) else results[1][..., : lse.size(-1)]
        assert torch.equal(*(t.nan_to_num(neginf=0.0) for t in (their_lse, lse)))
        assert results[1][..., lse.size(-1) :].isposinf().all() or case.operator in (SDP_CUDNN, CUDNN)
        for name, gradient, expected in zip("qkvb", torch.autograd.grad(got, leaves, dout), gradients, strict=False):
            assert torch.equal(gradient, expected), name
        if case.operator not in NO_META:
            assert_as_declared(results, run_operator(case, [tensor.detach().to("meta") for tensor in tensors]))
        del results  # and the seed in it
    assert passes == ["forward", "backward"]


DECLARED_BACKWARD = [call for call in CALLS if call.operator not in NO_META and "dropout_p" not in call.options]


@pytest.mark.parametrize("layout", LAYOUTS)
@over_cases(DECLARED_BACKWARD)
def test_layout_of_gradients(case, layout, device):
    """Called as compiled graphs call it."""
    skip_unless_runnable(case, device, torch.float32)
    tensors = operands_of(case, layout, torch.float32, device)
    with aten.on_device(device):
        results = run_operator(case, tensors)
        gradients = backward(case, tensors, results)
    meta = [tensor.to("meta") for tensor in tensors]
    declared = backward(case, meta, run_operator(case, meta))
    assert_as_declared(gradients, declared)


def backward(call: Call, tensors, results) -> tuple:
    q, k, v, *bias = tensors
    out, lse = results[:2]
    if call.sequence_first:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    bias = bias[0] if bias else None
    operator = getattr(ATEN, call.operator.replace("_forward", "") + "_backward").default
    common = (torch.ones_like(out), q, k, v)
    causal = call.options.get("causal") is not None
    lengths = call.lengths
    by_operator: dict[str, Callable] = {
        SDP_FLASH: lambda: operator(
            *common, out, lse, None, None, *lengths, 0.0, causal, *results[6:8], **call.keywords
        ),
        SDP_CUDNN: lambda: operator(
            *common, out, lse, *results[6:8], bias, None, None, *lengths, 0.0, causal, **call.keywords
        ),
        SDP_EFFICIENT: lambda: operator(
            *common, bias, out, lse, *results[2:4], 0.0, [True] * 3 + [bias is not None], causal, **call.keywords
        ),
        CPU_FLASH: lambda: operator(*common, out, lse, 0.0, causal, **call.keywords),
        FLASH: lambda: operator(*common, out, lse, None, None, *lengths, 0.0, causal, *results[2:4], **call.keywords),
        EFFICIENT: lambda: operator(
            *common, bias, out, None, None, *lengths, lse, 0.0, *results[2:4], call.arguments[5], True
        ),
    }
    return by_operator[call.operator]()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


@pytest.mark.parametrize("operator", [SDP_FLASH, SDP_EFFICIENT])
def test_dropout_seeds_that_were_copied(operator, device):
    """As saved tensors are that go to the CPU and back."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = [torch.randn(2, 4, 33, 16, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    call = Call(operator, options=DROPOUT, arguments=(0.3,) if operator == SDP_FLASH else (True, 0.3))
    with aten.on_device(device):
        torch.manual_seed(1)
        expected = torch.autograd.grad(run_operator(call, tensors)[0].sum(), tensors)
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(copied, copied):
            out = run_operator(call, tensors)[0]
            gradients = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_dropout_seeds_of_pytorch_are_recognised(device):
    from flash_attn_ext.integrations.torch_backend import operands, seeds

    pairs = [
        (torch.tensor([3, 8], device=device).view(torch.uint64), torch.empty((), dtype=torch.uint64, device=device)),
        (torch.tensor(3), torch.tensor(8)),
        (torch.tensor(3, device=device), torch.tensor(8, device=device)),
    ]
    for pair in pairs:
        with pytest.raises(operands.NotTaken, match="drew other dropout bits"):
            seeds.seed_of(*pair)


def test_rows_at_the_lowest_bias(device):
    """The gradients of such a row are those of a uniform average: what rounding takes off its LSE is kept."""
    q, k, v = (torch.randn(1, 2, 8, 16, device=device, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 2, 8, 8, device=device)
    bias[:, :, 2] = torch.finfo(torch.float32).min
    out = flash_attn_ext.attention(q, k, v, bias=bias)
    expected = torch.autograd.grad(out[:, :, 2].sum(), (q, k, v))
    call = Call(SDP_EFFICIENT, arguments=(True,), bias=(1,))
    with aten.on_device(device):
        gradients = torch.autograd.grad(run_operator(call, [q, k, v, bias])[0][:, :, 2].sum(), (q, k, v))
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    torch.testing.assert_close(gradients[2][0, 0, 0, 0], torch.tensor(1 / 8, device=device))
