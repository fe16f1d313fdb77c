"""Stand-ins for libraries that a recipe is about, where they are not installed.

Each has the few names that docs/recipes.md takes of it, and calls attention as the library does, so that a recipe is
executed everywhere. That it runs with the library itself is tested where the library is installed.
"""

import importlib.util
from pathlib import Path

STAND_INS = {
    "lightning": """
import torch


class LightningModule(torch.nn.Module):
    pass


class Trainer:
    def __init__(self, max_epochs, logger, enable_checkpointing, enable_progress_bar):
        self.max_epochs, self.global_step = max_epochs, 0

    def fit(self, model, batches):
        optimizer = model.configure_optimizers()
        for _ in range(self.max_epochs):
            for index, batch in enumerate(batches):
                optimizer.zero_grad()
                model.training_step(batch, index).backward()
                optimizer.step()
                self.global_step += 1
""",
    "timm": """
import torch
import torch.nn.functional as F


class _Model(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.qkv, self.head = torch.nn.Linear(3, 48), torch.nn.Linear(16, num_classes)

    def forward(self, images):
        q, k, v = self.qkv(images.flatten(2).mT).unflatten(-1, (3, 1, 16)).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(q, k, v).mean((1, 2)))


def create_model(name, pretrained, img_size, num_classes):
    return _Model(num_classes)
""",
    "diffusers": """
import types

import torch
import torch.nn.functional as F


class UNet2DConditionModel(torch.nn.Module):
    def __init__(self, cross_attention_dim, **sizes):
        super().__init__()
        self.q, self.kv = torch.nn.Linear(4, 16), torch.nn.Linear(cross_attention_dim, 32)
        self.out = torch.nn.Linear(16, 4)

    def forward(self, latents, timestep, encoder_hidden_states):
        q = self.q(latents.flatten(2).mT)[:, None]
        k, v = self.kv(encoder_hidden_states)[:, None].chunk(2, -1)
        sample = self.out(F.scaled_dot_product_attention(q, k, v)[:, 0]).mT.reshape(latents.shape)
        return types.SimpleNamespace(sample=sample)
""",
}


def write_stand_in(name: str, folder: Path) -> None:
    """Puts a module of this name into a folder of programs, where Python looks first, unless the library is there."""
    if name in STAND_INS and importlib.util.find_spec(name) is None:
        (folder / f"{name}.py").write_text(STAND_INS[name], encoding="utf-8")
