"""One CUDA graph of a decode step, replayed while sequences grow: rotate, append, attend, count.

Lengths and pages are data of the graph. Each step is compared with attention over the whole sequence so far. Rows and
pages that no sequence has yet hold NaN, and tables hold no page where there are no keys.
"""

import math
from dataclasses import dataclass

import pytest
import torch

import flash_attn_ext
from flash_attn_ext.reference import rotate
from support.errors import assert_same_answer
from support.graphs import captured
from support.params import over_dtypes

# Before the first step. Growing by STEPS, they pass the borders of pages of 16 and 64 and of tiles of up to 128 keys.
PROMPTS = (0, 14, 62, 127, 250, 500)
STEPS = 140
CAPACITY = 704
NO_PAGE = -1
SPARE_PAGES = 5


@dataclass(frozen=True)
class Model:
    heads: int
    key_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int | None
    window: tuple[int, int] | None = None

    def __str__(self) -> str:
        pages = f"pages of {self.page_size}" if self.page_size else "contiguous"
        return f"{pages}, {self.heads} heads over {self.key_heads} of {self.head_dim}, window {self.window}"


MODELS = [
    Model(4, 2, 64, 64, None),
    Model(4, 2, 64, 32, 16),
    Model(8, 1, 128, 128, 64),
    Model(8, 1, 128, 0, None),
    Model(3, 3, 72, 0, 16, window=(100, 0)),
]


class Decoder:
    """Sequences of random tokens, the caches that they go to, and the memory that a step's graph reads."""

    def __init__(self, model: Model, dtype: torch.dtype, backend: str):
        self.model, self.dtype, self.backend = model, dtype, backend
        generator = torch.Generator("cuda").manual_seed(0)
        batch, dim = len(PROMPTS), model.head_dim
        total = max(PROMPTS) + STEPS

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(batch, heads, total, dim, device="cuda", generator=generator).to(dtype)

        self.tokens = {"q": normal(model.heads), "k": normal(model.key_heads), "v": normal(model.key_heads)}
        angles = torch.rand(CAPACITY, model.rotary_dim // 2, device="cuda", generator=generator) * 2 * math.pi
        self.rotary = angles.cos().to(dtype), angles.sin().to(dtype)
        self.attended = {name: self.rotated(self.tokens[name]) for name in ("q", "k")} | {"v": self.tokens["v"]}
        self.step_tokens = {name: t[:, :, :1].clone() for name, t in self.tokens.items()}
        self.lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
        page_size = model.page_size or CAPACITY
        self.pages_each = CAPACITY // page_size
        num_pages = batch * self.pages_each + (SPARE_PAGES if model.page_size else 0)
        self.caches = [
            torch.empty(num_pages, model.key_heads, page_size, dim, device="cuda", dtype=dtype) for _ in range(2)
        ]
        self.table = torch.empty(batch, self.pages_each, dtype=torch.int32, device="cuda")
        pages = torch.randperm(num_pages, device="cuda", generator=generator)[: self.table.numel()]
        self.all_pages = pages.view_as(self.table).to(torch.int32)
        self.reset()

    def reset(self) -> None:
        """The prompts are in the caches, each by a call of its own."""
        for cache in self.caches:
            cache.fill_(math.nan)
        self.table.fill_(NO_PAGE)
        for b, prompt in enumerate(PROMPTS):
            self.give_pages(b, prompt)
            for begin in range(0, prompt, 200):  # in chunks
                tokens = {name: t[b : b + 1, :, begin : min(begin + 200, prompt)] for name, t in self.tokens.items()}
                entry = slice(b, b + 1)
                caches = self.caches if self.model.page_size else [cache[entry] for cache in self.caches]
                self.attend(tokens, caches, begin, self.table[entry])
        self.lengths.copy_(torch.tensor(PROMPTS))

    def give_pages(self, b: int, length: int) -> None:
        """As many as `length` keys need."""
        count = -(-length // (self.model.page_size or CAPACITY))
        self.table[b, :count] = self.all_pages[b, :count]

    def attend(self, tokens: dict, caches: list, lengths: torch.Tensor | int, table: torch.Tensor) -> torch.Tensor:
        options = dict(k_new=tokens["k"], v_new=tokens["v"], cache_seqlens=lengths, window=self.model.window)
        if self.model.page_size:
            options["block_table"] = table
        if self.model.rotary_dim:
            options |= dict(zip(("rotary_cos", "rotary_sin"), self.rotary, strict=True))
        return flash_attn_ext.attention_with_kvcache(tokens["q"], *caches, **options, backend=self.backend)

    def step(self) -> torch.Tensor:
        """What the graph holds."""
        out = self.attend(self.step_tokens, self.caches, self.lengths, self.table)
        self.lengths.add_(1)
        return out

    def repeated_step(self) -> torch.Tensor:
        """The step that was last taken, again: it writes what is there."""
        return self.attend(self.step_tokens, self.caches, self.lengths - 1, self.table)

    def show(self, step: int) -> None:
        """The next tokens where the graph reads, and a page where one begins."""
        for b, prompt in enumerate(PROMPTS):
            at = prompt + step
            self.give_pages(b, at + 1)
            for name, tokens in self.tokens.items():
                self.step_tokens[name][b] = tokens[b, :, at : at + 1]

    def expected(self, step: int) -> torch.Tensor:
        """The last query of each sequence, which sees it all, or its window."""
        outs = []
        for b, prompt in enumerate(PROMPTS):
            end = prompt + step + 1
            q, k, v = (self.attended[name][b : b + 1, :, :end] for name in ("q", "k", "v"))
            options = dict(causal="bottom_right", window=self.model.window, backend=self.backend)
            outs.append(flash_attn_ext.attention(q[:, :, -1:], k, v, **options))
        return torch.cat(outs)

    def rotated(self, tokens: torch.Tensor) -> torch.Tensor:
        cos, sin = (table[: tokens.shape[2]].float() for table in self.rotary)
        return rotate(tokens.float(), cos, sin, interleaved=False).to(self.dtype)

    def unused_pages(self) -> torch.Tensor:
        is_used = torch.zeros(len(self.caches[0]), dtype=torch.bool, device="cuda")
        is_used[self.table[self.table != NO_PAGE].long()] = True
        return ~is_used


@pytest.fixture(params=MODELS, ids=str)
def model(request) -> Model:
    return request.param


@over_dtypes((torch.bfloat16, torch.float16, torch.float32))
def test_one_graph_for_all_lengths(model, dtype, gpu):
    decoder = Decoder(model, dtype, gpu.name)
    graph, out = captured(decoder.step)
    decoder.reset()  # capturing took some steps
    for step in range(STEPS):
        decoder.show(step)
        graph.replay()
        assert_same_answer(out, decoder.expected(step), gpu, f"step {step}")
        assert torch.equal(decoder.repeated_step(), out), f"step {step}"
    assert decoder.lengths.tolist() == [prompt + STEPS for prompt in PROMPTS]
    if model.page_size:
        unused = decoder.unused_pages()
        assert bool(unused.any()) and all(bool(cache[unused].isnan().all()) for cache in decoder.caches)
