"""Masks that hide keys of some batch entries: padding at either end, at both, none, all, and what is no padding.

A GPU backend may compute an entry of which one interval of keys is left as if these were all of its keys, whatever the
other entries are.
"""

import pytest
import torch

from support.cases import Case, Inputs, make_inputs
from support.checks import check_drawn, check_inputs
from support.errors import assert_same_answer
from support.params import for_gpus, over_cases, over_dtypes
from support.runners import run_ours

KINDS = ("right", "left", "both", "none", "all", "scattered", "one key", "all but one")


def row(kind: str, keys: int) -> torch.Tensor:
    """Which of a batch entry's keys are attended."""
    position = torch.arange(keys)
    middle = keys * 5 // 8
    return {
        "right": position < middle,
        "left": position >= keys - middle,
        "both": (position >= keys // 5) & (position < middle),
        "none": position >= 0,
        "all": position < 0,
        "scattered": position % 7 < 4,
        "one key": position == keys - 2,
        "all but one": position != keys // 2,
    }[kind]


def padded(inputs: Inputs, kinds: tuple[str, ...] = KINDS) -> Inputs:
    mask = torch.stack([row(kind, inputs.case.sk) for kind in kinds])
    return inputs.replace(mask=mask[:, None, None].to(inputs.q.device))


def case(sq: int, sk: int, **features) -> Case:
    return Case(sq=sq, sk=sk, mask="b11k", **(dict(batch=len(KINDS), heads=2) | features))


# Around the tiles of each kernel, and in those that keep all keys of a sequence at once. The CPU has one kernel.
CASES = [case(size, size, d=64) for size in (65, 128, 257)]
CASES += [case(sq, sk, d=64) for sq, sk in ((63, 300), (300, 63), (129, 385), (260, 511))]
CASES += [case(200, 330, d=d) for d in (40, 256)]
CASES += for_gpus(case(size, size, d=64) for size in (97, 130, 193, 209, 256))
CASES += for_gpus(case(sq, sk, d=128) for sq, sk in ((63, 300), (300, 63), (129, 385), (260, 511)))
CASES += for_gpus(case(200, 330, d=d) for d in (72, 96, 160, 192))
CAUSAL = [
    case(size, size, d=d, causal=causal)
    for size, d, causal in (
        (300, 64, "bottom_right"),
        (257, 128, "top_left"),
        (100, 64, "top_left"),
        (160, 64, "bottom_right"),
        (400, 128, "bottom_right"),
        (200, 192, "top_left"),
        (200, 256, "bottom_right"),
    )
]
WINDOWS = [
    case(size, size, d=d, window=window)
    for size, d, window in (
        (300, 96, (0, 50)),
        (600, 64, (500, 599)),
        (150, 64, (30, 9)),
        (300, 128, (70, 40)),
    )
]
CASES += [*CAUSAL[:2], *for_gpus(CAUSAL[2:]), *WINDOWS[:2], *for_gpus(WINDOWS[2:])]
CASES += [case(170, 300, d=d, causal="top_left") for d in (64, 128)] + [case(300, 170, d=64, causal="top_left")]
CASES += [case(150, 290, d=d, dv=dv) for d, dv in ((192, 128), (128, 256))]
CASES += [
    case(200, 330, d=64, heads=4, kv_heads=2, sink=True, dlse=True),
    case(140, 330, d=128, layout="bshd", scale=0.3),
]
# Beyond the tokens of a GPU's small tiles.
LONG = for_gpus([case(1600, 1600, d=64, causal="top_left"), case(1700, 1700, d=64, window=(200, 0))])
# What other kernels take, interval or not.
FEATURES = [
    case(140, 270, d=64, **features)
    for features in (
        dict(causal="top_left"),
        dict(causal="bottom_right"),
        dict(window=(40, 20)),
        dict(dropout_p=0.1),
        dict(dropout_p=0.1, causal="top_left"),
        dict(softcap=9.0),
        dict(alibi="h"),
        dict(bias="1hqk"),
    )
]
FEATURES += for_gpus(case(size, size, d=64, alibi="h") for size in (70, 97, 150, 200, 256))
FEATURES += for_gpus(case(100, 100, d=d, alibi="bh", causal="top_left") for d in (40, 128))


@over_dtypes((torch.bfloat16, *for_gpus([torch.float16])))
@over_cases(CASES + LONG)
def test_every_kind(case, dtype, backend):
    check_drawn(lambda seed: padded(make_inputs(case, dtype, backend.device, seed)), backend)


@over_dtypes((torch.float32, torch.bfloat16))
@over_cases(FEATURES)
def test_features(case, dtype, backend):
    # Not one key: its dS is exactly 0, and what is left of it is only rounding (docs/numerics.md, delta).
    kinds = tuple("both" if kind == "one key" else kind for kind in KINDS)
    check_drawn(lambda seed: padded(make_inputs(case, dtype, backend.device, seed), kinds), backend)


@over_dtypes((torch.bfloat16,))
@pytest.mark.parametrize("kind", KINDS)
@over_cases([Case(sq=140, sk=270, d=64, batch=3, mask="111k"), Case(sq=270, sk=600, d=128, batch=2, mask="111k")])
def test_one_row_for_all_entries(case, kind, dtype, backend):
    inputs = padded(make_inputs(case, dtype, backend.device), (kind,))
    result = check_inputs(inputs, backend)
    hidden = ~inputs.mask[0, 0, 0]
    assert bool((result["dk"][:, :, hidden] == 0).all()) and bool((result["dv"][:, :, hidden] == 0).all())


@over_dtypes((torch.bfloat16,))
@over_cases(
    [case(128, 128, d=64), case(300, 300, d=64), case(300, 300, d=64, causal="top_left"), case(200, 400, d=128)]
)
def test_an_entry_does_not_depend_on_the_others(case, dtype, backend):
    """Bit for bit what it is beside entries of any other kind."""
    first = padded(make_inputs(case, dtype, backend.device))
    result = run_ours(first, backend)
    for shift in (1, 3):
        kinds = KINDS[shift:] + KINDS[:shift]
        turned = {name: getattr(first, name).roll(-shift, 0) for name in ("q", "k", "v", "dout")}
        other = run_ours(padded(first.replace(**turned), kinds), backend)
        for name in ("out", "lse"):
            assert torch.equal(other[name], result[name].roll(-shift, 0)), name


@over_dtypes((torch.bfloat16,))
@over_cases(
    [
        case(128, 128, d=64),
        case(130, 130, d=64, causal="bottom_right"),
        case(300, 300, d=64),
        case(300, 300, d=64, causal="top_left"),
        case(200, 400, d=128),
        case(270, 270, d=128, causal="bottom_right"),
        case(200, 330, d=192),
    ]
)
def test_what_padding_holds_reaches_nothing(case, dtype, backend):
    inputs = padded(make_inputs(case, dtype, backend.device))
    clean = run_ours(inputs, backend)
    hidden = ~inputs.mask[:, 0, 0, :, None]
    for name, value in (("k", float("nan")), ("v", float("inf"))):
        tensor = getattr(inputs, name)
        tensor.copy_(torch.where(hidden[:, None], torch.full_like(tensor, value), tensor))
    for name, tensor in run_ours(inputs, backend).items():
        assert_same_answer(tensor, clean[name], backend, name)
