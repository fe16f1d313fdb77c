"""Training in CUDA graphs: a whole step in one graph, and PyTorch's make_graphed_callables, one for each pass.

Parameters scale attention's operands, element by element, so that results are bits: products of matrices may take other
algorithms in a graph.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

import flash_attn_ext
from support.graphs import captured
from support.params import computes_in, over_dtypes

pytestmark = computes_in(torch.bfloat16)
SHAPE = (2, 4, 140, 64)
REPLAYS = 4


class Model(nn.Module):
    """q, k and v are x, each with its own scale of each column and head."""

    def __init__(self, dtype: torch.dtype, backend: str, dropout_p: float = 0.0):
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(0)
        self.scales = nn.Parameter(torch.randn(3, 1, 4, 1, 64, device="cuda", generator=generator))
        self.sink = nn.Parameter(torch.zeros(4, device="cuda"))
        self.dtype, self.backend, self.dropout_p = dtype, backend, dropout_p

    def forward(self, x):
        q, k, v = (self.scales * x).to(self.dtype).unbind(0)
        options = dict(causal="bottom_right", window=(60, 0), dropout_p=self.dropout_p, backend=self.backend)
        return flash_attn_ext.attention(q, k, v, sink=self.sink, **options).float()


def optimizer_of(name: str, model: Model) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)


def step_of(model: Model, optimizer: torch.optim.Optimizer, x, target):
    def step():
        optimizer.zero_grad(set_to_none=True)  # so that the graph has gradients in its own memory
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SHAPE, device="cuda"), torch.randn(SHAPE, device="cuda")


@pytest.mark.parametrize("optimizer_name", ["SGD", "AdamW"])
@over_dtypes((torch.bfloat16, torch.float32))
def test_a_whole_step(dtype, optimizer_name, gpu):
    """Forward pass, backward pass and optimizer in one graph have the bits of the same steps without it."""
    model = Model(dtype, gpu.name)
    optimizer = optimizer_of(optimizer_name, model)
    x, target = batch()
    graph, loss = captured(step_of(model, optimizer, x, target))
    eager = copy.deepcopy(model)  # as the warm-up left it: a capture runs nothing
    eager_optimizer = optimizer_of(optimizer_name, eager)
    eager_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(REPLAYS):
        new = batch()
        x.copy_(new[0])
        target.copy_(new[1])
        graph.replay()
        assert torch.equal(loss, step_of(eager, eager_optimizer, *new)())
        for ours, expected in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours, expected)


@over_dtypes((torch.bfloat16, torch.float32))
def test_graphed_callables(dtype, gpu):
    eager = Model(dtype, gpu.name)
    sample = torch.randn(SHAPE, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(eager), (sample,))
    for _ in range(REPLAYS):
        x, dout = batch()
        results = []
        for model in (graphed, eager):
            leaves = [x.clone().requires_grad_(), *model.parameters()]
            out = model(leaves[0])
            results.append([out.clone(), *(g.clone() for g in torch.autograd.grad(out, leaves, dout))])
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours, expected)


def test_both_graphs_of_a_callable_drop_the_same(gpu):
    """out is linear in v's scale: <dscale, scale> = <dout, out>, whatever was dropped. A call drops other weights."""
    graphed = torch.cuda.make_graphed_callables(
        Model(torch.bfloat16, gpu.name, dropout_p=0.5), (torch.randn(SHAPE, device="cuda"),)
    )
    x, dout = batch()
    outs = []
    for _ in range(REPLAYS):
        out = graphed(x)
        (gradient,) = torch.autograd.grad(out, [graphed.scales], dout)
        outs.append(out.detach().clone())
        from_v = gradient[2].double() * graphed.scales[2].detach().double()
        from_out = outs[-1].double() * dout.double()
        # Other bits would be off by about the norm of the terms, rounding by about eps of it.
        assert float((from_v.sum() - from_out.sum()).abs()) < 0.125 * float(from_out.norm())
    assert all(not torch.equal(first, second) for first, second in itertools.pairwise(outs))
