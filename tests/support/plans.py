"""Calls as data, for tests of the plans that they follow."""

from dataclasses import dataclass, field

import torch

from flash_attn_ext._call.options import dense_problem, problem_of
from flash_attn_ext._explanation import Plan, plans_of
from flash_attn_ext.masks import BlockLists

# Names of kernels.
WARP_SPECIALISED = "warp-specialised"
SINGLE_TILE = "warp-specialised, single tile"
KEY_STATIONARY = "warp-specialised, key-stationary"
QUERY_STATIONARY = "warp-specialised, query-stationary"
TWO_PASS = "warp-specialised, two-pass"
SHORT_BIAS = "short heads with a bias"
RECOMPUTE = "recompute the scores"
MATERIALISE_DS = "materialise dS with dK and dV"
MATERIALISE_P_DS = "materialise P and dS with dQ"
FROM_KEYS = "from sums of the same dS over queries"  # dBias

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


DEFAULTS = dict(causal=None, window=None, softcap=None, scale=None, dropout_p=0.0, backend="sm80", allow_tf32=False)


@dataclass(frozen=True)
class Call:
    """A call of `attention`; tables are given by their shape."""

    sq: int
    sk: int | None = None
    d: int = 64
    dv: int | None = None
    batch: int = 8
    heads: int = 16
    key_heads: int | None = None
    dtype: torch.dtype = BF16
    bias: tuple | None = None
    bias_dtype: torch.dtype | None = None
    relative_bias: bool = False  # a relative-position bias
    mask: tuple | None = None
    intervals: tuple | None = None
    block_lists: tuple | None = None  # of the counts
    block_sizes: tuple[int, int] = (128, 128)
    slopes: bool = False
    sink: bool = False
    wanted: tuple = ("q", "k", "v")
    options: dict = field(default_factory=dict)

    def plans(self) -> tuple[Plan, Plan]:
        problem = problem_of(**DEFAULTS | self.arguments())
        problem, _, _ = dense_problem(problem, "bhsd", self.lists())
        if self.relative_bias:
            shape = (1, self.heads, 1, problem.q.shape[2] + problem.k.shape[2] - 1)
            bias = torch.empty(shape, dtype=self.bias_dtype or self.dtype, requires_grad="bias" in self.wanted)
            problem = problem._replace(bias=bias, bias_is_relative=True)
        if problem.dropout_p > 0:
            problem = problem._replace(rng_seed=torch.zeros(1, dtype=torch.int64))
        return plans_of(problem)

    def lists(self) -> BlockLists | None:
        if self.block_lists is None:
            return None
        lists = torch.ones(self.block_lists).int(), torch.zeros(*self.block_lists, 1).int()
        return BlockLists(*lists, query_block=self.block_sizes[0], key_block=self.block_sizes[1])

    def arguments(self) -> dict:
        sk = self.sq if self.sk is None else self.sk
        dv = self.d if self.dv is None else self.dv
        key_heads = self.key_heads or self.heads
        tensors = {
            "q": torch.empty(self.batch, self.heads, self.sq, self.d, dtype=self.dtype),
            "k": torch.empty(self.batch, key_heads, sk, self.d, dtype=self.dtype),
            "v": torch.empty(self.batch, key_heads, sk, dv, dtype=self.dtype),
        }
        if self.bias:
            tensors["bias"] = torch.empty(self.bias, dtype=self.bias_dtype or self.dtype)
        if self.slopes:
            tensors["alibi_slopes"] = torch.empty(self.heads)
        if self.sink:
            tensors["sink"] = torch.empty(self.heads)
        for name in self.wanted:
            if name != "bias" or not self.relative_bias:  # those get a bias later
                tensors[name].requires_grad_()
        if self.mask:
            tensors["mask"] = torch.ones(self.mask, dtype=torch.bool)
        if self.intervals:
            tensors["intervals"] = torch.zeros(self.intervals, dtype=torch.int32)
        return tensors | self.options


def packed_plans(
    lengths: tuple[int, ...], d: int, heads: int, key_heads: int | None = None, **options
) -> tuple[Plan, Plan]:
    """The plans of a packed call on Hopper, whose queries and keys have the same lengths."""
    of = dict(q=heads, k=key_heads or heads, v=key_heads or heads)
    tensors = {name: torch.empty(sum(lengths), n, d, dtype=BF16, requires_grad=True) for name, n in of.items()}
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sequences = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    return plans_of(problem_of(**DEFAULTS | tensors | sequences | dict(backend="sm90") | options))


def mismatches(plan: Plan, expected: dict) -> dict:
    """What a plan has in the fields that are not as expected. Of the workspace only the parts that are named count."""
    found = {name: getattr(plan, name) for name in expected}
    if "workspace" in expected:
        found["workspace"] = {part: plan.workspace.get(part, 0) for part in expected["workspace"]}
    return {name: value for name, value in found.items() if value != expected[name]}


def label(case) -> str:
    """The id of a test whose cases are a call and what is expected of its plan."""
    return case if isinstance(case, str) else ""
