"""What a type checker sees: results by return_lse, options by their names, and the same of functions as of options."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import flash_attn_ext
from flash_attn_ext import reference, types

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    flash_attn_ext.attention: types.AttentionOptions,
    flash_attn_ext.attention_varlen: types.VarlenOptions,
    flash_attn_ext.attention_with_kvcache: types.KvCacheOptions,
    reference.attention_reference: types.ReferenceOptions,
}


def check(program: Path) -> subprocess.CompletedProcess:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_typed_program_passes():
    process = check(Path(__file__).with_name("typed_program.py"))
    assert process.returncode == 0, process.stdout


def test_each_wrong_call_of_the_program_is_refused(tmp_path):
    """Without the comments that expect the errors."""
    lines = Path(__file__).with_name("typed_program.py").read_text().splitlines()
    wrong = [number for number, line in enumerate(lines, start=1) if line.strip().endswith("]") and "ignore[" in line]
    program = tmp_path / "program.py"
    program.write_text("\n".join(line.split("  # type: ignore")[0] for line in lines))
    reported = {int(line.split(":")[1]) for line in check(program).stdout.splitlines() if ": error: " in line}
    assert len(wrong) > 15 and reported == set(wrong)


@pytest.mark.parametrize("function", OPTIONS, ids=lambda function: function.__name__)
def test_options_are_those_of_the_function(function):
    """By name and by type: overloads take options as a TypedDict, and the function lists them."""
    parameters = inspect.signature(function).parameters.values()
    required = ("return_lse", "return_max_logit", "cache_seqlens")
    names = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in required]
    hints = {name: hint for name, hint in typing.get_type_hints(function).items() if name in names}
    assert typing.get_type_hints(OPTIONS[function]) == hints
    assert not OPTIONS[function].__required_keys__


def test_every_backend_has_a_name_of_its_type():
    assert set(flash_attn_ext._C.build_info()["backends"]) <= set(typing.get_args(types.Backend))


@pytest.mark.parametrize("name", ["causal", "layout"])
def test_every_value_of_a_type_is_taken(name):
    q = torch.randn(2, 3, 4, 8)
    for value in typing.get_args({"causal": types.Causal, "layout": types.Layout}[name]):
        flash_attn_ext.attention(q, q, q, **{name: value})
