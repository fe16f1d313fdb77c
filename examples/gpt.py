"""A small GPT in plain PyTorch. The attention function is an argument, so that two of them can be compared."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# scaled_dot_product_attention(query, key, value, is_causal=True) -> output, all (batch, heads, tokens, head_dim)
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 256
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    width: int = 128

    @property
    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in GPT(self, F.scaled_dot_product_attention).parameters())


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.attention = attention
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = self.attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config, attention)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, T) byte values -> (batch, T, vocab_size) logits of the next byte."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy, in nats per byte, over (batch, T + 1) byte values."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        device = self.head.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.config.context :])[:, -1].float()
            next_token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, next_token], dim=1)
        return bytes(tokens[0].tolist())
