"""Which calls copy a bias on Hopper because TMA cannot read its rows (csrc/attention/aligned_bias.h)."""

import pytest

from support.plans import KEY_STATIONARY, SHORT_BIAS, TWO_PASS, WARP_SPECIALISED, Call, mismatches

COPY = "aligned copy of the bias"
WITH_BIAS = ("q", "k", "v", "bias")

# The call, the bytes of the copy, and the kernels of both passes.
COPIED = [
    (dict(sq=500, sk=501, bias=(1, 16, 500, 501)), 16 * 500 * 504 * 2, WARP_SPECIALISED, KEY_STATIONARY),
    (dict(sq=300, sk=300, bias=(8, 1, 300, 300), d=128), 8 * 300 * 304 * 2, WARP_SPECIALISED, KEY_STATIONARY),
    (
        dict(sq=300, sk=301, bias=(1, 1, 300, 301), mask=(8, 1, 1, 301)),
        300 * 304 * 2,
        WARP_SPECIALISED,
        KEY_STATIONARY,
    ),
    (
        dict(sq=300, sk=301, bias=(8, 16, 300, 301), wanted=WITH_BIAS),
        8 * 16 * 300 * 304 * 2,
        WARP_SPECIALISED,
        TWO_PASS,
    ),
    (
        dict(sq=500, sk=501, bias=(1, 16, 500, 501), options={"dropout_p": 0.1}, wanted=WITH_BIAS),
        16 * 500 * 504 * 2,
        WARP_SPECIALISED,
        KEY_STATIONARY,
    ),
    (dict(sq=200, sk=230, bias=(1, 16, 200, 230), d=32), 16 * 200 * 232 * 2, SHORT_BIAS, SHORT_BIAS),
]
READ_IN_PLACE = [
    dict(sq=500, sk=504, bias=(1, 16, 500, 504)),
    dict(sq=500, sk=501, bias=(1, 16, 500, 501), options={"softcap": 9.0}),
    dict(sq=500, sk=501, bias=(1, 16, 500, 501), d=192),
    dict(sq=500, sk=501, bias=(1, 16, 500, 1)),
    dict(sq=500, sk=501, bias=(1, 16, 1, 501)),
    dict(sq=49, sk=49, bias=(1, 16, 49, 49), d=32),
]


def hopper(options: dict | None = None, **call) -> Call:
    return Call(options={"backend": "sm90"} | (options or {}), **call)


@pytest.mark.parametrize(("call", "size", "forward", "backward"), COPIED, ids=str)
def test_copies(call, size, forward, backward):
    for plan, kernel in zip(hopper(**call).plans(), (forward, backward), strict=True):
        assert mismatches(plan, dict(kernel=kernel, workspace={COPY: size})) == {}


@pytest.mark.parametrize("call", READ_IN_PLACE, ids=str)
def test_where_a_bias_is_read_in_place(call):
    for plan in hopper(**call).plans():
        assert mismatches(plan, dict(workspace={COPY: 0})) == {}


def test_no_copy_without_memory_for_it(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "7")
    for plan in hopper(sq=500, sk=501, bias=(1, 16, 500, 501)).plans():
        assert mismatches(plan, dict(workspace={COPY: 0})) == {}
