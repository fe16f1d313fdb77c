"""The compiled half of flash_attn_ext (csrc/bindings.cpp), as functional.py and ops.py call it.

One attention call in canonical form is a Problem (_call/problem.py), of which any tuple of the same fields will do:

    q, k, v            dense: (B, Hq, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv); packed, when cu_seqlens_* are given:
                       (Tq, Hq, D), (Tk, Hk, D), (Tk, Hk, Dv). One dtype of float32, float64, bfloat16, float16; any
                       strides. Hk divides Hq.
    bias               (B|1, Hq|1, Sq|1, Sk|1), q's dtype or float32. Packed: (batch|1, Hq|1, max_seqlen_q|1,
                       max_seqlen_k|1), indexed by the position inside the sequence
    mask               the same shapes, bool, True = attend
    alibi_slopes       (Hq,) or (B, Hq), accumulate dtype: float32, or float64 for float64 q
    sink               (Hq,), accumulate dtype
    intervals          (B|1, Hq|1, Sq, 2 n), packed (Hq|1, Tq, 2 n), int32, n in 1...4:
                       a begin and an end (exclusive) for each interval of keys, by the position inside the sequence
    blocks             (B|1, Hq|1, query blocks, key blocks), bool, True = attend: blocks of 64 or 128 queries, and of
                       64 or 128 keys, as their numbers tell; dense only
    cu_seqlens_q, _k   (batch + 1,) int32
    rng_seed           (1,) int64 on q's device; given if and only if dropout_p > 0
    scale              finite; None: 1 / sqrt(D)
    softcap            > 0, or None
    causal             None, "top_left", "bottom_right"
    window_left, right >= 0, or None for unbounded
    dropout_p          in [0, 1)
    max_seqlen_q, _k   upper bounds, or None; packed only
    backend            None, or the name of one
    allow_tf32         float32 on a GPU: one TF32 product instead of three
    sequence_first     the caller has (B, S, H, D): out gets it where q's strides leave the order open; dense only
    wants_row_max      the forward pass also returns the largest score of each row
    bias_is_relative  bias is (1, Hq|1, 1, Sq + Sk - 1), stride 1 in the last dimension: a value per key - query
                       of the scores, that of key - query = 1 - Sq first; dense only

Wrong tensors raise RuntimeError, wrong option values ValueError.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from flash_attn_ext._call.problem import KvCache, Problem
from flash_attn_ext.types import Backend

_Problem: TypeAlias = Problem | tuple[Any, ...]
_KvCache: TypeAlias = KvCache | tuple[Any, ...]

def attention(problem: _Problem, /) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, row_max) as attention_forward returns them, recorded by autograd in grad mode if q, k, v, bias,
    alibi_slopes or sink requires grad. It is only for tensors that hold memory, outside of functorch and forward mode.
    """

def direct_sdpa(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    /,
) -> Tensor | None:
    """scaled_dot_product_attention if nothing has to be brought into form or drawn, otherwise None.

    It takes operands that are CANONICAL now, masks of four dimensions that broadcast to the scores, no dropout, and
    options of exactly the expected types; anything may be passed. Raises what ``attention`` raises. Compilers cannot
    trace it: ask torch.compiler.is_compiling() first.
    """

def direct_attention(
    q: object,
    k: object,
    v: object,
    causal: object,
    window: object,
    bias: object,
    mask: object,
    intervals: object,
    alibi_slopes: object,
    softcap: object,
    sink: object,
    dropout_p: object,
    scale: object,
    layout: object,
    return_lse: object,
    return_max_logit: object,
    backend: object,
    allow_tf32: object,
    bias_table: object,
    bias_entries: object,
    /,
) -> Tensor | tuple[Tensor, ...] | None:
    """``flash_attn_ext.attention`` in the same way. bias_entries: int32, of each diagonal of the scores or of each
    pair."""

def direct_attention_with_kvcache(
    q: object,
    k_cache: object,
    v_cache: object,
    k_new: object,
    v_new: object,
    cache_seqlens: object,
    block_table: object,
    cache_batch_idx: object,
    rotary_cos: object,
    rotary_sin: object,
    rotary_interleaved: object,
    causal: object,
    window: object,
    bias: object,
    mask: object,
    intervals: object,
    alibi_slopes: object,
    softcap: object,
    sink: object,
    scale: object,
    layout: object,
    return_lse: object,
    return_max_logit: object,
    backend: object,
    /,
) -> Tensor | tuple[Tensor, ...] | None:
    """``flash_attn_ext.attention_with_kvcache`` in the same way, for operands that are PLAIN."""

