"""return_max_logit under compilers, fake tensors, torch.func, forward mode, second derivatives and autocast.

It is an output without a derivative: what depends on it alone gets no gradient, and nothing else changes.
"""

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn_ext
from support.cases import Case, make_inputs
from support.packed import cu_seqlens

LARGEST = ("head", "row")


def tensors_of(backend, **changes):
    case = Case(sq=40, sk=50, d=16, heads=4, kv_heads=2, **changes)
    inputs = make_inputs(case, torch.float32, backend.device)
    return inputs.q, inputs.k, inputs.v


def attend(backend, what, q, k, v, **more):
    options = dict(causal="bottom_right", backend=backend.name) | more
    return flash_attn_ext.attention(q, k, v, return_lse=True, return_max_logit=what, **options)


@pytest.mark.parametrize("what", LARGEST)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic, what, backend):
    torch.compiler.reset()
    compiled = torch.compile(functools.partial(attend, backend, what), fullgraph=True, dynamic=dynamic)
    tensors = tensors_of(backend)
    for ours, expected in zip(compiled(*tensors), attend(backend, what, *tensors), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out, _, largest = compiled(*leaves)
    assert out.requires_grad and not largest.requires_grad


def test_compile_of_packed_sequences_and_a_cache(backend):
    torch.compiler.reset()
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in tensors_of(backend))
    ends_q, ends_k = cu_seqlens((15, 25), backend.device), cu_seqlens((30, 20), backend.device)
    packed = functools.partial(flash_attn_ext.attention_varlen, return_max_logit=True, backend=backend.name)
    for compiled in (torch.compile(packed, fullgraph=True), packed):
        largest = compiled(q, k, v, ends_q, ends_k)[1]
        assert largest.shape == (4,)
        torch.testing.assert_close(largest, packed(q, k, v, ends_q, ends_k)[1])
    q, k, v = tensors_of(backend)
    lengths = torch.tensor([7, 50], dtype=torch.int32, device=backend.device)
    decode = functools.partial(flash_attn_ext.attention_with_kvcache, return_max_logit="row", backend=backend.name)
    with torch.no_grad():
        ours = torch.compile(decode, fullgraph=True)(q[:, :, :1], k, v, cache_seqlens=lengths)[1]
        torch.testing.assert_close(ours, decode(q[:, :, :1], k, v, cache_seqlens=lengths)[1])


@pytest.mark.parametrize("what", LARGEST)
def test_export(what, backend):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(backend, what, q, k, v)

    tensors = tensors_of(backend)
    exported = torch.export.export(Module(), tensors).module()(*tensors)
    for ours, expected in zip(exported, attend(backend, what, *tensors), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("what", LARGEST)
def test_shapes_without_memory(what, backend):
    expected = [(result.shape, result.dtype) for result in attend(backend, what, *tensors_of(backend))]
    with FakeTensorMode():
        fake = attend(backend, what, *(torch.empty(t.shape, device=backend.device) for t in tensors_of(backend)))
        assert [(result.shape, result.dtype) for result in fake] == expected
    meta = attend(backend, what, *(tensor.to("meta") for tensor in tensors_of(backend)))
    assert [(result.shape, result.dtype) for result in meta] == expected


@pytest.mark.parametrize("what", LARGEST)
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (0, None, 0)], ids=str)
def test_vmap(in_dims, what, backend):
    q, k, v = tensors_of(backend)
    given = [
        torch.stack([tensor, 2 * tensor, tensor.flip(0)], dim=dim) if dim is not None else tensor
        for tensor, dim in zip((q, k, v), in_dims, strict=True)
    ]
    mapped = torch.vmap(functools.partial(attend, backend, what), in_dims=in_dims)(*given)
    for index in range(3):
        of_slice = [t if dim is None else t.select(dim, index) for t, dim in zip(given, in_dims, strict=True)]
        for ours, expected in zip(mapped, attend(backend, what, *of_slice), strict=True):
            torch.testing.assert_close(ours[index], expected, rtol=1e-5, atol=1e-5)


