"""python -m flash_attn_ext {info, verify}, and wrong usage: exit status and what is printed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.__main__ import main
from flash_attn_ext._call.options import dense_problem, problem_of
from flash_attn_ext._explanation import Explanation, plans_of
from flash_attn_ext.cli import info, machine, portable, verify
from flash_attn_ext.cli.bench.suites import ABOUT, SUITES
from support.backends import device_not_runnable_because
from support.plans import DEFAULTS


def run_module(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "flash_attn_ext", *arguments], capture_output=True, text=True)


def test_info_json():
    process = run_module("info", "--json")
    assert process.returncode == 0, process.stdout + process.stderr
    facts = json.loads(process.stdout)
    assert facts["versions"]["flash_attn_ext"] == flash_attn_ext.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["build"] == flash_attn_ext._C.build_info()
    assert facts["runs_on"]["cpu"] == "cpu"
    assert facts["gpu"]
    if device_not_runnable_because("cuda") is None:
        assert facts["runs_on"]["cuda"] in facts["build"]["backends"] and facts["runs_on"]["cuda"] != "cpu"
        assert facts["self_test"]["device"] == "cuda"
    assert facts["self_test"]["passed"] and facts["self_test"]["cases"] > 0
    if facts["runs_on"].get("cuda") == "sm90":
        assert facts["portable"] == portable.passes_on_portable_kernels(on_hopper)
    elif "cuda" not in facts["runs_on"]:
        assert facts["portable"] is None


def test_info_text(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (flash_attn_ext.__version__, torch.__version__, "backends", "GPU", "portable", "self-test"):
        assert part in text


def test_info_says_which_files_run():
    files = info.collect()["installation"]
    assert all(Path(files[name]).is_file() for name in ("library", "extension"))
    assert ".".join(torch.__version__.split(".")[:2]) in files["torch_versions"]


@pytest.mark.parametrize(
    ("capability", "archs", "code"),
    [
        ((8, 0), "8.0;9.0a+PTX", "machine code"),
        ((8, 9), "8.0;9.0a+PTX", "machine code"),
        ((8, 0), "8.6", None),
        ((8, 0), "8.6+PTX", "PTX"),
        ((9, 0), "8.0;9.0a+PTX", "machine code"),
        ((9, 0), "8.0", None),
        ((9, 0), "8.0+PTX", "PTX"),
        ((12, 0), "8.0;9.0a+PTX", "PTX"),
        ((12, 0), "8.0;9.0a", None),
        ((8, 0), "9.0a+PTX", None),
        ((8, 0), "80;8.;.0;;8.0", "machine code"),  # what is no architecture is no code
    ],
)
def test_which_code_a_gpu_runs(capability, archs, code):
    assert flash_attn_ext._C.gpu_code(capability, archs) == code


def test_info_lists_gpus_with_machine_code_and_with_ptx():
    build = {"cuda_not_built": None, "cuda_version": "13.0", "cuda_archs": "8.0;9.0a+PTX", "fast_build": None}
    assert [text for _, text, _ in info._cuda_rows(build)] == [
        "for CUDA 13.0, 8.0;9.0a+PTX",
        "machine code for 8.0, 8.6, 8.7, 8.9, 9.0; PTX for 10.0, 10.3, 11.0, 12.0, 12.1",
    ]
    fast = info._cuda_rows(build | {"fast_build": "bfloat16, head dims up to 128"})
    assert fast[1] == ("", "a fast build: bfloat16, head dims up to 128 only", info.WARNING)
    assert info._cuda_rows({"cuda_not_built": "why"}) == [("CUDA sources", "not built: why", info.WARNING)]


def test_info_names_other_versions_of_torch():
    facts = {"build": {"torch_version": "2.12.1"}, "installation": {"torch_versions": ["2.12"]}}
    assert info._other_extensions(facts) == []
    facts["installation"]["torch_versions"] = ["2.11", "2.12", "2.15"]
    assert info._other_extensions(facts) == [("", "others here for torch 2.11 and 2.15", "")]


def on_hopper(call: portable.Call) -> Explanation:
    """What `explain` answers on a Hopper GPU, by plans, which need none."""
    backend = "sm90" if call.dtype.itemsize == 2 and call.head_dim <= 512 else "sm80"
    problem, _, _ = dense_problem(problem_of(**DEFAULTS | call.arguments("cpu") | dict(backend=backend)), "bhsd")
    if problem.dropout_p > 0:
        problem = problem._replace(rng_seed=torch.zeros(1, dtype=torch.int64))
    return Explanation(backend, {}, *plans_of(problem))


def test_info_knows_what_takes_portable_kernels_on_hopper():
    """docs/kernels/sm90_backward_two_pass.md says why."""
    assert portable.passes_on_portable_kernels(on_hopper) == {
        "both passes": ["a softcap at head dim 512", "float32", "float64"],
        "the forward pass": ["a float32 bias beside bfloat16"],
        "the backward pass": [
            "a boolean mask that broadcasts over keys at head dim 256",
            "a bias at head dim 256",
        ],
    }


@pytest.mark.parametrize(
    ("backend", "calls", "texts"),
    [
        (None, None, ["unknown: there is no GPU here that runs this library"]),
        ("sm80", {"both passes": ["float32", "dropout"]}, ["all calls: Hopper's kernels need compute capability 9.x"]),
        (
            "sm90",
            {"both passes": ["float32", "float64"], "the backward pass": ["ALiBi slopes with a gradient"]},
            ["both passes of float32; float64", "the backward pass of ALiBi slopes with a gradient"],
        ),
    ],
    ids=["no GPU", "another GPU", "Hopper"],
)
def test_info_says_what_takes_portable_kernels(backend, calls, texts):
    rows = info._portable_rows({"portable": calls, "runs_on": {"cpu": "cpu", "cuda": backend}})
    assert [text for _, text, _ in rows] == texts
    assert [name for name, _, _ in rows] == ["portable", *[""] * (len(texts) - 1)]


def test_info_asks_about_tensors_of_the_gpu(monkeypatch):
    devices = set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(info, "explain_on", lambda device: Explanation("sm90", {}))
    monkeypatch.setattr(portable.Call, "arguments", lambda call, device: devices.add(device) or {})
    monkeypatch.setattr(info, "explain", lambda: Explanation(None, {}))
    assert info.portable_calls() == {"both passes": [], "the forward pass": [], "the backward pass": []}
    assert devices == {"cuda"}


def test_calls_that_no_backend_takes_are_on_no_kernels():
    found = portable.passes_on_portable_kernels(lambda call: Explanation(None, {}))
    assert not any(found.values())


@pytest.mark.parametrize("arguments", [[], ["train"], ["verify", "--device", "tpu"]], ids=str)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"flash_attn_ext {flash_attn_ext.__version__}\n"


def test_help_has_a_line_about_every_suite(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    lines = [line.split() for line in capsys.readouterr().out.partition("that have them:\n")[2].splitlines()]
    names = dict.fromkeys(name for suites in SUITES.values() for name in suites)
    assert {name for name, *_ in lines} == set(names) == set(ABOUT)
    for name, *words in lines:
        devices = [word.rstrip(",") for word in words if word.rstrip(",") in SUITES]
        assert devices == [device for device in SUITES if name in SUITES[device]]
        assert " ".join(words).endswith(ABOUT[name])


@pytest.fixture
def few_cases(monkeypatch):
    """The plain case and the one with everything, in two dtypes."""
    monkeypatch.setattr(verify, "CASES", [verify.CASES[0], verify.CASES[-1]])
    monkeypatch.setattr(verify, "DTYPES", (torch.float32, torch.bfloat16))


def test_verify_keeps_the_rule(few_cases, device, capsys):
    assert main(["verify", "--device", device]) == 0
    assert "4 of 4 keep the rule" in capsys.readouterr().out


def test_verify_fails_when_the_rule_is_broken(few_cases, device, monkeypatch, capsys):
    """A library that is wrong: here, one that attends with another scale."""
    right = flash_attn_ext.functional.attention
    monkeypatch.setattr(
        flash_attn_ext.cli.accuracy, "attention", lambda **tensors: right(**(tensors | dict(scale=0.01)))
    )
    assert main(["verify", "--device", device]) == 1
    assert "BREAK" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_device_that_cannot_run_is_said(command, tmp_path, capsys):
    if device_not_runnable_because("cuda") is None:
        pytest.skip("a backend runs on the GPU of this machine")
    extra = ["--output", str(tmp_path)] if command == "bench" else []
    assert main([command, "--device", "cuda", *extra]) == 2
    assert "--device cuda" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "content"), [("--draw", "{}"), ("--draw", "[1]"), ("--output", "a file")])
def test_bench_says_what_is_wrong_with_a_file(option, content, tmp_path, capsys):
    path = tmp_path / "given"
    path.write_text(content)
    assert main(["bench", "--device", "cpu", "--suite", "switch", option, str(path)]) == 2
    assert f"{option} {path}: " in capsys.readouterr().out


CPUINFO = """processor\t: 0
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9V84 96-Core Processor
flags\t\t: fpu sse2 avx2 fma avx512f avx512_bf16 avx512vbmi

processor\t: 1
cpu family\t: 26
"""


def test_machine_names_the_cpu(tmp_path, monkeypatch):
    """Family, model and flags: a name such as "AMD EPYC" stands for several generations."""
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    facts = machine._cpu_facts(path)
    monkeypatch.setattr(machine, "_cpu_facts", lambda: facts)
    found = machine.machine()
    assert found["cpu"] == "AMD EPYC 9V84 96-Core Processor"
    assert (found["cpu_family"], found["cpu_model"]) == (25, 17)
    assert found["cpu_flags"] == ["avx2", "fma", "avx512f", "avx512_bf16"]


def test_machine_without_cpuinfo(tmp_path, monkeypatch):
    nothing = machine._cpu_facts(tmp_path / "none")
    monkeypatch.setattr(machine, "_cpu_facts", lambda: nothing)
    found = machine.machine()
    assert found["cpu"] and found["cpu_family"] is None and found["cpu_flags"] == []
