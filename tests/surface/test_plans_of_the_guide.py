"""The table of docs/performance.md: which kernels a call with an option takes on Hopper, by its plans."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from support.plans import BF16, F16, F32, KEY_STATIONARY, TWO_PASS, WARP_SPECIALISED, Call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
LENGTH = 2048
DASH = "\N{EN DASH}"  # in the last column of an option that ends before its head dims
PAIRS, KEYS, OF_ENTRIES = (1, 1, LENGTH, LENGTH), (1, 1, 1, LENGTH), (8, 1, 1, LENGTH)
INTERVALS, LISTS = (1, 1, LENGTH, 2), (1, 1, LENGTH // 128)
WITH_BIAS, WITH_SLOPES, WITH_SINK = (("q", "k", "v", name) for name in ("bias", "alibi_slopes", "sink"))
SOFTCAP, DROPOUT = {"options": {"softcap": 30.0}}, {"options": {"dropout_p": 0.1}}

# The calls of each row, as arguments of Call.
CALLS = {
    "none, causal, a window, grouped heads": (
        {},
        {"options": {"causal": "top_left"}},
        {"options": {"window": (256, 0)}},
        {"key_heads": 4},
    ),
    "a sink, with or without gradient, up to head dim 64 or in float16": (
        {"sink": True, "dtype": F16},
        {"sink": True, "wanted": WITH_SINK, "dtype": F16},
    ),
    "a sink above head dim 64 in bfloat16": (
        {"sink": True, "d": 128, "dtype": BF16},
        {"sink": True, "d": 72, "dtype": BF16, "wanted": WITH_SINK},
    ),
    "a mask of keys, or of queries and keys": ({"mask": OF_ENTRIES}, {"mask": PAIRS}),
    "intervals, lists of blocks": (
        {"intervals": INTERVALS},
        {"intervals": (8, 16, LENGTH, 8)},
        {"block_lists": LISTS},
        {"block_lists": (8, 4, LENGTH // 128), "key_heads": 4},
        {"block_lists": LISTS, "intervals": INTERVALS},
    ),
    "dropout": (DROPOUT,),
    "a bias for each query and key, without gradient, alone or beside a mask, intervals or lists of blocks": (
        {"bias": PAIRS},
        {"bias": PAIRS, "mask": OF_ENTRIES},
        {"bias": PAIRS, "mask": PAIRS},
        {"bias": PAIRS, "intervals": INTERVALS},
        {"bias": PAIRS, "block_lists": LISTS},
    ),
    "such a bias, alone or beside a mask of keys, with gradient, the same for all batch entries, up to head dim 64": (
        {"bias": PAIRS, "wanted": WITH_BIAS, "d": 64},
        {"bias": (1, 16, LENGTH, LENGTH), "wanted": WITH_BIAS, "d": 32},
        {"bias": PAIRS, "mask": OF_ENTRIES, "wanted": WITH_BIAS, "d": 64},
        {"bias": PAIRS, "mask": KEYS, "wanted": WITH_BIAS, "d": 64},
    ),
    "other biases for each query and key, with gradient": (
        {"bias": PAIRS, "wanted": WITH_BIAS, "d": 72},
        {"bias": PAIRS, "wanted": WITH_BIAS, "d": 128},
        {"bias": (1, 16, LENGTH, LENGTH), "wanted": WITH_BIAS, "d": 96},
        {"bias": (8, 1, LENGTH, LENGTH), "wanted": WITH_BIAS},
    ),
    "a softcap": (SOFTCAP,),
    "a scale that is not positive": ({"options": {"scale": -1.0}},),
    "ALiBi slopes, with or without gradient": (
        {"slopes": True},
        {"slopes": True, "options": {"causal": "bottom_right"}},
        {"slopes": True, "options": {"window": (256, 9)}},
        {"slopes": True, "wanted": WITH_SLOPES},
        {"slopes": True, "wanted": WITH_SLOPES, "options": {"causal": "bottom_right"}},
    ),
    "dropout beside a mask, intervals or lists of blocks": (
        DROPOUT | {"mask": KEYS},
        DROPOUT | {"mask": OF_ENTRIES},
        DROPOUT | {"mask": PAIRS},
        DROPOUT | {"block_lists": LISTS},
        DROPOUT | {"intervals": INTERVALS},
    ),
    "dropout beside a bias for each query and key, without gradient, or with one of up to 1024 queries that all batch "
    "entries share, alone or beside a mask of keys, up to head dim 64": (
        DROPOUT | {"bias": PAIRS, "d": 64},
        DROPOUT | {"bias": PAIRS, "mask": PAIRS, "d": 64},
        DROPOUT
        | {
            "bias": (1, 16, 1024, LENGTH),
            "mask": KEYS,
            "sq": 1024,
            "sk": LENGTH,
            "d": 64,
            "wanted": WITH_BIAS,
        },
        DROPOUT | {"bias": (1, 16, 1024, LENGTH), "sq": 1024, "sk": LENGTH, "d": 64, "wanted": WITH_BIAS},
    ),
    "dropout beside other biases for each query and key": (
        DROPOUT | {"bias": PAIRS, "d": 128},
        DROPOUT | {"bias": (8, 1, LENGTH, LENGTH), "wanted": WITH_BIAS},
        DROPOUT | {"bias": PAIRS, "wanted": WITH_BIAS},
    ),
    "a softcap or ALiBi slopes beside a mask, intervals or lists of blocks": tuple(
        hides | changes
        for hides in (
            {"mask": KEYS},
            {"mask": OF_ENTRIES},
            {"mask": PAIRS},
            {"block_lists": LISTS},
            {"intervals": INTERVALS},
        )
        for changes in (SOFTCAP, {"slopes": True})
    ),
    "intervals or lists of blocks beside a mask": (
        {"block_lists": LISTS, "mask": PAIRS},
        {"intervals": INTERVALS, "mask": PAIRS},
        {"intervals": INTERVALS, "mask": OF_ENTRIES},
    ),
    "a bias table by distance, with or without gradient, alone or beside a mask": (
        {"relative_bias": True},
        {"relative_bias": True, "wanted": WITH_BIAS, "options": {"causal": "top_left"}},
        {"relative_bias": True, "wanted": WITH_BIAS, "d": 128},
        {"relative_bias": True, "mask": KEYS, "wanted": WITH_BIAS},
    ),
    "a bias that broadcasts over queries, with or without gradient, where every query sees every key": (
        {"bias": KEYS},
        {"bias": KEYS, "wanted": WITH_BIAS},
        {"bias": KEYS, "d": 128} | DROPOUT,
    ),
    "a causal bias that broadcasts over queries, also a float32 one, with gradient": (
        {"bias": KEYS, "options": {"causal": "top_left"}, "wanted": WITH_BIAS},
        {"bias": (8, 16, 1, LENGTH), "options": {"causal": "top_left"}, "bias_dtype": F32, "wanted": WITH_BIAS},
    ),
    "other biases that broadcast over queries, with or without gradient": (
        {"bias": KEYS, "options": {"causal": "top_left"}},
        {"bias": KEYS, "mask": PAIRS, "wanted": WITH_BIAS},
    ),
    "a bias that broadcasts over keys, with gradient": ({"bias": (1, 1, LENGTH, 1), "wanted": WITH_BIAS},),
    "a float32 bias for each query and key beside 16-bit q, k and v, without gradient": (
        {"bias": PAIRS, "bias_dtype": F32},
    ),
    "a float32 bias for each query and key beside 16-bit q, k and v, with gradient": (
        {"bias": PAIRS, "bias_dtype": F32, "wanted": WITH_BIAS},
    ),
}


def rows() -> dict[str, tuple[str, ...]]:
    """option -> forward, backward, backward at head dims above 128, or a dash where the option ends before them."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## Which kernels an option takes on Hopper")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {cells[0]: tuple(cells[1:]) for cells in lines[2:]}


