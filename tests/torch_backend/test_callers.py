"""Who reaches our kernels through the operators, without a mode or another name: PyTorch's own callers of attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from support import aten

FUSED = {
    "cpu": [SDPBackend.FLASH_ATTENTION],
    "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
}
EACH_KERNEL = pytest.mark.parametrize(
    ("device", "kernel"),
    [(device, kernel) for device, kernels in FUSED.items() for kernel in kernels],
    indirect=["device"],
)


def dtype_of(device: str) -> torch.dtype:
    """That every fused kernel takes."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def qkv(device: str, shape=(2, 3, 37, 16)) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype_of(device), device=device, requires_grad=True) for _ in range(3)]


def assert_ours(function, *inputs, passes: list[str]) -> None:
    """`function` gives the same with the switch as without, to the precision of its dtype, and runs those passes."""

    def results():
        out = function(*inputs)
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = torch.autograd.grad(out.float().square().sum(), leaves) if leaves and out.requires_grad else ()
        return [out.detach(), *gradients]

    torch.manual_seed(0)
    expected = results()
    with aten.active(), aten.recorded() as ran:
        torch.manual_seed(0)
        got = results()
    assert ran == passes
    tolerance = dict(rtol=3e-2, atol=3e-2) if got[0].dtype == torch.bfloat16 else {}
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


BOTH = ["forward", "backward"]


@EACH_KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sdpa(kernel, device, dtype):
    if device == "cuda" and dtype == torch.float32 and kernel != SDPBackend.EFFICIENT_ATTENTION:
        pytest.skip(f"PyTorch has no float32 kernel for {kernel}")
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in qkv(device))
    expected = flash_attn_ext.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    with aten.active(), sdpa_kernel(kernel), aten.recorded() as passes:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert torch.equal(out, expected)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), gradients))
    assert passes == BOTH


def test_sdpa_of_a_head_dim_that_is_padded(device):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert_ours(F.scaled_dot_product_attention, *qkv(device, (2, 3, 40, 20)), passes=BOTH)


def test_sdpa_as_pytorch_chooses(device):
    """On a GPU too, where cuDNN's kernel may come first."""
    assert_ours(F.scaled_dot_product_attention, *qkv(device, (2, 4, 64, 64)), passes=BOTH)


@pytest.mark.parametrize("masks", ["bool", "float", "hides a row"])
def test_sdpa_with_a_mask(masks, device):
    mask = torch.rand(37, 37, device=device) < 0.7
    if masks == "hides a row":
        mask[3] = False
    if masks == "float":
        mask = torch.randn(37, 37, device=device, dtype=dtype_of(device))
    kernels = [kernel for kernel in FUSED[device] if kernel != SDPBackend.CUDNN_ATTENTION]  # whose gradients may be NaN
    with sdpa_kernel(kernels):
        assert_ours(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *qkv(device), passes=BOTH)


def test_sdpa_with_a_mask_that_requires_grad(device):
    if device == "cpu":
        pytest.skip("PyTorch's unfused path takes it, which is no operator of ours")
    mask = torch.randn(2, 1, 40, 40, device=device, dtype=dtype_of(device), requires_grad=True)
    inputs = (*qkv(device, (2, 3, 40, 16)), mask)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert_ours(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *inputs, passes=BOTH)


def test_dropout_repeats(device):
    """With the same seed of PyTorch's generator, the bits of flash_attn_ext."""
    if device == "cpu":
        pytest.skip("PyTorch's unfused path takes it, which is no operator of ours")
    q, k, v = qkv(device)
    torch.manual_seed(3)
    expected = flash_attn_ext.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    for kernel in FUSED[device]:
        with aten.active(), sdpa_kernel(kernel):
            torch.manual_seed(3)
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
            assert torch.equal(out, expected)
            assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), gradients))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("module", [nn.TransformerEncoderLayer, nn.MultiheadAttention])
def test_modules(module, training, device):
    """Whose fused inference path would call no operator of attention."""
    options = dict(batch_first=True, dropout=0.0, device=device, dtype=dtype_of(device))
    model = (
        nn.TransformerEncoderLayer(32, 4, 64, **options)
        if module is nn.TransformerEncoderLayer
        else nn.MultiheadAttention(32, 4, **options)
    ).train(training)
    x = torch.randn(2, 33, 32, device=device, dtype=dtype_of(device), requires_grad=training)

    def run(x):
        with torch.set_grad_enabled(training):
            return model(x) if module is nn.TransformerEncoderLayer else model(x, x, x, need_weights=False)[0]

    assert_ours(run, x, passes=BOTH if training else ["forward"])


