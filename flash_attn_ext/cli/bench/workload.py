"""Attention problems to time, as data, with their floating-point operations and their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_ext.cli.bench.block_patterns import BlockPattern
from flash_attn_ext.cli.bench.structures import STRUCTURES, visible_pairs

# The FLOPs of a pass, by those of the forward pass: the backward pass has five GEMMs, the forward pass two.
FLOPS_OF_PASS = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}

SQUARE_MASK, PADDING_MASK, BATCH_MASK = "mask [S,S]", "mask [B,1,1,S]", "mask [B,1,S,S]"
EXPANDED_PADDING = "padding [B,1,S,S]"  # of which every row of queries is stored, as transformers does
T5_TABLE, SWIN_TABLE = "table of T5", "table of Swin"
SQUARE_BIAS, HEAD_BIAS, FULL_BIAS = "bias [S,S]", "bias [1,H,S,S]", "bias [B,H,S,S]"
PADDING_BIAS = "bias [B,1,1,S]"
LOW_PADDING_BIAS = "bias [B,1,1,S] of finfo.min"  # for padding; PADDING_BIAS has -inf
FORGET_BIAS = "bias [B,H,1,S] of forget gates"  # float32
# The value of `own` for our function by its name. Our call is then PyTorch's function, with its operators replaced
# through torch.nn.attention.
DIRECT = "direct"
# As `own`: packed sequences instead of a mask, which is one of padding (forward only) or of documents.
OWN_VARLEN = "varlen"
OWN_CAUSAL = "causal"  # as `own` of a workload with a structure: our call with causality instead
OWN_DENSE = "dense"  # as `own` of a workload with lists of blocks: our call without them


@dataclass(frozen=True)
class Workload:
    """One problem and its contestants, which all get the same tensors."""

    suite: str
    case: str
    batch: int
    num_heads: int
    seqlen: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    head_dim_v: int | None = None
    num_key_heads: int | None = None
    causal: bool = False
    window: tuple[int, int] | None = None  # keys to the left and to the right of the query's own
    mask: str | None = None  # one of those named above
    bias: str | None = None  # one of those named above
    table: str | None = None  # one of those named above, of which `bias` is looked up
    structure: str | None = None  # a mask as intervals of keys: its name in structures.py
    blocks: BlockPattern | None = None  # lists of blocks, for each head its own
    softcap: float | None = None
    has_alibi: bool = False
    has_sink: bool = False
    extras_need_grad: bool = False  # the bias, the slopes of ALiBi and the sink
    dropout_p: float = 0.0
    lengths: tuple[int, ...] = ()  # of ragged sequences packed one after the other; seqlen is then the longest
    peers: tuple[str, ...] = ()  # their names in contestants.py
    own: str | None = None  # OWN_…, DIRECT, or a name for our call without causality, window, mask and dropout
    against: str = ""  # what our ratio compares with: a peer, "best" of them, or `own`
    in_goal: bool = True  # whether the suite's mean counts it; else it is there for reference
    passes: tuple[str, ...] = ("forward", "backward")
    seqlen_k: int | None = None  # if there are not as many keys as queries; causality is then bottom right
    calls: int = 1  # timed together, one after the other, as a model queues them

    @property
    def num_keys(self) -> int:
        return self.seqlen_k or self.seqlen

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def key_heads(self) -> int:
        return self.num_key_heads or self.num_heads

    @property
    def is_host_time(self) -> bool:
        """Whether the time for which a call keeps the host busy counts, instead of the GPU's time."""
        return self.suite in ("host", "switch")

    @property
    def in_microseconds(self) -> bool:
        """Whether a time says more than TFLOP/s do."""
        return self.is_host_time

    @property
    def non_causal_peers(self) -> tuple[str, ...]:
        """The peers that compute a causal workload without causality."""
        return ()

    def amounts(self, pass_: str) -> dict[str, float]:
        """The amounts of work of a call, by the unit of the rate that rows have for each."""
        return {}

    def flops(self, pass_: str) -> float:
        """FLOPs by convention: half for causal, the visible pairs of a window, a structure or lists of blocks, and no
        saving from other masks."""
        pairs = sum(map(self._pairs, self.lengths)) if self.lengths else self.batch * self._pairs(self.seqlen)
        return FLOPS_OF_PASS[pass_] * 4 * self.num_heads * pairs * (self.head_dim + self.dim_v) / 2

    def _pairs(self, length: int) -> float:
        if self.structure is not None:
            return visible_pairs(self.structure, length)
        if self.blocks is not None:
            return length * length * self.blocks.share
        if self.seqlen_k is not None:
            return length * self.seqlen_k - (length * (length - 1) / 2 if self.causal else 0)
        if self.window is None:
            return length * length / (2 if self.causal else 1)
        left, right = self.window[0], 0 if self.causal else self.window[1]
        return sum(min(query + right, length - 1) - max(query - left, 0) + 1 for query in range(length))


