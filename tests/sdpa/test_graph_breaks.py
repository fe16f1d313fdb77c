"""Models that torch.compile cannot take whole, while calls are replaced: ours, with the results of PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, overrides
from torch.utils.checkpoint import checkpoint

import flash_attn_ext
from flash_attn_ext import replace_sdpa
from flash_attn_ext.integrations._fused_inference import fused_inference
from support.frames import attention_ranges, compiled_inner_functions, given_up
from support.params import for_gpus

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH, HEADS, LENGTH = 32, 4, 9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    """Of a GPT."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.log = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class LoggingBlocks(Blocks):
    """Dynamo gives up a loop with a graph break in it."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            self.log.append(x.abs().max().item())
        return x


class PrintingBlocks(Blocks):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            print(x.mean())
        return x


class BreakingBlocks(Blocks):
    """Outside of a loop, Dynamo goes on after a graph break."""

    def forward(self, x):
        x = self.blocks[0](x)
        self.log.append(x.abs().max().item())
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.blocks[2](x)


class Masked(nn.Module):
    """A module of PyTorch with masks of two kinds, about which it warns: a graph break inside of PyTorch."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def masks(self, x):
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        return causal, torch.arange(LENGTH, device=x.device).expand(x.shape[:2]) >= LENGTH - 2


class MaskedAttention(Masked):
    def forward(self, x):
        causal, padding = self.masks(x)
        return self.inner(x, x, x, attn_mask=causal, key_padding_mask=padding, need_weights=False)[0]


class MaskedLayer(Masked):
    def forward(self, x):
        causal, padding = self.masks(x)
        return self.inner(x, src_mask=causal, src_key_padding_mask=padding)


