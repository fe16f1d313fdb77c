"""torch.nn.attention's switch beside PyTorch's own kernels, which are there on a GPU only."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from support import aten
from support.backends import device_not_runnable_because

ATEN = torch.ops.aten
KERNELS = pytest.mark.parametrize(
    "kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=str
)
CLOSE = dict(rtol=3e-2, atol=3e-2)


@pytest.fixture(autouse=True)
def _gpu():
    if reason := device_not_runnable_because("cuda"):
        pytest.skip(reason)


pytestmark = pytest.mark.usefixtures("every_reason_is_new")


def qkv(shape=(2, 4, 128, 64)) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]


@KERNELS
@pytest.mark.parametrize("first_is_ours", [True, False])
def test_switched_between_forward_and_backward(kernel, first_is_ours):
    tensors = qkv()
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*tensors).float().sum(), tensors)
    with sdpa_kernel(kernel):
        if first_is_ours:
            with aten.active():
                out = F.scaled_dot_product_attention(*tensors)
            gradients = torch.autograd.grad(out.float().sum(), tensors)
        else:
            out = F.scaled_dot_product_attention(*tensors)
            with aten.active(), aten.recorded() as passes:
                gradients = torch.autograd.grad(out.float().sum(), tensors)
            assert passes == ["backward"]
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("first_is_ours", [True, False])
@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_switched_where_rows_see_no_key(kernel, first_is_ours):
    """Whose LSE PyTorch's kernels and ours write otherwise."""
    tensors = qkv()
    mask = None
    if kernel == "efficient":
        mask = torch.rand(128, 128, device="cuda") < 0.5
        mask[5] = False

    def attend():
        if kernel == "efficient":
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return F.scaled_dot_product_attention(*tensors, mask)
        q, k, v = tensors[0], tensors[1][:, :, :50], tensors[2][:, :, :50]
        return ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]  # bottom right: 78 rows see nothing

    expected = torch.autograd.grad(attend().float().sum(), tensors)
    if first_is_ours:
        with aten.active():
            out = attend()
        gradients = torch.autograd.grad(out.float().sum(), tensors)
    else:
        out = attend()
        with aten.active():
            gradients = torch.autograd.grad(out.float().sum(), tensors)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@KERNELS
def test_a_backward_pass_of_pytorchs_dropout_is_pytorchs(kernel):
    tensors = qkv()
    gradients = []
    for active in (False, True):
        torch.manual_seed(2)
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(*tensors, dropout_p=0.3)
            if not active:
                gradients.append(torch.autograd.grad(out.float().sum(), tensors))
                continue
            with aten.active(), aten.recorded() as passes, pytest.warns(UserWarning, match="drew other dropout bits"):
                gradients.append(torch.autograd.grad(out.float().sum(), tensors))
    assert passes == []
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_what_is_not_taken_runs_on_pytorchs_kernel():
    q, k, v = (tensor.detach() for tensor in qkv())
    torch.manual_seed(0)
    expected = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.1, False, True)
    torch.manual_seed(0)
    with aten.active(), aten.recorded() as passes, pytest.warns(UserWarning, match="return_debug_mask"):
        got = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.1, False, True)
    assert passes == [] and torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@KERNELS
def test_nothing_waits_for_the_gpu(kernel):
    tensors = qkv()
    dout = torch.randn_like(tensors[0])
    with aten.active(), sdpa_kernel(kernel):
        for dropout_p in (0.0, 0.3):
            torch.autograd.grad(F.scaled_dot_product_attention(*tensors, dropout_p=dropout_p), tensors, dout)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch.autograd.grad(F.scaled_dot_product_attention(*tensors, dropout_p=dropout_p), tensors, dout)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@KERNELS
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_in_a_cuda_graph(kernel, dropout_p):
    """Each replay draws other bits, and its gradients are those of its own."""
    tensors = qkv()
    dout = torch.randn_like(tensors[0])

    def both():
        out = F.scaled_dot_product_attention(*tensors, dropout_p=dropout_p)
        return out, *torch.autograd.grad(out, tensors, dout)

    with aten.active(), sdpa_kernel(kernel), aten.recorded() as passes:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = both()
        graph.replay()
        first = [tensor.clone() for tensor in results]
        graph.replay()
        second = [tensor.clone() for tensor in results]
    assert sorted(passes) == ["backward"] * 2 + ["forward"] * 2
    assert torch.equal(first[0], second[0]) == (dropout_p == 0)
    # out is linear in v: <out, dout> = <v, dv> whatever the bits, if they are the same in both passes.
    for out, *_, dv in (first, second):
        torch.testing.assert_close(
            (out.float() * dout.float()).sum(), (tensors[2].float() * dv.float()).sum(), rtol=2e-2, atol=2.0
        )


@pytest.mark.usefixtures("fresh_compiler")
def test_cudagraph_trees():
    """torch.compile with mode="reduce-overhead" records outputs that live in no graph's pool."""
    tensors = qkv()
    expected = flash_attn_ext.scaled_dot_product_attention(*tensors, is_causal=True)
    gradients = torch.autograd.grad(expected.float().sum(), tensors)
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 1.0, mode="reduce-overhead"
    )
    with aten.active():
        for _ in range(4):
            out = compiled(*tensors)
            got = torch.autograd.grad(out.float().sum(), tensors)
    torch.testing.assert_close(out, expected, **CLOSE)
    for ours, want in zip(got, gradients, strict=True):
        torch.testing.assert_close(ours, want, **CLOSE)
