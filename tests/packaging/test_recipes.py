"""The Python in README and in the guides runs as it stands, each page from top to bottom, and does what it says.

The recipe of docs/transformers.md has tests/huggingface/test_recipe.py to itself, since it trains.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What the short pieces of README take as given.
PRELUDES = {
    "README.md": """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

name = "tiny"
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(name)
model, x = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True), torch.randn(2, 30, 64)
q, k, v = torch.randn(3, 2, 4, 30, 16)
""",
}
CHECKS = {
    "README.md": """
assert llm(torch.zeros(1, 5, dtype=torch.long)).logits.isfinite().all()
assert llm.config._attn_implementation == "fused_ext"
assert torch.nn.attention.current_flash_attention_impl() == "flash_attn_ext"
assert flash_attn_func.__module__.startswith("flash_attn_ext.")
assert all(weight.grad is not None for weight in model.parameters())
assert out.shape == q.shape and slopes.grad.isfinite().all() and lengths.tolist() == [1, 701, 32, 2049]
""",
    "docs/semantics.md": """
assert torch.equal(ours, flash_attn_ext.scaled_dot_product_attention(*[
    x.unflatten(-1, (4, 16)).transpose(1, 2) for _ in range(3)], is_causal=True).transpose(1, 2).flatten(2))
assert F.scaled_dot_product_attention.__module__ != "flash_attn_ext.functional" and (ours - theirs).abs().max() < 1e-5
""",
    "docs/torch_backend.md": """
assert losses[-1] < 0.1 * losses[0], losses
assert torch.nn.attention.current_flash_attention_impl() is None
""",
    "docs/flash_attn.md": """
import sys
assert "flash_attn" not in sys.modules
for sequence, length, its_out in zip(qkv, lengths, out):
    q, k, v = sequence[:length].permute(1, 2, 0, 3)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    torch.testing.assert_close(its_out[:length], exact)
    assert not its_out[length:].any()
assert qkv.grad[is_token].abs().amax(dim=(1, 2, 3)).min() > 0 and not qkv.grad[~is_token].any()
""",
}


def python_of(page: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("page", CHECKS)
def test_python_of_a_page_runs(page, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PRELUDES.get(page, "") + python_of(page) + CHECKS[page])
    environment = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.run([sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