def kernel_of(plan) -> str:
    names = {WARP_SPECIALISED: "Hopper", KEY_STATIONARY: "Hopper", TWO_PASS: "two-pass"}
    return names.get(plan.kernel, "portable")


def on_hopper(arguments: dict, **more) -> Call:
    arguments = more | arguments
    options = {"backend": "sm90"} | arguments.get("options", {})
    return Call(**{"sq": LENGTH} | arguments | {"options": options})


def test_every_row_has_calls():
    assert list(rows()) == list(CALLS)
    assert all(option.endswith("up to head dim 64") == (row[-1] == DASH) for option, row in rows().items())


@pytest.mark.parametrize("option", CALLS)
def test_kernels_of_an_option(option):
    forward, backward, backward_of_large = rows()[option]
    for arguments in CALLS[option]:
        for more in ({"d": 64}, {"d": 128}, {"d": 128, "dtype": F16}):
            found = tuple(map(kernel_of, on_hopper(arguments, **more).plans()))
            assert found == (forward, backward), (arguments, more)
        for d in (192, 256) if backward_of_large != DASH else ():
            of_large = {name: value for name, value in arguments.items() if name != "d"}
            assert kernel_of(on_hopper(of_large, d=d).plans()[1]) == backward_of_large, (arguments, d)


def test_the_names_of_kernels_are_told_apart():
    assert re.match("warp-specialised", on_hopper({}, d=128).plans()[0].kernel)
    assert kernel_of(Call(LENGTH).plans()[0]) == "portable"


