"""Selective activation checkpointing: a policy names our operator, and its forward pass is run again or not."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_attn_ext
from support.cases import Case, make_inputs

FORWARD = torch.ops.flash_attn_ext.attention_forward.default
BACKWARD = torch.ops.flash_attn_ext.attention_backward.default
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.passes = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function in (FORWARD, BACKWARD):
            self.passes.append("forward" if function is FORWARD else "backward")
        return function(*arguments, **(keywords or {}))


def contexts(policy_of_attention: CheckpointPolicy):
    def policy(_context, operator, *_arguments, **_keywords):
        return policy_of_attention if operator is FORWARD else RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def block(q, k, v, bias, dropout_p):
    out, lse = flash_attn_ext.attention(
        q * 2, k, v.sin(), bias=bias, dropout_p=dropout_p, causal="bottom_right", return_lse=True
    )
    return out.cos() + lse[..., None]


def train(device: str, bias, dropout_p: float, wrap) -> list[torch.Tensor]:
    inputs = make_inputs(Case(sq=65, sk=97, d=16, bias=bias), torch.float32, device)
    leaves = inputs.leaves()
    arguments = [leaves.get(name) for name in ("q", "k", "v", "bias")]
    torch.manual_seed(7)
    out = wrap(block)(*arguments, dropout_p)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves.values()))]


def checkpointed(policy: CheckpointPolicy):
    def wrap(function):
        return functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts(policy))

    return wrap


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("bias", [None, "1hqk"])
@pytest.mark.parametrize(("policy", "num_forward"), [(SAVE, 1), (RECOMPUTE, 2)], ids=["saved", "recomputed"])
def test_a_policy_decides(policy, num_forward, bias, dropout_p, device):
    expected = train(device, bias, dropout_p, lambda function: function)
    with Recorder() as recorder:
        watched = train(device, bias, dropout_p, checkpointed(policy))
    assert recorder.passes.count("backward") == 1
    # A dispatch mode below those of the contexts sees what these really call.
    assert recorder.passes.count("forward") == num_forward
    for results in (watched, train(device, bias, dropout_p, checkpointed(policy))):
        for ours, plain in zip(results, expected, strict=True):
            assert torch.equal(ours, plain)


def test_a_list_of_operators(device):
    """As PyTorch's shorthand of a policy: these are saved."""
    contexts_of_list = functools.partial(create_selective_checkpoint_contexts, [FORWARD])

    def wrap(function):
        return functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts_of_list)

    with Recorder() as recorder:
        train(device, None, 0.4, wrap)
    assert recorder.passes == ["forward", "backward"]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("policy", "num_forward"), [(SAVE, 1), (RECOMPUTE, 2)], ids=["saved", "recomputed"])
def test_under_the_compiler(policy, num_forward, device):
    """The policy becomes the partition of the compiled graphs."""
    graphs = []

    def collect(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=collect, bw_compiler=collect, partition_fn=min_cut_rematerialization_partition)

    def wrap(function):
        def run(*arguments):
            return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts(policy))

        return torch.compile(run, fullgraph=True, backend=compiler)

    expected = train(device, None, 0.0, lambda function: function)
    for ours, plain in zip(train(device, None, 0.0, wrap), expected, strict=True):
        torch.testing.assert_close(ours, plain)
    calls = [node.target for graph in graphs for node in graph.graph.nodes]
    assert calls.count(FORWARD) == num_forward and calls.count(BACKWARD) == 1
