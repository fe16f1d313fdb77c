"""Random problems with a cache: all features together, at edges of pages. A number is a problem, as in draw.py."""

import dataclasses
import random
from dataclasses import dataclass

import torch

from support.backends import Backend
from support.caches import CacheCase, CacheInputs, call_with_cache, check_cache_drawn, make_cache_inputs
from support.cases import DTYPES, Case
from support.problems.draw import HEAD_DIMS, draw_head_dims, draw_intervals, draw_score_options, maybe
from support.runners import Result, poisoned_memory
from support.strides import bits_of_storage, with_strides

NUM_QUERIES = (1, 1, 1, 1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 70, 128, 200)
NUM_NEW = (0, 0, 1, 1, 2, 5, 15, 16, 17, 40)
PAGE_SIZES = (16, 16, 32, 48, 64, 80)
CAPACITIES = (40, 64, 65, 96, 200, 333, 512, 700)  # of sequences in pages: up to the end of a page
GROUPS = (1, 1, 2, 3, 8)
ROTARY_DIMS = (2, 6, 16, 32, 64, 128)
ANOTHER_DRAW = 10**6  # of the same problem
ROW_BYTES = 16  # at whose multiples a GPU wants the rows of a cache


@dataclass(frozen=True)
class CacheProblem:
    number: int
    case: CacheCase
    dtype: torch.dtype
    is_strided: bool

    def __str__(self) -> str:
        return f"{self.case}, {self.dtype}{', random strides' if self.is_strided else ''}"


def draw(number: int) -> CacheProblem:
    rng = random.Random(number)
    dtype = rng.choice(DTYPES)
    is_strided = rng.random() < 0.35
    page_size = maybe(rng, rng.choice(PAGE_SIZES), 0.6)
    new = rng.choice(NUM_NEW)
    capacity = rng.choice(CAPACITIES)
    shared_pages = 0
    if page_size is not None:
        pages = -(-capacity // page_size)
        capacity = pages * page_size
        shared_pages = maybe(rng, rng.randint(1, pages), 0.3) or 0
        shared_pages = min(shared_pages, (capacity - new) // page_size)
    base = _draw_base(rng, dtype, capacity)
    base = dataclasses.replace(base, **draw_intervals(random.Random(f"{number}, intervals")))
    # No sequence may append to what others have, so every sequence has at least the shared pages then.
    shortest = shared_pages * page_size if shared_pages and new else 0
    batch, step = rng.choice((1, 2, 3, 4)), page_size or 16
    lengths = tuple(_draw_length(rng, shortest, capacity - new, step) for _ in range(batch))
    rotary_dims = [dim for dim in {*ROTARY_DIMS, base.d - base.d % 2} if 0 < dim <= base.d]
    rotary_dim = (maybe(rng, rng.choice(sorted(rotary_dims)), 0.5) if rotary_dims and new else None) or 0
    case = CacheCase(
        lengths=lengths,
        new=new,
        capacity=capacity,
        page_size=page_size,
        shared_pages=shared_pages,
        indexed=page_size is None and rng.random() < 0.5,
        rotary_dim=rotary_dim,
        interleaved=rotary_dim > 0 and rng.random() < 0.5,
        base=base,
    )
    return CacheProblem(number, case, dtype, is_strided)


def _draw_base(rng: random.Random, dtype: torch.dtype, capacity: int) -> Case:
    kv_heads = rng.choice((1, 2))
    dims = draw_head_dims(rng, dtype)
    case = Case(
        sq=rng.choice(NUM_QUERIES),
        d=rng.choice(dims),
        dv=maybe(rng, rng.choice((*HEAD_DIMS, *dims))),
        heads=kv_heads * rng.choice(GROUPS),
        kv_heads=kv_heads,
        **draw_score_options(rng, capacity),
        layout=rng.choice(("bhsd", "bshd")),
    )
    return dataclasses.replace(case, causal="bottom_right") if rng.random() < 0.4 else case


def _draw_length(rng: random.Random, shortest: int, longest: int, step: int) -> int:
    """Nothing, everything, around a multiple of a page (or of 16), or anything."""
    edge = step * rng.randint(0, longest // step) + rng.choice((-1, 0, 1))
    return max(shortest, min(longest, rng.choice((0, longest, edge, edge, rng.randint(0, longest)))))


def check_problem(problem: CacheProblem, backend: Backend) -> None:
    def make(redraw: int) -> CacheInputs:
        seed = problem.number + ANOTHER_DRAW * redraw
        return make_cache_inputs(problem.case, problem.dtype, backend.device, seed)

    check_cache_drawn(make, backend, lambda inputs, backend: _run(problem, inputs, backend))


def _run(problem: CacheProblem, inputs: CacheInputs, backend: Backend) -> Result:
    """Of caches with gaps between their rows, and where the problem says so everything at random strides."""
    rng = random.Random(problem.number)
    caches = [_with_gaps(cache, rng, problem.is_strided) for cache in (inputs.k_cache, inputs.v_cache)]
    presented = dataclasses.replace(inputs, k_cache=caches[0], v_cache=caches[1])
    if problem.is_strided:
        presented.q = with_strides(inputs.q, rng)
        presented.tensors = {name: t if t is None else with_strides(t, rng) for name, t in inputs.tensors.items()}
    given = [bits_of_storage(cache).clone() for cache in caches]
    with poisoned_memory():
        out, lse = call_with_cache(presented, backend)
    for name, before, cache in zip(("k_cache", "v_cache"), given, caches, strict=True):
        after = bits_of_storage(cache)
        changed = torch.zeros_like(after, dtype=torch.bool)
        changed.as_strided(cache.shape, cache.stride(), cache.storage_offset()).fill_(True)
        assert torch.equal(after[~changed], before[~changed]), f"{name}: memory between its rows changed"
    return {"out": out, "lse": lse, "k_cache": caches[0], "v_cache": caches[1]}


def _with_gaps(cache: torch.Tensor, rng: random.Random, is_strided: bool) -> torch.Tensor:
    """A view with the values of a cache whose rows begin at multiples of ROW_BYTES, with NaN in the gaps.

    A strided one has its other dimensions in a random order, and gaps between them.
    """
    padded = cache.shape[-1] + -cache.shape[-1] % (ROW_BYTES // cache.element_size())
    order = rng.sample(range(3), 3) if is_strided else [0, 1, 2]
    steps = [rng.choice((1, 1, 2)) if is_strided else 1 for _ in order]
    sizes = [cache.shape[dim] * step for dim, step in zip(order, steps, strict=True)]
    storage = torch.full((*sizes, padded), torch.nan, dtype=cache.dtype, device=cache.device)
    view = storage[tuple(slice(None, None, step) for step in steps)]
    view = view.permute([*(order.index(dim) for dim in range(3)), 3])[..., : cache.shape[-1]]
    return view.copy_(cache)