# Calls of the list of what takes portable kernels, at head dim 128: (arguments of Call, whether the forward pass is
# portable, whether the backward pass is).
PORTABLE = {
    "few rows of queries": ({"sq": 16, "sk": 1024, "key_heads": 4}, True, False),
    "as few queries, but more rows": ({"sq": 32, "sk": 1024, "key_heads": 4}, False, False),
    "few queries of many heads": ({"sq": 16, "sk": 1024, "key_heads": 1, "d": 256}, True, True),
    "without dQ": ({"wanted": ("k", "v")}, False, False),
    "without dQ, short": ({"sq": 256, "sk": 256, "wanted": ("k", "v")}, False, True),
    "without dK and dV, D 64": ({"d": 64, "wanted": ("q",)}, False, True),
    "without dK and dV, D 128": ({"d": 128, "wanted": ("q",)}, False, False),
    "without dK and dV, D 128 and fewer keys": ({"d": 128, "sk": 1023, "wanted": ("q",)}, False, True),
    "without dK": ({"wanted": ("q", "v")}, False, False),
    "a bias that broadcasts over keys": ({"bias": (1, 1, LENGTH, 1), "wanted": WITH_BIAS}, False, False),
    "a bias that broadcasts over keys, D 192": (
        {"d": 192, "bias": (1, 1, LENGTH, 1), "wanted": WITH_BIAS},
        False,
        True,
    ),
    "a bias that broadcasts over heads": ({"bias": (8, 1, LENGTH, LENGTH), "wanted": WITH_BIAS}, False, False),
    "a short bias, D 32": ({"sq": 256, "sk": 256, "d": 32, "bias": (1, 16, 256, 256)}, True, True),
    "a short bias, grouped heads": (
        {"sq": 256, "sk": 256, "d": 32, "bias": (1, 16, 256, 256), "key_heads": 4},
        True,
        False,
    ),
    "a bias with a softcap": ({"bias": PAIRS, "wanted": WITH_BIAS} | SOFTCAP, False, False),
    "a head dim of v above 256": ({"dv": 320}, False, False),
    "a head dim of v above 256, with a mask": ({"dv": 320, "mask": PAIRS}, False, True),
    "a head dim of q and k above 256": ({"d": 264}, False, False),
    "a head dim of q and k above 256, with a mask": ({"d": 264, "mask": PAIRS}, True, True),
    "a head dim that is no multiple of 8": ({"d": 36}, False, True),
    "a mask that broadcasts over keys": ({"d": 192, "mask": (8, 1, LENGTH, 1)}, False, True),
    "more than 100k keys": ({"d": 256, "sq": 1 << 17, "batch": 1}, False, False),
    "more than 100k keys in a window": (
        {"d": 256, "sq": 1 << 18, "batch": 1, "options": {"window": (130_000, 0)}},
        False,
        True,
    ),
    "100k keys": ({"d": 256, "sq": 100_000, "batch": 1, "heads": 8, "key_heads": 1}, False, False),
    "more than 512 queries of many keys": ({"sq": 600, "sk": 8192}, False, True),
    "few queries of 256 keys": ({"sq": 16, "sk": 256}, False, True),
    "few queries of more keys": ({"sq": 16, "sk": 257}, False, False),
    "few queries, masked, D 64": ({"sq": 200, "sk": 4096, "d": 64, "mask": (8, 1, 1, 4096)}, False, True),
    "few queries, masked, D 128": ({"sq": 200, "sk": 4096, "mask": (8, 1, 1, 4096)}, False, False),
    "few queries, masked, D 192": ({"sq": 200, "sk": 4096, "d": 192, "mask": (8, 1, 1, 4096)}, False, True),
    "more queries, masked, D 64": ({"sq": 300, "sk": 4096, "d": 64, "mask": (8, 1, 1, 4096)}, False, False),
}


def are_portable(call: Call) -> tuple[bool, bool]:
    forward, backward = (not plan.kernel.startswith("warp-specialised") for plan in call.plans())
    return forward, backward


@pytest.mark.parametrize("name", PORTABLE)
def test_what_takes_portable_kernels(name):
    arguments, forward, backward = PORTABLE[name]
    options = {"options": {"backend": "sm90"} | arguments.get("options", {})}
    assert are_portable(Call(**{"sq": LENGTH, "d": 128} | arguments | options)) == (forward, backward)


@pytest.mark.parametrize("arguments", [{"d": 256}, {"options": {"scale": -1.0}}, {"mask": OF_ENTRIES}], ids=str)
def test_what_takes_portable_kernels_without_a_workspace(arguments, monkeypatch):
    call = on_hopper(arguments)
    assert are_portable(call) == (False, False)
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "0")
    assert are_portable(call) == (False, True)
    assert are_portable(replace(call, d=128, mask=PAIRS, options={"backend": "sm90"})) == (False, False)


def test_keys_are_split_on_hopper_where_scores_are_only_scaled():
    def splits(**arguments) -> int:
        few_heads = dict(sq=128, sk=32768, d=128, batch=1, heads=8)
        return Call(**few_heads | arguments | {"options": {"backend": "sm90"}}).plans()[0].splits or 1

    assert splits() > 1
    assert splits(mask=(1, 1, 1, 32768)) == splits(d=192) == 1
