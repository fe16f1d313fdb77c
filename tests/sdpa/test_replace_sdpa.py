"""replace_sdpa(): unmodified models run on ours, with PyTorch's outputs and gradients."""

import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import flash_attn_ext
from flash_attn_ext import replace_sdpa
from flash_attn_ext.integrations.torch_sdpa import SdpaReplacement
from support.errors import assert_rule, compare


def nodes_behind(tensor: torch.Tensor) -> set[str]:
    """Names of the autograd nodes that made a tensor."""
    names, seen, stack = set(), set(), [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        stack.extend(parent for parent, _ in node.next_functions)
    return names


def ran_on_ours(tensor: torch.Tensor) -> bool:
    return any("FlashAttentionFunction" in name for name in nodes_behind(tensor))


def qkv(backend, *shape: int):
    shape = shape or (2, 3, 33, 16)
    return [torch.randn(shape, device=backend.device, requires_grad=True) for _ in range(3)]


def test_calls_inside_are_ours_and_outside_are_not(backend):
    q, k, v = qkv(backend)
    before = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with replace_sdpa():
        inside = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        by_torch_name = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    after = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert [ran_on_ours(out) for out in (before, inside, by_torch_name, after)] == [False, True, True, False]
    torch.testing.assert_close(inside, before)


def test_keywords_and_positions(backend):
    q, k, v = qkv(backend)
    mask = torch.rand(33, 33, device=backend.device) < 0.7
    with replace_sdpa():
        positional = F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.3, enable_gqa=True)
        keywords = F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.equal(positional, keywords)
    torch.testing.assert_close(positional, F.scaled_dot_product_attention(q, k, v, mask, scale=0.3))


def test_other_functions_are_untouched(backend):
    x = torch.randn(4, 4, device=backend.device)
    expected = (x @ x).softmax(-1)
    with replace_sdpa():
        assert torch.equal((x @ x).softmax(-1), expected)


def run_model(model, arguments, *, replaced: bool, grad: bool = True):
    model.zero_grad()
    with replace_sdpa() if replaced else warnings.catch_warnings():
        out = model(*arguments)
    out = out[0] if isinstance(out, tuple) else out
    if not grad:
        return [out]
    out.square().mean().backward()
    return [out, *(parameter.grad.clone() for parameter in model.parameters())]


def encoder_layer(backend, **options):
    torch.manual_seed(3)
    options = dict(dropout=0.0, batch_first=True) | options
    return nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, **options).to(backend.device)


class Attention(nn.Module):
    """nn.MultiheadAttention as models call it."""

    def __init__(self, **call_options):
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)
        self.call_options = call_options

    def forward(self, x, *memory):
        source = memory[0] if memory else x
        return self.inner(x, source, source, need_weights=False, **self.call_options)


def causal_mask(length: int, device: str) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, device=device)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masking", ["none", "causal", "padding", "causal+padding"])
def test_transformer_encoder_layer(masking, norm_first, training, backend):
    model = encoder_layer(backend, norm_first=norm_first).train(training)
    x = torch.randn(2, 33, 32, device=backend.device)
    mask = causal_mask(33, backend.device) if "causal" in masking else None
    padding = None
    if "padding" in masking:
        # As a float mask beside a float causal mask: PyTorch wants both of one kind.
        padding = torch.zeros(2, 33, device=backend.device)
        padding[1, 20:] = -float("inf")
    arguments = (x, mask, padding, masking == "causal")
    ours = run_model(model, arguments, replaced=True)
    theirs = run_model(model, arguments, replaced=False)
    assert ran_on_ours(ours[0])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "boolean mask", "padding"])
def test_multihead_attention(kind, training, backend):
    options = {}
    if kind == "boolean mask":
        # nn.MultiheadAttention hides where True; it inverts the mask before it calls the functional.
        options["attn_mask"] = torch.rand(33, 33, device=backend.device) < 0.3
    if kind == "padding":
        options["key_padding_mask"] = torch.arange(33, device=backend.device).expand(2, 33) >= 20
    model = Attention(**options).to(backend.device).train(training)
    x = torch.randn(2, 33, 32, device=backend.device)
    arguments = (x, torch.randn(2, 50, 32, device=backend.device)) if kind == "cross" else (x,)
    ours = run_model(model, arguments, replaced=True)
    theirs = run_model(model, arguments, replaced=False)
    assert ran_on_ours(ours[0])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("build", [encoder_layer, lambda backend: Attention().to(backend.device)], ids=["layer", "mha"])
def test_inference(build, backend):
    """eval() under no_grad is where PyTorch has a fused path of its own that never calls the functional."""
    model = build(backend).eval()
    x = torch.randn(2, 33, 32, device=backend.device)
    with torch.no_grad():
        ours = run_model(model, (x,), replaced=True, grad=False)
        theirs = run_model(model, (x,), replaced=False, grad=False)
    torch.testing.assert_close(ours[0], theirs[0])


