"""Nothing of (length, length) in a whole training step of a model, at 32768 tokens, and at 131072 where masks are
intervals; on a GPU and on the CPU."""

import sys

import pytest

from support.forks import run_forked

# A boolean mask of (L, S) would take 1024 MiB at 32768 tokens and 16384 MiB at 131072, a float one four times that.
LIMITS_MIB = {32768: 512, 131072: 1024}
FORMS = [
    ("qwen3", "plain", 32768),
    ("qwen3", "padded", 32768),
    ("qwen3", "packed", 32768),
    ("gemma3", "plain", 131072),
    ("gemma3", "padded", 131072),
    ("llama4", "padded", 131072),
    ("llama4", "packed", 131072),
]

MODELLING = (f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "gemma3", "llama4"))
PRELOADED = " ".join(["torch", "transformers", *MODELLING])

# In a process of its own: VmHWM is the peak of the whole process, and is reset once everything is loaded and warm.
STEP = """
import sys
import torch
import transformers
from flash_attn_ext.integrations import transformers as fused

fused.register()
device, name, form, length = *sys.argv[1:4], int(sys.argv[4])
sizes = dict(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=length, use_cache=False,
)
# A layer without a window would take minutes of the CPU at the longer length. Its mask is made all the same.
full = "full_attention" if device == "cuda" or length < 65536 else None
window = dict(sliding_window=1024, layer_types=["sliding_attention", full or "sliding_attention"])
if name == "qwen3":
    config = transformers.Qwen3Config(**sizes, **window, use_sliding_window=True)
    model = transformers.Qwen3ForCausalLM
elif name == "gemma3":
    vision = dict(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )
    config = transformers.Gemma3Config(text_config=sizes | window, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration
else:
    config = transformers.Llama4TextConfig(
        **sizes, intermediate_size_mlp=16, num_local_experts=2, moe_layers=[], attention_chunk_size=1024,
        layer_types=["chunked_attention", full or "chunked_attention"], no_rope_layers=[1, 1],
    )
    model = transformers.Llama4ForCausalLM
model = model._from_config(config, attn_implementation="fused_ext").to(device)

def step(length):
    ids = torch.arange(length, device=device)[None] % 32
    given = {}
    if form == "padded":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][:, : length // 4] = 0
    if form == "packed":
        given["position_ids"] = torch.arange(length, device=device)[None] % (length // 4)
    if name == "gemma3":
        given["token_type_ids"] = (torch.arange(length, device=device)[None] % 1000 < 300).long()
    model(input_ids=ids, logits_to_keep=16, **given).logits.square().sum().backward()

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

step(512)
if device == "cpu":
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    step(length)
    print(status("VmHWM") - before)
else:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(length)
    print((torch.cuda.max_memory_allocated() - before) / 2**20)
"""


@pytest.mark.xdist_group("model_memory")  # what is preloaded takes longer than a step
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(("name", "form", "length"), FORMS, ids=str)
def test_peak_of_a_training_step(name, form, length, device):
    options = dict(FLASH_ATTN_EXT_WORKSPACE_MIB="0")  # scores that a GPU's backward pass may keep are not at issue
    process = run_forked(STEP, device, name, form, length, environment=options, preloaded=PRELOADED)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < LIMITS_MIB[length]
