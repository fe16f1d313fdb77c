"""Nothing of (length, length) in a whole training step of a model at 32768 tokens; on a GPU and on the CPU."""

import os
import subprocess
import sys

import pytest

LENGTH = 32768
# A boolean mask of (L, S) would take 1024 MiB, a float one 4096.
LIMIT_MIB = 512

# In a process of its own: VmHWM is the peak of the whole process, and is reset once everything is loaded and warm.
STEP = """
import sys
import torch
from flash_attn_ext.integrations import transformers as fused
from transformers import Qwen3Config, Qwen3ForCausalLM

fused.register()
device, form = sys.argv[1:]
config = Qwen3Config(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=32768, use_sliding_window=True, sliding_window=1024,
    layer_types=["sliding_attention", "full_attention"], use_cache=False,
)
model = Qwen3ForCausalLM._from_config(config, attn_implementation="fused_ext").to(device)

def step(length):
    ids = torch.arange(length, device=device)[None] % 32
    given = {}
    if form == "padded":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][:, : length // 4] = 0
    if form == "packed":
        given["position_ids"] = torch.arange(length, device=device)[None] % (length // 4)
    model(input_ids=ids, logits_to_keep=16, **given).logits.square().sum().backward()

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

step(512)
if device == "cpu":
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    step(32768)
    print(status("VmHWM") - before)
else:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(32768)
    print((torch.cuda.max_memory_allocated() - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("form", ["plain", "padded", "packed"])
def test_peak_of_a_training_step(form, device):
    options = dict(FLASH_ATTN_EXT_WORKSPACE_MIB="0")  # scores that a GPU's backward pass may keep are not at issue
    environment = dict(os.environ, **options, PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.run(
        [sys.executable, "-c", STEP, device, form], capture_output=True, text=True, env=environment
    )
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < LIMIT_MIB
