"""A model with its optimiser, one step at a time. The same seed gives the same model, whatever computes attention."""

import contextlib
import math
from dataclasses import dataclass

import torch
from gpt import GPT, Attention, GPTConfig
from torch import Tensor

from flash_attn_ext import scaled_dot_product_attention

MAX_RELATIVE_GAP = 0.01  # between the losses that a model reaches with the one attention and with the other


@dataclass(frozen=True)
class Schedule:
    steps: int = 1200
    batch: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


class Trainee:
    """On a GPU weights are float32 and layers compute in bfloat16, by autocast. `compiled`: by torch.compile."""

    def __init__(
        self,
        config: GPTConfig,
        attention: Attention,
        schedule: Schedule,
        device: torch.device,
        compiled: bool = False,
    ):
        torch.manual_seed(schedule.seed)
        self.device = device
        self.schedule = schedule
        self.model = GPT(config, attention).to(device)
        self.loss = torch.compile(self.model.loss) if compiled else self.model.loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    def step(self, step: int, windows: Tensor) -> float:
        """The loss of (batch, context + 1) byte values, before the weights move."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate_at(step)
        with mixed_precision(self.device):
            loss = self.loss(windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for all of it


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def choose_device() -> torch.device:
    """A GPU when our attention runs there, else the CPU."""
    if torch.cuda.is_available():
        q = torch.zeros(1, 1, 8, 32, device="cuda", dtype=torch.bfloat16)
        try:
            scaled_dot_product_attention(q, q, q, is_causal=True)
            return torch.device("cuda")
        except RuntimeError as error:
            print(f"Training on the CPU; on {torch.cuda.get_device_name()} our attention says: {error}\n")
    return torch.device("cpu")


def relative_gap(ours: float, pytorchs: float) -> float:
    return abs(ours - pytorchs) / pytorchs
