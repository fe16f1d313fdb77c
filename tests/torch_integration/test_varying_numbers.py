"""Numbers that change from call to call of a compiled function: it is compiled once more, and then takes any."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flash_attn_ext

STEPS = 10

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def attention(tensors, **options) -> Tensor:
    return flash_attn_ext.attention(*tensors, **options)


def attention_varlen(tensors, **options) -> Tensor:
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in tensors)
    cu_seqlens = torch.tensor([0, 7, q.shape[0]], dtype=torch.int32, device=q.device)
    return flash_attn_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **options)


def scaled_dot_product_attention(tensors, **options) -> Tensor:
    return flash_attn_ext.scaled_dot_product_attention(*tensors, **options)


def replaced(tensors, **options) -> Tensor:
    with flash_attn_ext.replace_sdpa():
        return F.scaled_dot_product_attention(*tensors, **options)


def checkpointed(tensors, **options) -> Tensor:
    return checkpoint(lambda *t: attention(t, **options), *tensors, use_reentrant=False)


def with_cache(tensors, **options) -> Tensor:
    q, k, v = (t.detach() for t in tensors)
    out = flash_attn_ext.attention_with_kvcache(q, k, v, cache_seqlens=11, **options)
    return out + 0 * sum(t.sum() for t in tensors)


def qkv(device: str, length: int = 20) -> list[Tensor]:
    return [torch.randn(2, 2, length, 16, device=device, requires_grad=True) for _ in range(3)]


def compilations(function, steps: list, tensors: list[Tensor], compiler: str = "aot_eager", **options) -> int:
    """How often ``function(tensors, step)`` is compiled; each time with the results and gradients of the eager call."""
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    for step in steps:
        results = []
        for attempt in (function, compiled):
            torch.manual_seed(3)
            out = attempt(tensors, step)
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        for eager, found in zip(*results, strict=True):
            torch.testing.assert_close(found, eager)
    return counter.frame_count


def step_of(name: str, index: int) -> float:
    return 0.05 + 0.09 * index if name != "softcap" else 1.5 + index


FUNCTIONS = {
    attention: ("scale", "softcap", "dropout_p"),
    attention_varlen: ("scale", "softcap", "dropout_p"),
    scaled_dot_product_attention: ("scale", "dropout_p"),
    replaced: ("scale", "dropout_p"),
    checkpointed: ("scale", "dropout_p"),
    with_cache: ("scale", "softcap"),
}


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
@pytest.mark.parametrize("call", FUNCTIONS)
def test_a_number_that_varies(call, name, device):
    if name not in FUNCTIONS[call]:
        return
    steps = [step_of(name, index) for index in range(STEPS)]
    assert compilations(lambda tensors, step: call(tensors, **{name: step}), steps, qkv(device)) == 2


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_all_at_once(compiler, device):
    def function(tensors, step):
        return attention(tensors, scale=step[0], softcap=step[1], dropout_p=step[2]).tanh()

    steps = [tuple(step_of(name, index) for name in ("scale", "softcap", "dropout_p")) for index in range(4)]
    assert compilations(function, steps, qkv(device), compiler) == 2


def test_a_window_may_vary_too(device):
    """What numbers are measured by."""
    assert compilations(lambda tensors, step: attention(tensors, window=step), list(range(2, 8)), qkv(device)) == 2


def test_dropout_that_begins_and_ends(device):
    """0 and 1 have graphs of their own: nothing is drawn there."""
    steps = [0.0, 0.1, 0.2, 0.3, 0.0, 1.0, 0.4, 0.0, 1.0]
    assert compilations(lambda tensors, step: attention(tensors, dropout_p=step), steps, qkv(device)) <= 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, scale):
        return flash_attn_ext.attention(q, k, v, scale=scale)

    tensors = [t.detach() for t in qkv(device)]
    with mode():
        for scale in (0.3, 0.4, 0.5, 0.6):
            torch.testing.assert_close(compiled(*tensors, scale), attention(tensors, scale=scale))
    assert counter.frame_count == 2


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_a_scale_of_the_length(compiler, device):
    """As models have it that scale scores by how many keys there are. PyTorch has no symbol of a logarithm."""

    def function(tensors, length):
        q, k, v = tensors
        k, v = k[:, :, :length], v[:, :, :length]
        return attention((q, k, v), scale=0.1 * k.shape[2] ** 0.5)

    assert compilations(function, [17, 18, 12, 19], qkv(device), compiler) == 2


def test_a_number_out_of_range(device):
    tensors = [t.detach() for t in qkv(device)]
    compiled = torch.compile(attention, backend="aot_eager")
    for softcap in (1.0, 2.0, 3.0):
        compiled(tensors, softcap=softcap)
    with pytest.raises(ValueError, match=r"softcap is -1, expected a finite number above 0"):
        compiled(tensors, softcap=-1.0)


def test_a_constant_stays_one(device):
    """Numbers that are the same in each call are in the graph as they are."""
    graphs = []

    def collect(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=collect)
    with torch.no_grad():
        torch.compile(attention, backend=backend)(qkv(device), scale=0.25)
    (call,) = [node for node in graphs[0].graph.nodes if "attention_forward" in str(node.target)]
    assert call.target is torch.ops.flash_attn_ext.attention_forward.default and 0.25 in call.args