def attention_forward(problem: _Problem, /) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(out, lse, lse_residual, row_max), never recorded by autograd.

    out: q's shape with Dv for D, q's dtype, in memory in the order of q's strides.
    lse: natural log, (B, Hq, Sq), packed (Hq, Tq), accumulate dtype.
    lse_residual: the rounding error of lse, in its shape, if there is a bias.
    row_max: the largest score of each row, in the shape of lse, if the problem wants it. -inf for a row that sees no
    key, NaN where lse is NaN.
    """

def attention_with_kvcache(problem: _Problem, cache: _KvCache, /) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, row_max) as attention_forward returns them, over a cache to which new keys and values go first.

    problem: dense and without dropout; k and v are the cache, (B_cache, Hk, rows, D) and (B_cache, Hk, rows, Dv), or
    pages of `rows` keys. bias and mask: (B|1, Hq|1, Sq|1, capacity|1); intervals: as in a dense
    call.
    cache_seqlens, cache_batch_idx (B,) and block_table (B, pages of a sequence): int32 on q's device.
    k_new, v_new: (B, Hk, Sn, D) and (B, Hk, Sn, Dv), Sn in 1...256, or both None. If given, k and v are written.
    rotary_cos, rotary_sin: (positions, rotary dim / 2), q's dtype, only with k_new.

    Raises in grad mode if a tensor requires grad. On the CPU, and on a GPU with FLASH_ATTN_EXT_CHECK=1, the
    values of lengths, tables and indices are checked too.
    """

def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_residual: Tensor | None,
    output_mask: Sequence[bool],
    problem: _Problem,
    /,
) -> list[Tensor | None]:
    """[dq, dk, dv, dbias, dalibi_slopes, dsink] in their inputs' shapes and dtypes; None where not asked for.

    lse_residual: as the forward pass returned it; (0,) is None.
    output_mask: which of the six to compute.
    """

def attention_tangents(
    out: Tensor,
    lse: Tensor,
    q_tangent: Tensor | None,
    k_tangent: Tensor | None,
    v_tangent: Tensor | None,
    sink_tangent: Tensor | None,
    problem: _Problem,
    /,
) -> list[Tensor] | None:
    """[out_tangent, lse_tangent]: forward mode in one kernel, on a GPU; None if no kernel takes the call.

    out and lse are results of the forward pass. Tangents have the shapes and dtypes of their tensors; None: 0.
    """

def attention_explain(problem: _Problem, /) -> list[tuple[Backend, list[str]]]:
    """Every backend in the order in which they are tried, with the reasons against it (none: it can run this call)."""

def attention_plan(output_mask: Sequence[bool], problem: _Problem, /) -> tuple[str, str]:
    """The plans of both passes, as JSON objects: the fields of ``_explanation.Plan`` that apply, by name. They are
    those of the backend that the problem names, which need not be able to run here, or else of the one that runs it.
    output_mask: the gradients asked for, as in ``attention_backward``."""

def look_up(table: Tensor, entries: Tensor) -> Tensor:
    """(rows, columns) of a table (rows, entries): of each column the entry that it has, int32 (columns,)."""

def table_sums(values: Tensor, entries: Tensor, num_entries: int) -> Tensor:
    """(rows, num_entries) in the accumulate dtype of values (rows, columns): for each entry of a table, the sum of the
    columns whose entry it is, in a fixed order. entries: (columns,) int32."""

def block_mask(counts: Tensor, indices: Tensor, width: int) -> Tensor:
    """(..., query blocks, width) bool on a GPU: which blocks of keys the lists have. counts: (..., query blocks) and
    indices (..., query blocks, blocks of a list), both int32 or both int64. Blocks that do not exist are left out."""

def delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse, accumulate dtype: (B, H, S) for (B, H, S, D), (H, T) for (T, H, D)."""

def dropout_mask(
    rng_seed: Tensor, dropout_p: float, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int
) -> Tensor:
    """(B, H, Sq, Sk) bool on the CPU, True = kept: the bits that every backend draws.

    rng_seed: (1,) int64, any value, on any device. dropout_p: in [0, 1].
    """

def plain_weights(
    products: Tensor,
    product_tangents: Tensor | None,
    lse: Tensor,
    scale: float,
    visible: tuple[int, int],
    num_queries: int,
    dtype: torch.dtype,
    lse_tangent: Tensor,
    wants_weights: bool,
) -> list[Tensor | None]:
    """[P, P dS] of a tile of scores that only a scale changes, on a GPU: P = exp(scale * products - lse),
    dS = scale * product_tangents. The row sums of P dS are added to lse_tangent.

    products, product_tangents: (pairs, rows, keys), with the rows of a pair's query heads head after head. lse,
    lse_tangent: (pairs, rows, 1). All are float32 and contiguous.
    visible: the columns [begin, end) that query 0 of a head sees; query i sees those i further. They may reach beyond
    the tile. The result is 0 in columns that a row does not see, whatever is read there.
    num_queries: of each head. dtype: of the results, float32 or bfloat16.
    P is None unless wants_weights, and P dS is None if product_tangents are.
    """

def plain_gradients(
    products: Tensor,
    product_tangents: Tensor | None,
    lse: Tensor,
    scale: float,
    visible: tuple[int, int],
    num_queries: int,
    dtype: torch.dtype,
    lse_tangent: Tensor,
    weight_gradients: Tensor,
    weight_gradient_tangents: Tensor | None,
    delta: Tensor,
    delta_tangent: Tensor,
    wants_weight_tangents: bool,
) -> list[Tensor | None]:
    """[P', dscore, dscore'] of such a tile, with ' for tangents: P' = P (dS - lse'), dscore = P (weight_gradients -
    delta), dscore' = P' (weight_gradients - delta) + P (weight_gradient_tangents - delta_tangent).

    weight_gradients and their tangents (None: zeros): as products. delta and delta_tangent: as lse.
    P' is None unless wants_weight_tangents, and dscore is None if product_tangents are.
    """

def visible_keys(
    seqlen_q: int,
    seqlen_k: int,
    causal: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
) -> Tensor:
    """(Sq, 2) int64: the keys [begin, end) that each query sees. ValueError for other options."""

def visible_queries(
    seqlen_q: int,
    seqlen_k: int,
    causal: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
) -> Tensor:
    """(Sk, 2) int64: the queries [begin, end) that see each key. ValueError for other options."""

SYMBOLIC: int
TRANSFORMED: int
PLAIN: int
CANONICAL: int
EQUAL_HEADS: int

def operands_of(q: object, k: object, v: object) -> int:
    """Classifies the operands of a call. Anything may be passed. The kinds ascend: what is CANONICAL is also PLAIN, and
    operands of EQUAL_HEADS are both.

    SYMBOLIC: not all hold memory that the extension may read: subclasses, meta tensors, views that PyTorch negates
    lazily, tensors that its older vmap batches; or a dispatch mode or a trace is active. TRANSFORMED: they hold memory,
    but under torch.func or forward mode. PLAIN: tensors (no subclass) with memory. CANONICAL: dense and 4-D, of one
    dtype and batch size, k and v of one number of heads, and autocast would not cast them. EQUAL_HEADS: q too has that
    number of heads.
    """

PROBLEM_FIELDS: tuple[str, ...]
"""The fields of a problem, in their order."""

CACHE_FIELDS: tuple[str, ...]
"""The fields of a KvCache, in their order."""

def set_copy_log(log: Callable[[str, Tensor, str], None]) -> None:
    """From now on log(name, tensor, needed) is called, from any thread, for each tensor that is copied because no
    kernel can read it in place. `needed`: what kernels can read."""

class OperatorFront:
    """A C++ kernel in front of the one that an aten operator has now for a dispatch key, until remove().

    It runs calls without bias, mask, dropout and debug mask. It passes on all others, and those that it cannot run.
    Raises ValueError for an operator that is not in operators_with_front().
    """

    def __init__(self, operator_name: str, dispatch_key: str) -> None: ...
    def remove(self) -> None: ...

def operators_with_front() -> list[str]:
    """Names of the operators that OperatorFront takes, without "aten::"."""

def passes_of_fronts() -> list[int]:
    """[forward, backward]: how many passes all OperatorFronts of this process have run. That of PyTorch's function runs
    no backward pass, because a node of autograd's graph does."""

def recorded_backward_passes() -> int:
    """How many backward passes those nodes have run in this process, and those of all other calls of this library."""

def gpu_code(capability: tuple[int, int], archs: str) -> Literal["machine code", "PTX"] | None:
    """What a library that was compiled for archs, such as "8.0;9.0a+PTX", has for a GPU of this compute capability:
    machine code, PTX, which the driver compiles when it is loaded, or nothing. Needs no GPU."""

class _BuildInfo(TypedDict):
    """version, compiler: of the kernels' library. torch_version: that the extension was built for. cuda_version,
    cuda_archs: None if no CUDA source was built; then cuda_not_built says why. fast_build: what GPU kernels take, if
    some were left out. backends: in the order in which they are tried."""

    version: str
    compiler: str
    torch_version: str
    cuda_version: str | None
    cuda_archs: str | None
    cuda_not_built: str | None
    fast_build: str | None
    backends: list[Backend]

def build_info() -> _BuildInfo:
    """How the extension and the kernels' library were built."""