def test_modules_with_nested_tensors(device):
    """They have their fused inference path, as before."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device=device).eval()
    nested = torch.nested.nested_tensor([torch.randn(n, 32, device=device) for n in (5, 9)])
    with torch.no_grad():
        expected = layer(nested)
        with aten.active():
            out = layer(nested)
    for got, want in zip(out.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(got, want)


def test_torchscript(device):
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    assert_ours(torch.jit.script(Attention()), *qkv(device), passes=BOTH)


def test_torchscript_of_a_module(device):
    model = torch.jit.script(nn.MultiheadAttention(32, 4, batch_first=True, device=device, dtype=dtype_of(device)))
    x = torch.randn(2, 33, 32, device=device, dtype=dtype_of(device), requires_grad=True)
    assert_ours(lambda x: model(x, x, x, need_weights=False)[0], x, passes=BOTH)


@pytest.mark.parametrize("compiled_before", [True, False])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(compiler, compiled_before, fresh_compiler, device):
    """inductor asserts the sizes and strides that PyTorch's meta kernels declare. An earlier graph holds the operator
    too."""
    inputs = qkv(device, (2, 3, 40, 16))
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True).cos(), backend=compiler, fullgraph=True
    )
    if compiled_before:
        compiled(*inputs)
    assert_ours(compiled, *inputs, passes=BOTH)


def test_inductor_with_a_mask(fresh_compiler, device):
    """Queries whose number is no multiple of 32, keys whose number is no multiple of 16."""
    mask = torch.randn(2, 1, 37, 21, device=device, dtype=dtype_of(device), requires_grad=device == "cuda")
    q, k, v = qkv(device)
    k, v = (tensor.detach()[:, :, :21].contiguous().requires_grad_() for tensor in (k, v))
    kernel = SDPBackend.FLASH_ATTENTION if device == "cpu" else SDPBackend.EFFICIENT_ATTENTION
    compiled = torch.compile(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m).cos(), fullgraph=True)
    with sdpa_kernel(kernel):
        assert_ours(compiled, q, k, v, mask, passes=BOTH)


@pytest.mark.parametrize("transposed", [True, False])
def test_layouts_in_inductor(transposed, fresh_compiler, device):
    """Of queries that were (B, L, H, D) and are (B, H, L, D)."""

    def function(x):
        q, k, v = x.unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        if not transposed:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    x = torch.randn(2, 33, 192, device=device, dtype=dtype_of(device), requires_grad=True)
    for kernel in FUSED[device]:
        torch._dynamo.reset()
        with sdpa_kernel(kernel):
            assert_ours(torch.compile(function, fullgraph=True), x, passes=BOTH)


def test_exported(fresh_compiler, device):
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    tensors = [tensor.detach() for tensor in qkv(device)]
    program = torch.export.export(Attention(), tuple(tensors)).module()
    assert_ours(program, *tensors, passes=["forward"])


def test_exported_graph_that_holds_the_operator(device):
    """Of a device's own graph, traced before."""
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = [tensor.detach() for tensor in qkv(device)]
    graph = make_fx(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(*tensors)
    assert any("attention" in str(node.target) for node in graph.graph.nodes)
    assert_ours(graph, *tensors, passes=["forward"])


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad"])
def test_transforms(transform, device):
    """PyTorch's rules for the operators: torch.func knows them, and torch.vmap may call them for each slice."""
    q, k, v = (tensor.detach() for tensor in qkv(device, (2, 3, 32, 16)))

    def loss(q):
        return F.scaled_dot_product_attention(q, k, v).float().square().sum()

    transformed = {
        "grad": lambda: torch.func.grad(loss)(q),
        "vmap": lambda: torch.vmap(F.scaled_dot_product_attention)(*(torch.stack([t, 2 * t]) for t in (q, k, v))),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(loss))(torch.stack([q, 2 * q])),
    }[transform]
    expected = transformed()
    with aten.active(), aten.recorded() as passes:
        got = transformed()
    tolerance = dict(rtol=3e-2, atol=3e-2) if got.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got, expected, **tolerance)
    assert set(passes) == set(BOTH if "grad" in transform else BOTH[:1])


