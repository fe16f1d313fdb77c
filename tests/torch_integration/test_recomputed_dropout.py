"""Compiled backward passes that compute parts of the forward pass again drop what the forward pass dropped."""

import functools

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_attn_ext
from flash_attn_ext.reference import attention_reference
from support.params import for_gpus

DRAW = torch.ops.aten.randint.generator
FORWARD = torch.ops.flash_attn_ext.attention_forward.default
LENGTH, HEAD_DIM, DROPOUT = 48, 16, 0.4
BUDGETS = [0.0, 0.1, 0.3, 0.7, 1.0]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_ext.attention(q, k, v, dropout_p=DROPOUT)


def ours_by_pytorchs_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_ext.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT)


def ours_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu_seqlens = torch.tensor([0, LENGTH], dtype=torch.int32, device=q.device)
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
    out = flash_attn_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, dropout_p=DROPOUT)
    return out.transpose(0, 1).unsqueeze(0)


def pytorchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT)


OURS = (ours, ours_by_pytorchs_name, ours_packed)


def layer(attention, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The next x, and the layer's weights after dropout: v gets the columns of an identity beside its own."""
    identity = torch.eye(LENGTH, device=x.device, dtype=x.dtype).expand(*v.shape[:2], -1, -1)
    out = attention(x.sin(), k.cos(), torch.cat([v, identity], dim=-1))
    return x + out[..., :HEAD_DIM].tanh(), out[..., HEAD_DIM:].detach()


def layers(attentions, wrap, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    weights = []
    for attention in attentions:
        x, of_layer = wrap(layer)(attention, x, k, v)
        weights.append(of_layer)
    return x, *weights


def unwrapped(function):
    return function


def checkpointed(function):
    return functools.partial(checkpoint, function, use_reentrant=False)


def selectively_checkpointed(function):
    """Attention is computed again, and by this policy its seed too."""

    def policy(_context, operator, *_arguments, **_keywords):
        recomputed = operator in (FORWARD, DRAW)
        return CheckpointPolicy.MUST_RECOMPUTE if recomputed else CheckpointPolicy.PREFER_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


def assert_right_gradients(attentions, wrap, compiler, device: str) -> None:
    """Of the compiled layers, against the formula with the weights that the compiled forward pass dropped."""
    compiled = torch.compile(functools.partial(layers, attentions, wrap), fullgraph=True, backend=compiler)
    tensors = [torch.randn(1, 2, LENGTH, HEAD_DIM, device=device, requires_grad=True) for _ in range(3)]
    out, *weights = compiled(*tensors)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, dout)
    kept = iter([of_layer > 0 for of_layer in weights])

    def formula(q, k, v):
        return attention_reference(q, k, v, dropout_p=DROPOUT, dropout_mask=next(kept), return_lse=False)

    expected_out, *_ = layers([formula] * len(weights), unwrapped, *tensors)
    torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-4)
    for gradient, expected in zip(found, torch.autograd.grad(expected_out, tensors, dout), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)


def budget_of(budget: float):
    return torch._functorch.config.patch(activation_memory_budget=budget)


@pytest.mark.parametrize("budget", [0.0, *for_gpus([0.3])])
def test_inductor(budget, device):
    """Of other budgets the partitioner makes other graphs, which test_min_cut runs on the CPU."""
    with budget_of(budget):
        assert_right_gradients(OURS, unwrapped, "inductor", device)


def test_inductor_with_pytorchs_attention(device):
    """The same test of PyTorch's own attention. With lower budgets its gradients are wrong on a CPU."""
    with budget_of(0.7):
        assert_right_gradients([pytorchs], unwrapped, "inductor", device)


def min_cut(graphs: list):
    """The partitioner of Inductor, without its changes of a graph. Forward and backward graphs come into `graphs`."""

    def collect(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=collect, bw_compiler=collect, partition_fn=min_cut_rematerialization_partition)


def calls(graph, operator) -> int:
    """Those that are made with the generator's state restored count too."""
    return sum(operator in (node.target, *node.args[:2]) for node in graph.graph.nodes)


@pytest.mark.parametrize("budget", BUDGETS)
def test_min_cut(budget, device):
    graphs = []
    with budget_of(budget):
        assert_right_gradients(OURS, unwrapped, min_cut(graphs), device)
    forward, backward = graphs
    assert calls(forward, DRAW) == len(OURS)
    assert calls(backward, DRAW) == (len(OURS) if budget == 0 else 0)
    if budget < 0.3:
        assert calls(backward, FORWARD) > 0
    if budget == 1:
        assert calls(backward, FORWARD) == 0


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("wrap", [checkpointed, selectively_checkpointed])
@pytest.mark.parametrize("compiler", ["aot_eager", "min_cut"])
def test_checkpoints(compiler, wrap, budget, device):
    graphs = []
    with budget_of(budget):
        assert_right_gradients(OURS, wrap, min_cut(graphs) if compiler == "min_cut" else compiler, device)
    if graphs:
        assert calls(graphs[1], FORWARD) > 0


@pytest.mark.parametrize(
    ("attention", "wrap"), [(ours, selectively_checkpointed), *for_gpus([(pytorchs, checkpointed)])]
)
def test_checkpoints_in_inductor(attention, wrap, device):
    assert_right_gradients([attention] * 2, wrap, "inductor", device)


def test_checkpoints_of_pytorchs_attention(device):
    """The same test of PyTorch's own attention, without the code that Inductor makes of its graphs."""
    assert_right_gradients([pytorchs] * 2, checkpointed, min_cut([]), device)


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_bits_are_those_of_eager_calls(compiler, device):
    function = functools.partial(layers, OURS, unwrapped)
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    tensors = [torch.randn(1, 2, LENGTH, HEAD_DIM, device=device, requires_grad=True) for _ in range(3)]
    results = []
    for attempt in (function, compiled):
        torch.manual_seed(5)
        results.append([*attempt(*tensors), *attempt(*tensors)])
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_vmap(randomness, device):
    """In a compiled function as outside: the same bits, and the same refusal."""

    def function(q, k, v):
        return torch.vmap(ours, in_dims=(0, None, None), randomness=randomness)(q, k, v)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 2, 8, 4, device=device).expand(3, 1, 2, 8, 4)
    k, v = (torch.randn(1, 2, 8, 4, device=device) for _ in range(2))
    if randomness == "error":
        for attempt in (function, compiled):
            with pytest.raises(RuntimeError, match="randomness"):
                attempt(q, k, v)
        return
    results = []
    for attempt in (function, compiled):
        torch.manual_seed(3)
        results.append(attempt(q, k, v))
    assert torch.equal(*results)
    assert torch.equal(results[0][0], results[0][1]) == (randomness == "same")