def test_dropout_in_training(backend):
    """Other bits than PyTorch's, but the seed decides them."""
    model = encoder_layer(backend, dropout=0.3).train()
    x = torch.randn(2, 33, 32, device=backend.device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(run_model(model, (x,), replaced=True)[0])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_nesting(backend):
    q, k, v = qkv(backend)
    with replace_sdpa():
        with replace_sdpa():
            assert ran_on_ours(F.scaled_dot_product_attention(q, k, v))
        assert ran_on_ours(F.scaled_dot_product_attention(q, k, v))
    assert not ran_on_ours(F.scaled_dot_product_attention(q, k, v))


def test_an_exception_restores(backend):
    q, k, v = qkv(backend)

    class Stop(Exception):
        pass

    with pytest.raises(Stop), replace_sdpa():
        raise Stop
    assert not ran_on_ours(F.scaled_dot_product_attention(q, k, v))


HELD = [F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention]


@pytest.mark.parametrize("held", HELD, ids=["function", "operator"])
def test_names_held_elsewhere(held, backend):
    """Not by a module: where install_sdpa does not find them."""
    with replace_sdpa():
        assert ran_on_ours(held(*qkv(backend)))


def test_process_wide(backend):
    q, k, v = qkv(backend)
    flash_attn_ext.install_sdpa()
    try:
        assert ran_on_ours(F.scaled_dot_product_attention(q, k, v))
    finally:
        flash_attn_ext.uninstall_sdpa()
    assert not ran_on_ours(F.scaled_dot_product_attention(q, k, v))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_under_compile(where, backend):
    """The context may be entered by the compiled function or around it; the graph holds our operator."""
    graphs: list[str] = []

    def recording_backend(graph_module, example_inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph_module.print_readable(print_output=False))
        return aot_eager(graph_module, example_inputs)

    def attend(q, k, v):
        if where == "outside":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2
        with replace_sdpa():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    compiled = torch.compile(attend, fullgraph=True, backend=recording_backend)
    tensors = qkv(backend)
    with replace_sdpa() if where == "outside" else warnings.catch_warnings():
        out = compiled(*tensors)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected, exact = (F.scaled_dot_product_attention(*each, is_causal=True) * 2 for each in (tensors, doubles))
    ours, theirs, exactly = (
        [result, *torch.autograd.grad(result.square().sum(), leaves)]
        for result, leaves in ((out, tensors), (expected, tensors), (exact, doubles))
    )
    # The rule and not a tolerance: the first query's gradient is 0, and float32's is what rounding leaves of that.
    outputs = zip(("out", "dq", "dk", "dv"), ours, theirs, exactly, strict=True)
    assert_rule({name: compare(*results) for name, *results in outputs})
    assert any("flash_attn_ext" in graph for graph in graphs)


STARTS = {
    "Tensor.backward": lambda loss, leaves: loss.backward(),
    "autograd.backward": lambda loss, leaves: torch.autograd.backward(loss),
    "autograd.grad": lambda loss, leaves: torch.autograd.grad(loss, leaves),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, start, backend):
    """What a backward pass computes again is ours, too, on whatever thread it runs."""
    if use_reentrant and start == "autograd.grad":
        pytest.skip("PyTorch's checkpoint(use_reentrant=True) does not take torch.autograd.grad")
    outs = []

    def attend(*tensors):
        outs.append(F.scaled_dot_product_attention(*tensors))
        return outs[-1]

    run_engine = torch.autograd._engine_run_backward
    leaves = qkv(backend)
    with replace_sdpa(), set_checkpoint_early_stop(False):  # which would end the second call before it returns
        STARTS[start](checkpoint(attend, *leaves, use_reentrant=use_reentrant).sum(), leaves)
    assert len(outs) == 2 and all(ran_on_ours(out) for out in (outs if not use_reentrant else outs[1:]))
    assert torch.autograd._engine_run_backward is run_engine


def test_checkpointing_in_nested_contexts(backend):
    """The innermost context decides in the backward pass, too."""
    asked = []

    class Asked(SdpaReplacement):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.scaled_dot_product_attention:
                asked.append(self.fallback)
            return super().__torch_function__(func, types, args, kwargs)

    with Asked("torch"), Asked("raise"):
        checkpoint(F.scaled_dot_product_attention, *qkv(backend), use_reentrant=False).sum().backward()
    assert asked == ["raise", "raise"]


def test_an_engine_that_somebody_else_puts_in_place_inside():
    """It stays, and is called once for each backward pass."""
    calls = []
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    before = torch.autograd._engine_run_backward
    try:
        with replace_sdpa():
            ours = torch.autograd._engine_run_backward

            def theirs(*args, **kwargs):
                calls.append(len(calls))
                return ours(*args, **kwargs)

            torch.autograd._engine_run_backward = theirs
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        assert len(calls) == 1
        with replace_sdpa():
            F.scaled_dot_product_attention(q, q, q).sum().backward()
        assert len(calls) == 2 and torch.autograd._engine_run_backward is theirs
    finally:
        torch.autograd._engine_run_backward = before


def test_an_engine_that_somebody_else_puts_back_inside():
    """Later contexts are in force in backward passes all the same."""
    before = torch.autograd._engine_run_backward
    with replace_sdpa():
        torch.autograd._engine_run_backward = before
    with replace_sdpa():
        assert torch.autograd._engine_run_backward is not before
    assert torch.autograd._engine_run_backward is before


@pytest.mark.parametrize("name", ["replace_sdpa", "install_sdpa", "uninstall_sdpa", "SdpaReplacement"])
def test_pickles_and_imports_name_the_package(name):
    """Whichever of its modules has the definition."""
    public = pickle.loads(f"cflash_attn_ext.integrations.torch_sdpa\n{name}\n.".encode())
    assert public is getattr(flash_attn_ext, name, SdpaReplacement)
    assert pickle.loads(pickle.dumps(public)) is public