def jagged(device: str, dtype=None) -> torch.Tensor:
    rows = [torch.randn(n, 64, device=device, dtype=dtype or dtype_of(device)) for n in (5, 33, 17)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_jagged_tensors(dtype, is_causal, device):
    """On the CPU PyTorch has only an unfused path for them, without causality, which is no operator of ours."""
    if device == "cpu" and is_causal:
        pytest.skip("PyTorch has no attention for them")

    def attend(x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (x, x * 2, x.sin()))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def run():
        x = jagged(device, dtype)
        out = attend(x)
        (gradient,) = torch.autograd.grad(out.values().float().square().sum(), x)
        return out.values().detach(), gradient.values()

    torch.manual_seed(0)
    expected = run()
    with aten.active(), aten.recorded() as passes:
        torch.manual_seed(0)
        got = run()
    assert passes == ([] if device == "cpu" else BOTH)
    tolerance = dict(rtol=3e-2, atol=3e-2) if dtype == torch.bfloat16 else dict(rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("lengths", [(5, 33, 17), (5, 6), (1,), (1, 1, 30)], ids=str)
def test_compiled_jagged_tensors(lengths, fresh_compiler, device):
    """Compiled and eager calls reach the same kernel: in float32 other kernels than ours differ by more."""

    def attend(x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (x, x * 2, x.sin()))
        return F.scaled_dot_product_attention(q, k, v)

    def run(function):
        x = torch.nested.nested_tensor(
            [torch.randn(n, 64, device=device) for n in lengths], layout=torch.jagged, requires_grad=True
        )
        out = function(x)
        (gradient,) = torch.autograd.grad(out.values().square().sum(), x)
        return out.values().detach(), gradient.values()

    results = []
    with aten.active():
        for function in (attend, torch.compile(attend, backend="aot_eager")):
            torch.manual_seed(0)
            with aten.recorded() as passes:
                results.append(run(function))
            assert passes == ([] if device == "cpu" else BOTH)
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def test_strided_nested_tensors(device):
    if device == "cpu":
        pytest.skip("PyTorch has only an unfused path for them on the CPU")
    q = torch.nested.nested_tensor([torch.randn(4, n, 16, device=device, dtype=torch.bfloat16) for n in (5, 33)])
    expected = F.scaled_dot_product_attention(q, q, q)
    with aten.active(), aten.recorded() as passes:
        out = F.scaled_dot_product_attention(q, q, q)
    assert passes == ["forward"]
    for got, want in zip(out.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 0), (8, 4)])
def test_varlen_attn(window, device):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    ends = torch.tensor([0, 5, 38, 55], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(55, 4, 16, device=device, dtype=dtype_of(device), requires_grad=True) for _ in range(3))
    left, right = (None if side < 0 else side for side in window)
    expected, expected_lse = flash_attn_ext.attention_varlen(q, k, v, ends, ends, window=(left, right), return_lse=True)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    with aten.on_device(device), aten.recorded() as passes:
        out, lse = varlen_attn(q, k, v, ends, ends, 33, 33, window_size=window, return_aux=AuxRequest(lse=True))
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), gradients))
    assert passes == BOTH


def test_lower_right_bias(device):
    """PyTorch's CausalBias calls the operators itself, on a GPU."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = qkv(device, (2, 3, 20, 16))
    k, v = (torch.cat([tensor.detach()] * 2, 2).requires_grad_() for tensor in (k, v))
    bias = causal_lower_right(20, 40)
    assert_ours(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias), q, k, v, passes=BOTH)


def test_autocast(device):
    """PyTorch casts before it chooses an operator."""
    tensors = [torch.randn(2, 3, 40, 16, device=device) for _ in range(3)]
    with torch.autocast(device, torch.bfloat16):
        assert_ours(F.scaled_dot_product_attention, *tensors, passes=["forward"])


def test_checkpoint(device):
    from torch.utils.checkpoint import checkpoint

    def run(q, k, v):
        return checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)

    # The second forward pass, which checkpoint breaks off when autograd saves its tensors, is not counted.
    assert_ours(run, *qkv(device), passes=["forward", "backward"])


def test_inference_mode(device):
    """Also where it is the first call, and a call with gradients comes after it."""
    q, k, v = qkv(device)
    with aten.on_device(device):
        with torch.inference_mode():
            F.scaled_dot_product_attention(q, k, v)
            torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0].sum().backward()