@dataclass
class Inputs:
    """(B, H, S, D), or (T, H, D) with cu_seqlens for ragged sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    table: Tensor | None = None  # (H, entries), of which the bias is looked up
    table_index: Any = None  # as our call takes it
    table_entries: Tensor | None = None  # (S, S), of each pair
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    intervals: Tensor | None = None  # (1, 1, S, 2n)
    blocks: Tensor | None = None  # (1, H, query blocks, key blocks)
    cu_seqlens: Tensor | None = None

    @property
    def extras(self) -> tuple[Tensor, ...]:
        """What may require grad beside q, k and v."""
        return tuple(tensor for tensor in (self.bias, self.alibi_slopes, self.sink) if tensor is not None)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors by which a backward pass differentiates."""
        return (self.q, self.k, self.v, *(tensor for tensor in self.extras if tensor.requires_grad))

    @property
    def leaves_of_table(self) -> tuple[Tensor, ...]:
        """The same for contestants that take a table instead of a bias."""
        if self.table is None:
            return self.leaves
        others = tuple(tensor for tensor in self.leaves if tensor is not self.bias)
        return (*others, self.table) if self.table.requires_grad else others


def make_inputs(workload: Workload, device: str) -> Inputs:
    """Random-normal inputs from one seed."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=workload.dtype)

    def operand(heads: int, length: int, dim: int) -> Tensor:
        if workload.lengths:
            return normal(sum(workload.lengths), heads, dim)
        return normal(workload.batch, heads, length, dim)

    q = operand(workload.num_heads, workload.seqlen, workload.head_dim)
    k = operand(workload.key_heads, workload.num_keys, workload.head_dim)
    v = operand(workload.key_heads, workload.num_keys, workload.dim_v)
    inputs = Inputs(q, k, v, dout=operand(workload.num_heads, workload.seqlen, workload.dim_v))
    square = (workload.seqlen, workload.seqlen)
    if workload.mask in (SQUARE_MASK, BATCH_MASK):
        shape = square if workload.mask == SQUARE_MASK else (workload.batch, 1, *square)
        inputs.mask = torch.rand(shape, generator=generator, device=device) < 0.7
    elif workload.mask == PADDING_MASK:
        inputs.mask = _tokens(workload, device)
    elif workload.mask == EXPANDED_PADDING:
        shape = (workload.batch, 1, workload.seqlen, workload.num_keys)
        inputs.mask = _tokens(workload, device).expand(shape).contiguous()
    if workload.bias == SQUARE_BIAS:
        inputs.bias = normal(*square)
    elif workload.bias in (HEAD_BIAS, FULL_BIAS):
        inputs.bias = normal(1 if workload.bias == HEAD_BIAS else workload.batch, workload.num_heads, *square)
    elif workload.bias == PADDING_BIAS:
        inputs.bias = q.new_zeros(()).where(_tokens(workload, device), float("-inf"))
    elif workload.bias == LOW_PADDING_BIAS:
        inputs.bias = q.new_zeros(()).where(_tokens(workload, device), torch.finfo(workload.dtype).min)
    elif workload.bias == FORGET_BIAS:  # gates of 0.98 at the median (Lin et al. 2025, "Forgetting Transformer")
        log_gates = torch.nn.functional.logsigmoid(
            normal(workload.batch, workload.num_heads, 1, workload.num_keys) + 4.0
        )
        inputs.bias = -log_gates.float().cumsum(-1)
    if workload.structure is not None:
        inputs.intervals = STRUCTURES[workload.structure].intervals(workload.seqlen, q.device).tensor
    if workload.blocks is not None:
        inputs.blocks = workload.blocks.block_mask(workload.seqlen, workload.num_heads, q.device)
    if workload.has_alibi:  # the slopes of Press et al. 2022, section 3, from steep to flat
        inputs.alibi_slopes = 2.0 ** (-8 * torch.arange(1, workload.num_heads + 1, device=device) / workload.num_heads)
    if workload.has_sink:
        inputs.sink = torch.randn(workload.num_heads, generator=generator, device=device)
    if workload.lengths:
        ends = torch.tensor(workload.lengths).cumsum(0)
        inputs.cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32)
    return inputs


def _tokens(workload: Workload, device: str) -> Tensor:
    """(B, 1, 1, keys), True where a key is no padding. Sequences have from half of the keys on to all of them."""
    shortest = workload.num_keys // 2
    lengths = shortest + torch.arange(workload.batch, device=device) * shortest // max(workload.batch - 1, 1)
    return (torch.arange(workload.num_keys, device=device) < lengths[:, None])[:, None, None]
