"""The Python in README and in the guides, as text that runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What the short pieces of README take as given.
PRELUDE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

name = "tiny"
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(name)
model, x = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True), torch.randn(2, 30, 64)
q, k, v = torch.randn(3, 2, 4, 30, 16)
"""
CHECK = """
assert llm(torch.zeros(1, 5, dtype=torch.long)).logits.isfinite().all()
assert llm.config._attn_implementation == "fused_ext"
assert torch.nn.attention.current_flash_attention_impl() == "flash_attn_ext"
assert flash_attn_func.__module__.startswith("flash_attn_ext.")
assert all(weight.grad is not None for weight in model.parameters())
assert out.shape == q.shape
"""


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_of(text: str, language: str = "python") -> str:
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


def readme_program() -> str:
    return PRELUDE + code_of(page("README.md")) + CHECK
