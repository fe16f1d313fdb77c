"""The Python in README and in the guides runs as it stands, each page from top to bottom, and does what it says.

The recipe of docs/transformers.md has tests/huggingface/test_recipe.py to itself, since it trains. docs/tools.md has
tests/tools/test_guide.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import libraries
from support.forks import run_forked
from support.readme import ROOT, code_of, page, readme_program

CHECKS = {
    "docs/quickstart.md": """
assert slopes.grad.isfinite().all() and cache_lengths.tolist() == [1, 701, 32, 2049] and step.isfinite().all()
assert (out[1024:].transpose(0, 1) - padded[1, :, :700]).abs().max() < 1e-5
assert explanation.backend == "cpu"
""",
    "docs/performance.md": """
assert (plan.backend, plan.backward.kernel) == ("cpu", "tiled on the CPU")
""",
    "docs/migrating.md": """
exact = torch.nn.functional.scaled_dot_product_attention(
    *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=~is_padding).transpose(1, 2)
torch.testing.assert_close(out, exact)
""",
    "docs/semantics.md": """
assert torch.equal(ours, flash_attn_ext.scaled_dot_product_attention(*[
    x.unflatten(-1, (4, 16)).transpose(1, 2) for _ in range(3)], is_causal=True).transpose(1, 2).flatten(2))
assert F.scaled_dot_product_attention.__module__ != "flash_attn_ext.functional" and (ours - theirs).abs().max() < 1e-5
""",
    "docs/which_mask.md": """
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=own.dense(12))
torch.testing.assert_close(out, exact)
assert torch.equal(packed.dense(12), masks.documents(cu_seqlens=torch.tensor([0, 4, 7, 12])).dense(12))
assert str(own) == "Intervals(batch 1, heads 1, queries 12, 2 intervals of keys each, on cpu)"
sinks = masks.from_mask_mod(lambda b, h, i, j: (j <= i) & ((i - j <= 2) | (j < 2) | (i < 2)), 1, 1, 12, 12)
assert torch.equal(streaming.dense(12), sinks.dense(12))
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


PAGES_WITH_OTHER_TESTS = {"docs/transformers.md", "docs/tools.md", "docs/many_gpus.md", "docs/recipes.md"}


def write_program(code: str, folder: Path) -> Path:
    program = folder / "program.py"
    program.write_text(code, encoding="utf-8")
    return program


def run(code: str, folder: Path) -> None:
    process = run_forked(write_program(code, folder), folder=folder, environment={"HF_HUB_OFFLINE": "1"})
    assert process.returncode == 0, process.stderr


def test_no_page_with_python_is_left_out():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    with_python = {path.relative_to(ROOT).as_posix() for path in pages if code_of(path.read_text(encoding="utf-8"))}
    assert with_python == PAGES_WITH_OTHER_TESTS | set(CHECKS) | {"README.md"}


def test_python_of_readme_runs(tmp_path):
    run(readme_program(), tmp_path)


@pytest.mark.parametrize("name", CHECKS)
def test_python_of_a_page_runs(name, tmp_path):
    run(code_of(page(name)) + CHECKS[name], tmp_path)


def test_the_program_for_many_gpus_runs_in_two_processes(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, write_program(code_of(page("docs/many_gpus.md")), tmp_path)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


# Counts calls that reach this library, and after a recipe says whether there were any.
COUNTED = """
import torch.profiler
_profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
_profile.__enter__()
"""
WERE_COUNTED = """
_profile.__exit__(None, None, None)
_passes = [event.key.split(",")[0] for event in _profile.key_averages() if event.key.startswith("flash_attn_ext")]
assert set(_passes) >= {"flash_attn_ext forward", "flash_attn_ext backward"}, _passes
"""
RECIPES = {
    "Lightning": "assert model.head.weight.grad is not None or trainer.global_step == 16",
    "timm": "assert all(weight.grad is not None for weight in model.parameters())",
    "diffusers": "assert noise.shape == latents.shape",
    "A packing loop": "assert losses[-1] < 0.2 * losses[0], losses",
    "QK-clip": """
assert bool((model.max_logit <= 1.05 * THRESHOLD).all()), model.max_logit
largest = model.max_logit.clone()
model(x / 2)
assert torch.equal(model.max_logit, largest), "only the last forward pass counts"
model.max_logit[0] = torch.nan
model.clip()
assert bool(model.qkv.weight.isfinite().all()), "a NaN reaches the weights"
""",
    "Forget gates": """
def by_its_formula(x):
    q, k, v = model.qkv(x).unflatten(-1, (3, model.heads, -1)).permute(2, 0, 3, 1, 4)
    sums = nn.functional.logsigmoid(model.gate(x)).transpose(1, 2).cumsum(-1)
    bias = (sums[..., :, None] - sums[..., None, :]).masked_fill(torch.ones(100, 100).triu(1) > 0, -torch.inf)
    return model.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(-2))

found = model.gate.weight.grad
model.zero_grad()
expected = by_its_formula(x)
torch.testing.assert_close(model(x), expected)
expected.square().mean().backward()
torch.testing.assert_close(found, model.gate.weight.grad)
""",
}


def recipe(title: str) -> str:
    return re.split(rf"^## {title}$", page("docs/recipes.md"), flags=re.MULTILINE)[1].partition("\n## ")[0]


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_runs(title, tmp_path):
    """With the library that it is about, or with a stand-in where that is not installed."""
    libraries.write_stand_in(title.lower(), tmp_path)
    run(COUNTED + code_of(recipe(title)) + RECIPES[title] + WERE_COUNTED, tmp_path)


def test_every_recipe_is_tested():
    titles = re.findall(r"^## (.*)$", page("docs/recipes.md"), re.MULTILINE)
    assert set(titles) == {"nanoGPT", "Hugging Face Trainer"} | set(RECIPES)


def test_the_three_lines_of_nanogpt(tmp_path):
    """The added lines, and after them a call as nanoGPT's model makes it."""
    added = re.findall(r"^\+(?!\+)(.*)$", code_of(recipe("nanoGPT"), "diff"), re.MULTILINE)
    assert len(added) == 3
    call = """
import torch

def attend(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)

q, k, v = torch.randn(3, 1, 4, 20, 16, requires_grad=True)
for function in (attend, torch.compile(attend, backend="aot_eager")):
    function(q, k, v).sum().backward()
"""
    run("\n".join([*added, COUNTED, call, WERE_COUNTED]), tmp_path)