MODELS = {
    "logging in a loop": LoggingBlocks,
    "printing in a loop": PrintingBlocks,
    "breaks outside of a loop": BreakingBlocks,
    "MultiheadAttention": lambda: MaskedAttention(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
    "TransformerEncoderLayer": lambda: MaskedLayer(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    ),
}


def run(model: nn.Module, function, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and in training the gradients."""
    with torch.set_grad_enabled(model.training):
        out = function(x)
    if not model.training:
        return [out]
    return [out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
# On the CPU, all calls of a model are taken, with either fallback. Every way of replacing has both in the tests below.
@pytest.mark.parametrize(
    ("compiler", "training", "fallback"),
    [
        ("eager", False, "torch"),
        ("aot_eager", True, "raise"),
        *for_gpus([("eager", False, "raise"), ("aot_eager", True, "torch")]),
    ],
)
@pytest.mark.parametrize("kind", MODELS)
def test_models(kind, compiler, training, replaced, device):
    model = MODELS[kind]().to(device).train(training)
    x = torch.randn(2, LENGTH, WIDTH, device=device)
    expected = run(model, model, x)
    with replaced():
        compiled = torch.compile(model, backend=compiler)
        for _ in range(2):
            for ours, theirs in zip(run(model, compiled, x), expected, strict=True):
                torch.testing.assert_close(ours, theirs)
        ours, theirs = attention_ranges(lambda: compiled(x))
    assert ours == (3 if isinstance(model, Blocks) else 1) and theirs == 0
    assert all(type(logged) is float for logged in getattr(model, "log", []))


@pytest.mark.parametrize("kind", ["blocks", "MultiheadAttention", "TransformerEncoderLayer"])
def test_without_a_break_there_is_one_graph(kind, replaced, device):
    build = {
        "blocks": Blocks,
        "MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.0, batch_first=True),
    }[kind]
    model = build().to(device)
    x = torch.randn(2, LENGTH, WIDTH, device=device)
    arguments = (x, x, x) if kind == "MultiheadAttention" else (x,)
    options = dict(need_weights=False) if kind == "MultiheadAttention" else {}
    expected = model(*arguments, **options)
    with replaced():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*arguments, **options), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert attention_ranges(lambda: compiled(*arguments, **options))[1] == 0


def test_other_functions_in_a_frame_that_is_given_up(replaced, device):
    def frame(x):
        for _ in range(1):
            torch._dynamo.graph_break()
            found = x.sin(), x.cos(), x.exp(), x.shape, x.unflatten(0, (1, -1)), x.sum().item()
        return found

    x = torch.randn(3, device=device)
    with replaced():
        found = torch.compile(frame, backend="eager")(x)
    assert [type(one) for one in found] == [type(one) for one in frame(x)]
    torch.testing.assert_close(found, frame(x))


def attend(*tensors):
    return F.scaled_dot_product_attention(*tensors, is_causal=True)


def qkv(device) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 5, 8, device=device, requires_grad=True) for _ in range(3)]


def attend_with_gradients(*tensors):
    return torch.autograd.grad(attend(*tensors).sum(), tensors)


def attend_again_in_the_backward_pass(*tensors):
    out = checkpoint(attend, *tensors, use_reentrant=False)
    out.sin().sum().backward()
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return out, gradients


@pytest.mark.parametrize("function", [attend, attend_with_gradients, attend_again_in_the_backward_pass])
def test_no_inner_function_is_compiled(function, replaced, device):
    tensors = qkv(device)
    expected = function(*tensors)
    with replaced(), compiled_inner_functions() as names:
        frame = given_up(function)
        for _ in range(2):
            torch.testing.assert_close(frame(*tensors), expected)
        ours, theirs = attention_ranges(lambda: frame(*tensors))
    assert (ours, theirs) == (2 if function is attend_again_in_the_backward_pass else 1, 0)
    assert names == []


def enter_twice(*tensors):
    with replace_sdpa():
        first = attend(*tensors)
    with replace_sdpa(fallback="torch"):
        return first, attend(*tensors)


def enter_around_a_break(*tensors):
    with replace_sdpa():
        first = attend(*tensors)
        torch._dynamo.graph_break()
        return first, attend(*tensors)


def install_twice(*tensors):
    flash_attn_ext.install_sdpa(fallback="torch")
    first = attend(*tensors)
    flash_attn_ext.install_sdpa()
    second = attend(*tensors)
    flash_attn_ext.uninstall_sdpa()
    return first, second


@pytest.mark.parametrize("compile_frame", [given_up, lambda function: torch.compile(function, backend="eager")])
@pytest.mark.parametrize("function", [enter_twice, enter_around_a_break, install_twice])
def test_what_a_frame_switches_on_it_switches_off(function, compile_frame, device):
    tensors, theirs = qkv(device), F.scaled_dot_product_attention
    expected = attend(*tensors)
    with compiled_inner_functions() as names:
        frame = compile_frame(function)
        for _ in range(2):
            torch.testing.assert_close(frame(*tensors), (expected, expected))
        assert attention_ranges(lambda: frame(*tensors)) == (2, 0)
    assert names == []
    assert fused_inference.users == 0 and torch.backends.mha.get_fastpath_enabled()
    assert overrides._get_current_function_mode_stack() == [] and F.scaled_dot_product_attention is theirs


def test_a_block_inside_decides_in_compiled_code_too(installed, device):
    block = replace_sdpa()
    block.attention = lambda query, *args, **kwargs: torch.full_like(query, 7.0)
    with block:
        out = torch.compile(attend, backend="eager", fullgraph=True)(*qkv(device))
    assert (out == 7.0).all()


def test_what_was_compiled_before_is_compiled_again(replaced, device):
    tensors = qkv(device)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expected = compiled(*tensors)
    with replaced():
        torch.testing.assert_close(compiled(*tensors), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        assert attention_ranges(lambda: compiled(*tensors)) == (1, 0)
    assert attention_ranges(lambda: compiled(*tensors))[0] == 0


@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_function_itself(fullgraph, replaced, device):
    tensors = qkv(device)
    expected = F.scaled_dot_product_attention(*tensors)
    with replaced():
        compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=fullgraph)
        torch.testing.assert_close(compiled(*tensors), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert attention_ranges(lambda: compiled(*tensors)) == (1, 0)
