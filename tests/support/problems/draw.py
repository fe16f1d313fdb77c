"""Random problems: all features together, at tile edges. A number is a problem, the same one everywhere."""

import dataclasses
import random
from dataclasses import dataclass

import torch

from support.cases import ALL_PATTERNS, DIFFERENTIABLE, DTYPES, Case
from support.masks import visible
from support.packed import PackedCase

LENGTHS = (1, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 300)
HEAD_DIMS = (1, 3, 8, 16, 31, 32, 33, 40, 63, 64, 65, 72, 96, 127, 128, 129, 192, 255, 256)
# Only the 16-bit types have these on every backend. They are few, because they take long where there is no GPU.
WIDE_HEAD_DIMS = (257, 320, 400, 511, 512, 520, 576)
WIDE = 0.15  # how many of the problems in 16-bit types have such a head dim
PACKED_LENGTHS = (0, 0, 1, 3, 17, 32, 33, 64, 65, 100, 128, 129, 257)


@dataclass(frozen=True)
class Problem:
    number: int
    case: Case
    packed: PackedCase | None  # every fifth problem: the same features on sequences of different lengths
    dtype: torch.dtype
    is_strided: bool
    wanted: tuple[str, ...]  # whose gradients
    environment: tuple[tuple[str, str], ...]  # variables that change a GPU's plans

    def __str__(self) -> str:
        strides = ", random strides" if self.is_strided else ""
        of = "" if self.wanted == DIFFERENTIABLE else f", gradients of {'-'.join(self.wanted)}"
        variables = "".join(f", {name}={value}" for name, value in self.environment)
        return f"{self.packed or self.case}, {self.dtype}{strides}{of}{variables}"


def draw(number: int) -> Problem:
    rng = random.Random(number)
    dtype = rng.choice(DTYPES)
    is_strided = rng.random() < 0.35
    case = _draw_case(rng, dtype)
    rare = random.Random(f"{number}, rarely")  # which leaves the other draws what they are
    case = dataclasses.replace(case, **_draw_rare(rare, case))
    case = dataclasses.replace(case, **draw_intervals(random.Random(f"{number}, intervals")))
    if number % 5 != 4:  # packed sequences take no lists of blocks
        case = dataclasses.replace(case, **_draw_blocks(random.Random(f"{number}, blocks"), case))
    if case.mask is not None:
        case = dataclasses.replace(case, **_draw_padding(random.Random(f"{number}, padding"), case))
    # Where no query sees two keys, q and k have gradients of exactly 0, which the plain formula finds. In 16 bits a
    # delta of the rounded out does not, unless out is v itself: so no dropout there.
    if int(visible(case).sum(1).max()) < 2:
        case = dataclasses.replace(case, dropout_p=0.0)
    packed = _draw_packed(rng, case) if number % 5 == 4 else None
    return Problem(number, case, packed, dtype, is_strided, draw_wanted(rare, case), _draw_environment(rare))


def maybe(rng: random.Random, value, probability: float = 0.35):
    return value if rng.random() < probability else None


def draw_score_options(rng: random.Random, sk: int) -> dict:
    """What decides which keys a query sees, and their scores, as fields of a Case."""
    return dict(
        causal=maybe(rng, rng.choice(("top_left", "bottom_right")), 0.5),
        window=maybe(rng, (rng.choice((None, 0, 7, 100)), rng.choice((None, 0, 7, 100)))),
        scale=maybe(rng, rng.choice((-0.2, 0.05, 0.5))),
        softcap=maybe(rng, rng.choice((1.0, 20.0))),
        bias=maybe(rng, rng.choice(ALL_PATTERNS), 0.5),
        bias_float32=rng.random() < 0.3,
        mask=maybe(rng, rng.choice(ALL_PATTERNS)),
        mask_keep=rng.choice((0.7, 0.7, 0.05 if sk > 60 else 0.7)),
        alibi=maybe(rng, rng.choice(("h", "bh"))),
        sink=rng.random() < 0.35,
    )


def draw_intervals(rng: random.Random) -> dict:
    """Often of many neighbouring queries together, so that whole tiles are hidden, or seen."""
    if rng.random() < 0.7:
        return {}
    return dict(
        intervals=rng.choice(("11", "11", "1h", "b1", "bh")),
        num_intervals=rng.choice((1, 1, 2, 3, 4)),
        interval_rows=rng.choice((1, 50, 64, 200)),
    )


