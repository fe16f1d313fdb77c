"""A model that generates text, with its attention by this library and by PyTorch. Needs transformers."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn_ext._explanation import Explanation
from flash_attn_ext.cli.bench.contestant import OURS
from flash_attn_ext.cli.bench.timing import Stopwatch
from flash_attn_ext.functional import explain
from flash_attn_ext.integrations.torch_sdpa import install_sdpa, uninstall_sdpa
from generate_suites import COMPILED, DYNAMIC, PREFILL, GenerateWorkload


@dataclass
class GenerateInputs:
    model: nn.Module
    prompt: Tensor  # (batch, seqlen) int64
    pass_: str

    @property
    def dout(self) -> Tensor:
        """There is no backward pass, so only the device of this tensor counts."""
        return self.prompt


class Generation:
    """One greedy generate() as a call that returns (batch, tokens). Afterwards `seconds` has the time of each token."""

    def __init__(self, inputs: GenerateInputs, workload: GenerateWorkload) -> None:
        self.inputs = inputs
        self.options = dict(
            max_new_tokens=1 if inputs.pass_ == PREFILL else 1 + workload.new_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=None if workload.cache == DYNAMIC else "static",
            disable_compile=workload.cache != COMPILED,
            stopping_criteria=[self._note_time],
        )
        self.seconds: list[float] = []

    def __call__(self) -> Tensor:
        self.seconds = []
        self._note_time(self.inputs.prompt)
        generate: Any = self.inputs.model.generate
        return generate(self.inputs.prompt, **self.options)

    def milliseconds_of_a_step(self) -> float:
        """The mean time over all steps but the first, which is the prompt's, unless that is the only one."""
        start, *tokens = self.seconds
        if len(tokens) == 1:
            return (tokens[0] - start) * 1e3
        return (tokens[-1] - tokens[0]) * 1e3 / (len(tokens) - 1)

    def _note_time(self, tokens: Tensor, scores: object = None, **_) -> Tensor:
        """A stopping criterion, which generate() asks after each token. It never stops, but records the time."""
        if tokens.is_cuda:
            torch.cuda.synchronize(tokens.device)
        self.seconds.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)


@dataclass(frozen=True)
class Generator:
    """A contestant. Tokens are not compared: where two logits are nearly equal, rounding chooses."""

    generation: Generation
    context: Callable[[], contextlib.AbstractContextManager]
    comparable: bool = False
    compiles: bool = False  # even a compiled model has compiled before it is timed

    def make_call(self, pass_: str, dout: Tensor) -> Generation:
        return self.generation


def missing() -> str | None:
    """The reason why the suite cannot run, or None."""
    try:
        importlib.import_module("transformers")
    except Exception as error:  # one that was made for another torch raises more than ImportError
        return (
            f"it needs transformers, which cannot be imported ({type(error).__name__}: {error}): "
            "pip install 'transformers>=5.15'"
        )
    return None


def prepare(workload: GenerateWorkload, pass_: str, device: str) -> GenerateInputs:
    """A model with random weights and random tokens, from one seed. No token ends a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        intermediate_size=workload.intermediate_size,
        num_hidden_layers=workload.num_layers,
        num_attention_heads=workload.num_heads,
        num_key_value_heads=workload.key_heads,
        head_dim=workload.head_dim,
        max_position_embeddings=workload.seqlen + workload.new_tokens + 1,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(workload.dtype).eval()
        prompt = torch.randint(workload.vocab_size, (workload.batch, workload.seqlen))
    return GenerateInputs(model, prompt, pass_)


def explain_ours(workload: GenerateWorkload, inputs: GenerateInputs, backend: str | None) -> Explanation:
    """Explains the attention of a step. A model's calls choose their backend; none can be forced."""
    if backend is not None:
        raise ValueError(f"--backend {backend} does not go with suite generate: leave one of them out")
    num_queries = workload.seqlen if inputs.pass_ == PREFILL else 1
    q, kv = (
        torch.empty(workload.batch, heads, seqlen, workload.head_dim, dtype=workload.dtype, device=inputs.prompt.device)
        for heads, seqlen in ((workload.num_heads, num_queries), (workload.key_heads, workload.seqlen))
    )
    return explain(q, kv, kv, causal="bottom_right")


@contextlib.contextmanager
def installed():
    """A context in which our attention replaces PyTorch's, without a mode, which would slow down all other calls."""
    install_sdpa()
    try:
        yield
    finally:
        uninstall_sdpa()


def contestants(workload: GenerateWorkload, inputs: GenerateInputs, backend: None) -> dict[str, Generator]:
    entrants = {OURS: Generator(Generation(inputs, workload), installed)}
    for name in workload.peers:
        entrants[name] = Generator(Generation(inputs, workload), contextlib.nullcontext)
    return entrants


def stopwatch(workload: GenerateWorkload, inputs: GenerateInputs) -> Stopwatch:
    def of_a_step(generation: Any) -> float:
        generation()
        return generation.milliseconds_of_a_step()

    return of_a_step