def test_vmap_over_a_sink_and_dropout(backend):
    q, k, v = tensors_of(backend)
    sinks = torch.randn(3, 4, device=backend.device)
    mapped = torch.vmap(lambda sink: attend(backend, "head", q, k, v, sink=sink))(sinks)
    expected = attend(backend, "head", q, k, v)[2]
    torch.testing.assert_close(mapped[2], expected.expand(3, 4))
    with_dropout = torch.vmap(lambda q: attend(backend, "row", q, k, v, dropout_p=0.5), randomness="same")
    ours = with_dropout(torch.stack([q, 2 * q]))[2]
    torch.testing.assert_close(ours[1], attend(backend, "row", 2 * q, k, v)[2])


@pytest.mark.parametrize("what", LARGEST)
def test_forward_mode(what, backend):
    q, k, v = tensors_of(backend)
    expected = attend(backend, what, q, k, v)
    primals, tangents = torch.func.jvp(functools.partial(attend, backend, what), (q, k, v), (q, v, k))
    assert torch.equal(primals[2], expected[2]) and bool((tangents[2] == 0).all())
    assert bool((tangents[1] != 0).any())
    with forward_mode.dual_level():
        largest = attend(backend, what, forward_mode.make_dual(q, q), k, v)[2]
        assert forward_mode.unpack_dual(largest).tangent is None


@pytest.mark.parametrize("what", LARGEST)
def test_reverse_mode(what, backend):
    leaves = [tensor.requires_grad_() for tensor in tensors_of(backend)]
    out, lse, largest = attend(backend, what, *leaves)
    assert out.requires_grad and lse.requires_grad and not largest.requires_grad
    expected = torch.autograd.grad(out.sum() + lse.sum(), leaves, retain_graph=True)
    loss = out.sum() + lse.sum() + 3 * largest.sum()
    for ours, gradient in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(ours, gradient)

    def loss_of(*tensors):
        out, lse, largest = attend(backend, what, *tensors)
        return out.sum() + lse.sum() + 3 * largest.sum()

    detached = [leaf.detach() for leaf in leaves]
    for ours, gradient in zip(torch.func.grad(loss_of, argnums=(0, 1, 2))(*detached), expected, strict=True):
        torch.testing.assert_close(ours, gradient)


def test_second_derivatives(backend):
    def penalty(q, k, v, what):
        out, *_ = attend(backend, what, q, k, v) if what else (attend(backend, False, q, k, v)[0],)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), (q, k, v))

    with_largest, without = (
        penalty(*(tensor.requires_grad_() for tensor in tensors_of(backend)), what) for what in ("head", False)
    )
    for ours, expected in zip(with_largest, without, strict=True):
        torch.testing.assert_close(ours, expected)


def test_autocast(backend):
    if backend.refusal(torch.bfloat16):
        pytest.skip(backend.refusal(torch.bfloat16))
    tensors = tensors_of(backend)
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        out, _, largest = attend(backend, "row", *tensors)
    assert out.dtype == torch.bfloat16 and largest.dtype == torch.float32
    expected = attend(backend, "row", *(tensor.bfloat16() for tensor in tensors))[2]
    assert torch.equal(largest, expected)


def test_checkpoint(backend):
    leaves = [tensor.requires_grad_() for tensor in tensors_of(backend)]
    attend_head = functools.partial(attend, backend, "head")
    out, _, largest = torch.utils.checkpoint.checkpoint(attend_head, *leaves, use_reentrant=False)
    expected = attend_head(*leaves)
    assert torch.equal(largest, expected[2])
    ours, gradient = (torch.autograd.grad(result.sum(), leaves[0])[0] for result in (out, expected[0]))
    assert torch.equal(ours, gradient)