def _draw_blocks(rng: random.Random, case: Case) -> dict:
    if rng.random() < 0.8 or case.sq == 0 or case.sk == 0:
        return {}
    return dict(
        blocks=rng.choice(("11", "1h", "bh", "1k", "bk")),
        block_sizes=(rng.choice((64, 128)), rng.choice((64, 128))),
        block_keep=rng.choice((0.2, 0.5, 0.9)),
    )


def draw_head_dims(rng: random.Random, dtype: torch.dtype) -> tuple[int, ...]:
    """Those to choose from."""
    return WIDE_HEAD_DIMS if dtype.itemsize == 2 and rng.random() < WIDE else HEAD_DIMS


def _draw_case(rng: random.Random, dtype: torch.dtype) -> Case:
    kv_heads = rng.choice((1, 2))
    heads = kv_heads * rng.choice((1, 1, 2, 3))
    # A lone key has an exact gradient of zero for q and k, against which no relative error exists.
    sq, sk = rng.choice(LENGTHS), rng.choice(LENGTHS[1:])
    dims = draw_head_dims(rng, dtype)
    return Case(
        sq=sq,
        sk=sk,
        d=rng.choice(dims),
        dv=maybe(rng, rng.choice((*HEAD_DIMS, *dims))),
        batch=rng.choice((1, 2, 3)),
        heads=heads,
        kv_heads=kv_heads,
        **draw_score_options(rng, sk),
        dropout_p=maybe(rng, rng.choice((0.1, 0.6)), 0.3) or 0.0,
        dlse=rng.random() < 0.5,
        layout=rng.choice(("bhsd", "bshd")),
    )


def _draw_rare(rng: random.Random, case: Case) -> dict:
    """Values that take other ways through a kernel, or another kernel; few of them in one problem."""
    values = dict(
        heads=8 * case.num_kv_heads,
        scale=0.0,
        window=tuple(rng.choice((None, 1, 63, 64, 128)) for _ in range(2)),
        mask_keep=rng.choice((0.3, 1.0)),
        dropout_p=0.01,
    )
    return {name: value for name, value in values.items() if rng.random() < 0.06}


def _draw_padding(rng: random.Random, case: Case) -> dict:
    """Most of it hides keys from all queries and heads."""
    return dict(padding=True, mask=rng.choice((case.mask, "b11k", "b11k"))) if rng.random() < 0.4 else {}


def draw_wanted(rng: random.Random, case: Case) -> tuple[str, ...]:
    """Which kernels run depends on it."""
    optional = dict(bias=case.bias, alibi_slopes=case.alibi, sink=case.sink)
    there = [name for name in DIFFERENTIABLE if optional.get(name, True)]
    wanted = rng.sample(there, rng.randint(1, len(there)))
    if rng.random() < 0.7 or len(wanted) == len(there):
        return DIFFERENTIABLE
    return tuple(sorted(wanted, key=DIFFERENTIABLE.index))


def _draw_environment(rng: random.Random) -> tuple[tuple[str, str], ...]:
    workspace = maybe(rng, rng.choice(("0", "1")), 0.15)  # MiB: no scores are materialised, or in several launches
    num_sms = maybe(rng, rng.choice(("1", "5", "24")), 0.1)
    drawn = {"FLASH_ATTN_EXT_WORKSPACE_MIB": workspace, "FLASH_ATTN_EXT_MULTIPROCESSORS": num_sms}
    return tuple((name, value) for name, value in drawn.items() if value is not None)


def _draw_packed(rng: random.Random, case: Case) -> PackedCase:
    """As many sequences as the case has batch entries, and up to two more; one at least has keys and queries."""
    count = case.batch + rng.choice((0, 1, 2))
    lengths_q, lengths_k = ([rng.choice(PACKED_LENGTHS) for _ in range(count)] for _ in range(2))
    index = rng.randrange(count)
    lengths_q[index], lengths_k[index] = min(case.sq, 129), min(case.sk, 257)
    return PackedCase(tuple(lengths_q), tuple(lengths_k), case)
