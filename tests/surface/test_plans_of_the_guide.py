"""The table of docs/performance.md: which kernels a call with an option takes on Hopper, by its plans."""

import re
from pathlib import Path

import pytest

from support.plans import F16, F32, KEY_STATIONARY, TWO_PASS, WARP_SPECIALISED, Call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
LENGTH = 2048
PAIRS, KEYS, OF_ENTRIES = (1, 1, LENGTH, LENGTH), (1, 1, 1, LENGTH), (8, 1, 1, LENGTH)
WITH_BIAS, WITH_SLOPES, WITH_SINK = (("q", "k", "v", name) for name in ("bias", "alibi_slopes", "sink"))
SOFTCAP, DROPOUT = {"options": {"softcap": 30.0}}, {"options": {"dropout_p": 0.1}}

# The calls of each row, as arguments of Call.
CALLS = {
    "none, causal, a window, grouped heads, a sink without gradient": (
        {},
        {"options": {"causal": "top_left"}},
        {"options": {"window": (256, 0)}},
        {"key_heads": 4},
        {"sink": True},
    ),
    "a mask of keys, or of queries and keys": ({"mask": OF_ENTRIES}, {"mask": PAIRS}),
    "dropout": (DROPOUT,),
    "a bias for each query and key, without gradient": ({"bias": PAIRS},),
    "a bias for each query and key, with gradient": ({"bias": PAIRS, "wanted": WITH_BIAS},),
    "a bias beside a mask": ({"bias": PAIRS, "mask": OF_ENTRIES},),
    "a softcap, or a scale that is not positive": (SOFTCAP, {"options": {"scale": -1.0}}),
    "ALiBi slopes without gradient": ({"slopes": True},),
    "dropout beside a mask, a softcap beside a mask": (DROPOUT | {"mask": PAIRS}, SOFTCAP | {"mask": OF_ENTRIES}),
    "a bias that broadcasts over queries, without gradient": ({"bias": KEYS},),
    "a bias that broadcasts over queries, with gradient": ({"bias": KEYS, "wanted": WITH_BIAS},),
    "ALiBi slopes with gradient": ({"slopes": True, "wanted": WITH_SLOPES},),
    "a sink with gradient": ({"sink": True, "wanted": WITH_SINK},),
    "a float32 bias beside 16-bit q, k and v": ({"bias": PAIRS, "bias_dtype": F32},),
}


def rows() -> dict[str, tuple[str, ...]]:
    """option -> forward, backward, backward at head dims above 128."""
    table = PAGE.read_text(encoding="utf-8").partition("## What an option costs on Hopper")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {cells[0]: tuple(cells[1:]) for cells in lines[2:]}


def kernel_of(plan) -> str:
    names = {WARP_SPECIALISED: "Hopper", KEY_STATIONARY: "Hopper", TWO_PASS: "two-pass"}
    return names.get(plan.kernel, "portable")


def on_hopper(arguments: dict, **more) -> Call:
    arguments = arguments | more
    return Call(LENGTH, **arguments | {"options": {"backend": "sm90"} | arguments.get("options", {})})


def test_every_row_has_calls():
    assert list(rows()) == list(CALLS)


@pytest.mark.parametrize("option", CALLS)
def test_kernels_of_an_option(option):
    forward, backward, backward_of_large = rows()[option]
    for arguments in CALLS[option]:
        for more in ({"d": 64}, {"d": 128}, {"d": 128, "dtype": F16}):
            found = tuple(map(kernel_of, on_hopper(arguments, **more).plans()))
            assert found == (forward, backward), (arguments, more)
        for d in (192, 256):
            assert kernel_of(on_hopper(arguments, d=d).plans()[1]) == backward_of_large, (arguments, d)


def test_the_names_of_kernels_are_told_apart():
    assert re.match("warp-specialised", on_hopper({}, d=128).plans()[0].kernel)
    assert kernel_of(Call(LENGTH).plans()[0]) == "portable"
