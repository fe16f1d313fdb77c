"""Training that stops and goes on from what it saved has the bits of training that did not stop, dropout included."""

import io

import torch
from torch import nn

import flash_attn_ext
from support.backends import generator_state
from support.params import over_dtypes

STEPS, STOP = 5, 2


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, backend):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.sink = nn.Parameter(torch.zeros(2))
        self.dtype, self.backend = dtype, backend.name

    def forward(self, x):
        q, k, v = self.qkv(x).to(self.dtype).unflatten(-1, (3, 2, 16)).unbind(-3)
        options = dict(causal="top_left", dropout_p=0.3, layout="bshd", sink=self.sink, backend=self.backend)
        return x + self.out(flash_attn_ext.attention(q, k, v, **options).flatten(-2).float())


class Training:
    """A model, its optimizer, and the generators that the data and dropout come from."""

    def __init__(self, dtype: torch.dtype, backend):
        self.device = backend.device
        self.model = Model(dtype, backend).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> torch.Tensor:
        x = torch.randn(2, 70, 32).to(self.device)
        loss = (self.model(x) - x.roll(1, dims=1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def save(self, file) -> None:
        generators = dict(cpu=torch.get_rng_state())
        generators[self.device] = generator_state(self.device)
        state = dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict(), generators=generators)
        torch.save(state, file)

    def load(self, file) -> None:
        state = torch.load(file, weights_only=True, map_location="cpu")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generators"]["cpu"])
        if self.device == "cuda":
            torch.cuda.set_rng_state(state["generators"]["cuda"])


@over_dtypes((torch.float32, torch.bfloat16))
def test_resuming_repeats_the_bits(dtype, backend):
    uninterrupted, file = Training(dtype, backend), io.BytesIO()
    losses = []
    for step in range(STEPS):
        if step == STOP:
            uninterrupted.save(file)
        losses.append(uninterrupted.step())
    torch.manual_seed(99)  # of another process
    resumed = Training(dtype, backend)
    resumed.load(io.BytesIO(file.getvalue()))
    assert torch.equal(torch.stack([resumed.step() for _ in range(STOP, STEPS)]), torch.stack(losses[STOP:]))
    for ours, expected in zip(resumed.model.parameters(), uninterrupted.model.parameters(), strict=True):
        assert torch.equal(ours, expected)


@over_dtypes((torch.float32, torch.bfloat16))
def test_without_the_generators_dropout_draws_other_bits(dtype, backend):
    """So the test above tests something."""
    first, second = Training(dtype, backend), Training(dtype, backend)
    second.model.load_state_dict(first.model.state_dict())
    x = torch.randn(2, 70, 32, device=backend.device)
    assert not torch.equal(first.model(x), second.model(x))
