"""Which kernels intervals take: those of a boolean mask, but nothing has an element for each pair."""

import pytest
import torch

from flash_attn_ext._explanation import Plan
from support.plans import (
    BF16,
    F32,
    F64,
    KEY_STATIONARY,
    RECOMPUTE,
    TWO_PASS,
    WARP_SPECIALISED,
    Call,
    mismatches,
    packed_plans,
)

LONG = 2048
TILES = LONG // 64
SHARED = (1, 1, LONG, 2)


def plans(intervals: tuple = SHARED, backend: str = "sm90", options: dict | None = None, **more) -> tuple[Plan, Plan]:
    return Call(LONG, intervals=intervals, options={"backend": backend} | (options or {}), **more).plans()


FORWARD = [
    (dict(), dict(kernel=WARP_SPECIALISED, score_mode="mask", head_dims=(64, 64))),
    (dict(d=128, options={"causal": "top_left"}), dict(score_mode="mask", head_dims=(128, 128))),
    (dict(d=256), dict(score_mode="mask", head_dims=(256, 256))),
    (dict(intervals=(8, 16, LONG, 8)), dict(kernel=WARP_SPECIALISED, score_mode="mask")),
    (dict(bias=(1, 16, LONG, LONG)), dict(score_mode="bias and mask")),
    (dict(bias=(1, 16, 1, LONG)), dict(score_mode="generic")),
    (dict(options={"softcap": 9.0}), dict(score_mode="softcap and mask")),
    (dict(slopes=True), dict(score_mode="ALiBi and mask")),
    (dict(options={"dropout_p": 0.1}), dict(score_mode="mask and dropout")),
    (dict(mask=(8, 1, 1, LONG)), dict(score_mode="generic")),  # bits of both would be as many as pairs
]
BACKWARD = [
    (dict(), dict(kernel=KEY_STATIONARY, score_mode="mask")),
    (dict(d=128, options={"causal": "bottom_right"}), dict(kernel=KEY_STATIONARY, score_mode="mask")),
    (dict(d=192), dict(kernel=TWO_PASS)),
    (dict(bias=(1, 16, LONG, LONG)), dict(kernel=KEY_STATIONARY, score_mode="bias and mask")),
]


@pytest.mark.parametrize(("call", "expected"), FORWARD, ids=str)
def test_forward_kernels_of_hopper(call, expected):
    assert mismatches(plans(**call)[0], expected) == {}


@pytest.mark.parametrize(("call", "expected"), BACKWARD, ids=str)
def test_backward_kernels_of_hopper(call, expected):
    assert mismatches(plans(**call)[1], expected) == {}


@pytest.mark.parametrize(
    ("intervals", "planes"), [(SHARED, 1), ((8, 1, LONG, 4), 8), ((1, 16, LONG, 2), 16), ((8, 16, LONG, 8), 128)]
)
def test_a_byte_for_each_tile_of_pairs(intervals, planes):
    """And no bits of a mask, however many intervals there are."""
    for backend in ("sm80", "sm90"):
        forward, _ = plans(intervals, backend)
        assert forward.workspace["mask tiles"] == planes * TILES**2
        assert "mask bits" not in forward.workspace


def test_the_lists_of_the_backward_pass():
    """18 bytes for each tile of 128 keys x 64 queries and loop order, the begins and ends once more, and one number:
    no bits."""
    _, backward = plans()
    tiles = TILES * TILES // 2
    lists = 18 * tiles + 4 * (TILES // 2)
    assert backward.workspace["mask bits"] == 2 * lists + 4 + 8 * LONG + 1 + tiles
    _, of_window = plans(options={"window": (99, 0)}, key_heads=4)  # in one loop order
    assert of_window.workspace["mask bits"] == lists + 4 + 8 * LONG + 1 + tiles


def test_intervals_of_heads_share_no_lists():
    _, backward = plans((1, 16, LONG, 2), options={"causal": "top_left"}, key_heads=4)
    assert backward.kernel == KEY_STATIONARY
    _, shared = plans(SHARED, options={"causal": "top_left"}, key_heads=4)
    assert backward.workspace["mask bits"] - 4 == 16 * (shared.workspace["mask bits"] - 4)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_portable_kernels(dtype):
    forward, backward = plans(backend="sm80", dtype=dtype)
    assert forward.workspace["mask tiles"] == backward.workspace["mask tiles"] == TILES**2


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", F32), ("sm80", F64)])
def test_backends_that_need_no_workspace(backend, dtype):
    forward, _ = plans(backend=backend, dtype=dtype)
    assert "mask tiles" not in forward.workspace


@pytest.mark.parametrize(
    ("tokens", "call", "parts"),
    [
        (4096, dict(), 264),
        (4096, dict(options={"causal": "top_left"}), 264),
        (4032, dict(), 0),  # no key tile has so many iterations
        (1024, dict(heads=16, key_heads=2), 0),
    ],
    ids=str,
)
def test_room_for_parts_of_key_tiles(tokens, call, parts, monkeypatch):
    """Partial dK and dV of 128 keys for two parts of each SM, beside those of shares of a KV group."""
    monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", "132")
    call["options"] = {"backend": "sm90"} | call.get("options", {})
    plan = Call(tokens, d=128, batch=1, intervals=(1, 1, tokens, 2), **call).plans()[1]
    of_shares = 2 * plan.group_shares * tokens if "key_heads" in call else 0
    assert plan.workspace.get("partial dK and dV", 0) == (128 * parts + of_shares) * (128 + 128) * 4


def test_a_part_needs_room_in_the_workspace(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "2")
    plan = Call(4096, d=128, batch=1, intervals=(1, 1, 4096, 2), options={"backend": "sm90"}).plans()[1]
    assert plan.workspace["partial dK and dV"] == 2**21


def test_lists_have_a_bound(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "0")
    assert plans()[1].kernel == RECOMPUTE


def test_packed_sequences_have_tiles_of_their_own():
    intervals = torch.zeros(1, 4 * LONG, 2, dtype=torch.int32)
    forward, backward = packed_plans((LONG,) * 4, d=64, heads=16, intervals=intervals)
    assert mismatches(forward, dict(kernel=WARP_SPECIALISED, score_mode="mask")) == {}
    assert forward.workspace["mask tiles"] == (4 * TILES + 4) * TILES  # no more than one sequence of all tokens has
    assert backward.kernel == KEY_STATIONARY
