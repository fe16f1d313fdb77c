"""One attention problem as data. Every feature of the public surface is a field."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from flash_attn_ext.masks import BlockLists

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# A bias or mask shape is a pattern of the dimensions it has in full: "bhqk" is (B, H, Sq, Sk), "1h1k" (1, H, 1, Sk).
ALL_PATTERNS = tuple(f"{b}{h}{q}{k}" for b in "1b" for h in "1h" for q in "1q" for k in "1k")


DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sink")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Case:
    """Defaults are small, asymmetric, and end inside a tile of 128 queries x 256 keys."""

    sq: int = 65
    sk: int = 97
    d: int = 32
    dv: int | None = None
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None
    causal: str | None = None
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    bias_float32: bool = False  # a float32 bias beside 16-bit q, k, v
    mask: str | None = None
    mask_keep: float = 0.7
    padding: bool = False  # the mask leaves an interval of the keys, in each of its rows
    intervals: str | None = None  # a pattern of the first two dimensions: "bh", "1h", "b1" or "11"
    num_intervals: int = 1
    interval_rows: int = 1  # neighbouring queries with the same intervals
    blocks: str | None = None  # a pattern of the first two dimensions, where "k" is a list for each key head
    block_sizes: tuple[int, int] = (64, 64)  # queries and keys
    block_keep: float = 0.4
    alibi: str | None = None  # "h" or "bh"
    sink: bool = False
    dropout_p: float = 0.0
    dlse: bool = False  # the loss depends on the LSE as well
    layout: str = "bhsd"

    @property
    def head_dim_v(self) -> int:
        return self.d if self.dv is None else self.dv

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def pattern_shape(self, pattern: str) -> tuple[int, ...]:
        full = {"b": self.batch, "h": self.heads, "q": self.sq, "k": self.sk, "1": 1}
        return tuple(full[letter] for letter in pattern)

    def options(self) -> dict:
        """The keywords of flash_attn_ext.attention that are not tensors."""
        return dict(causal=self.causal, window=self.window, scale=self.scale, softcap=self.softcap)

    def __str__(self) -> str:
        """The test id: what differs from the defaults."""
        changed = [f"q{self.sq}", f"k{self.sk}"]
        for f in dataclasses.fields(self)[2:]:
            value = getattr(self, f.name)
            if value != f.default:
                text = f.name if value is True else f"{f.name}={value}"
                changed.append(text.replace(" ", ""))
        return "-".join(changed)


@dataclass
class Inputs:
    """A case's tensors, all in (B, H, S, D), and the gradients that come back into out and lse."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    intervals: torch.Tensor | None = None
    block_counts: torch.Tensor | None = None
    block_indices: torch.Tensor | None = None
    dropout_seed: int = 1234
    differentiable: tuple[str, ...] = DIFFERENTIABLE  # of those that there are, which get gradients

    TENSORS = ("q", "k", "v", "dout", "dlse", "bias", "mask", "alibi_slopes", "sink", "intervals")
    TENSORS += ("block_counts", "block_indices")

    @property
    def block_lists(self) -> BlockLists | None:
        if self.block_counts is None:
            return None
        query_block, key_block = self.case.block_sizes
        return BlockLists(self.block_counts, self.block_indices, query_block=query_block, key_block=key_block)

    @property
    def whole_mask(self) -> torch.Tensor | None:
        """The mask, the intervals and the blocks of a dense problem as one mask."""
        seen = self.mask
        if self.intervals is not None:
            of_intervals = in_intervals(self.intervals, self.case.sk)
            seen = of_intervals if seen is None else seen & of_intervals
        if self.block_counts is not None:
            of_blocks = self.block_lists.dense(self.case.sq, self.case.sk, heads=self.case.heads)
            seen = of_blocks if seen is None else seen & of_blocks
        return seen

    def replace(self, **changes) -> Inputs:
        return dataclasses.replace(self, **changes)

    def to(self, dtype: torch.dtype, device: str | None = None) -> Inputs:
        """Every floating tensor in one dtype: float64 for the exact answer to the same (rounded) inputs."""
        changes = {}
        for name in self.TENSORS:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            tensor = tensor.detach()
            changes[name] = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
        return self.replace(**changes)

    def operands(self, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All that may get gradients: the leaves, and the others as they are."""
        named = {name: getattr(self, name) for name in DIFFERENTIABLE}
        return {name: tensor for name, tensor in named.items() if tensor is not None} | leaves

    def leaves(self) -> dict[str, torch.Tensor]:
        """The inputs that get gradients here, as fresh leaves that keep the strides."""
        return {
            name: getattr(self, name).detach().requires_grad_()
            for name in self.differentiable
            if getattr(self, name) is not None
        }


def intervals(numbers: torch.Tensor) -> torch.Tensor:
    """A mask that leaves some neighbouring keys, two or more, whose ends follow from the first numbers of each row."""
    keys = numbers.shape[-1]
    position = torch.arange(keys, device=numbers.device)
    begin = (numbers[..., :1] * (keys - 1)).floor()
    # Padding at one end only is the most common.
    begin = torch.where(numbers[..., :1] < 0.3, 0, begin)
    end = begin + 2 + (numbers[..., -1:] * 2 * keys).floor()
    return (position >= begin) & (position < end)


def in_intervals(intervals: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(..., Sq, 2 n) -> (..., Sq, Sk), True = seen."""
    keys = torch.arange(num_keys, device=intervals.device)
    seen = torch.zeros(*intervals.shape[:-1], num_keys, dtype=torch.bool, device=intervals.device)
    for pair in intervals.split(2, -1):
        seen |= (keys >= pair[..., :1]) & (keys < pair[..., 1:])
    return seen


def draw_intervals(numbers: torch.Tensor, num_keys: int | torch.Tensor) -> torch.Tensor:
    """int32 intervals from uniform numbers of their shape. num_keys: a number, or (queries, 1) of them.

    The first interval has two keys or more, where there are as many. The others may be empty. They overlap and have any
    order.
    """
    most = torch.as_tensor(num_keys, dtype=numbers.dtype, device=numbers.device)
    begin = (numbers[..., 0::2] * (most - 1)).floor()
    length = (numbers[..., 1::2].square() * most).floor()
    length = torch.where(numbers[..., 1::2] < 0.2, -3.0, length)
    length[..., 0] = length[..., 0].clamp(min=0) + 2
    begin[..., 0] = torch.minimum(begin, (most - 2).clamp(min=0))[..., 0]
    bounds = torch.stack([begin, begin + length], -1).flatten(-2)
    return torch.minimum(bounds.clamp(min=0), most).int()


def draw_blocks(numbers: torch.Tensor, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsorted lists of int32, from uniform numbers (..., key blocks). The last block is always listed, so that few
    queries see nothing. The first of a list comes twice, and what follows a list is nonsense."""
    wanted = numbers < keep
    wanted[..., -1:] = True
    order = torch.where(wanted, numbers, 2.0).argsort(-1)
    counts = wanted.sum(-1) + 1
    indices = torch.cat([order[..., :1], order], -1)
    is_listed = torch.arange(indices.shape[-1], device=numbers.device) < counts[..., None]
    return counts.int(), torch.where(is_listed, indices, -7).int()


def without_dbias(inputs: Inputs) -> Inputs:
    """The inputs, of which a bias gets no gradient. It takes other kernels on a GPU."""
    return inputs.replace(differentiable=("q", "k", "v", "sink"))


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0, draw_on: str = "cpu") -> Inputs:
    """Drawn on the CPU in float64 from one seeded generator, so that every dtype and device rounds the same numbers.

    `draw_on`: the generator of another device, where thousands of problems would wait for the CPU's.
    """
    generator = torch.Generator(draw_on).manual_seed(seed)

    def normal(*shape: int, to: torch.dtype = dtype) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device=draw_on)
        return numbers.to(device=device, dtype=to)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64, device=draw_on)

    accumulate = accumulate_dtype(dtype)
    b, h, hk = case.batch, case.heads, case.num_kv_heads
    inputs = Inputs(
        case,
        q=normal(b, h, case.sq, case.d),
        k=normal(b, hk, case.sk, case.d),
        v=normal(b, hk, case.sk, case.head_dim_v),
        dout=normal(b, h, case.sq, case.head_dim_v),
    )
    if case.dlse:
        inputs.dlse = normal(b, h, case.sq, to=accumulate)
    if case.bias is not None:
        inputs.bias = normal(*case.pattern_shape(case.bias), to=accumulate if case.bias_float32 else dtype)
    if case.mask is not None:
        numbers = uniform(*case.pattern_shape(case.mask))
        inputs.mask = (intervals(numbers) if case.padding else numbers < case.mask_keep).to(device)
    if case.alibi is not None:
        shape = (h,) if case.alibi == "h" else (b, h)
        inputs.alibi_slopes = (uniform(*shape) * 0.3 + 0.01).to(device=device, dtype=accumulate)
    if case.sink:
        inputs.sink = normal(h, to=accumulate) + math.log(max(case.sk, 1))  # about the weight of all keys together
    if case.intervals is not None:
        batch, heads = (size if letter != "1" else 1 for letter, size in zip(case.intervals, (b, h), strict=True))
        numbers = uniform(batch, heads, -(-case.sq // case.interval_rows), 2 * case.num_intervals)
        numbers = numbers.repeat_interleave(case.interval_rows, 2)[:, :, : case.sq]
        inputs.intervals = draw_intervals(numbers, case.sk).to(device)
    if case.blocks is not None:
        sizes = {"b": b, "h": h, "k": hk, "1": 1}
        rows, width = (-(-length // size) for length, size in zip((case.sq, case.sk), case.block_sizes, strict=True))
        numbers = uniform(*(sizes[letter] for letter in case.blocks), rows, width)
        lists = draw_blocks(numbers, case.block_keep)
        inputs.block_counts, inputs.block_indices = (of_list.to(device) for of_list in lists)
    return inputs
