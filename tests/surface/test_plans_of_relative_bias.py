"""Which kernels a relative-position bias takes on Hopper, and the bound of the boxes that these read."""

import pytest

from support.plans import KEY_STATIONARY, RECOMPUTE, TWO_PASS, WARP_SPECIALISED, Call

LONG = 2048
HEADS = 64
BOXES = "boxes of the relative-position bias"
BYTES = HEADS * 64 * (2 * LONG - 64) * 2  # 64 rows of the values of each head, without those of the last box's rows
WITH_BIAS = ("q", "k", "v", "bias")


def plans(**more):
    return Call(LONG, heads=HEADS, relative_bias=True, options={"backend": "sm90"}, **more).plans()


@pytest.mark.parametrize("wanted", [("q", "k", "v"), WITH_BIAS], ids=str)
def test_boxes_are_written_in_both_passes(wanted):
    forward, backward = plans(wanted=wanted)
    assert (forward.kernel, backward.kernel) == (WARP_SPECIALISED, KEY_STATIONARY)
    assert forward.score_mode == backward.score_mode == "bias and mask"
    assert forward.workspace[BOXES] == backward.workspace[BOXES] == BYTES


@pytest.mark.parametrize(("mebibytes", "fits"), [("32", True), ("31", False)])
def test_boxes_have_a_bound(mebibytes, fits, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    forward, backward = plans(wanted=WITH_BIAS)
    assert forward.score_mode == ("bias and mask" if fits else "generic")
    assert backward.kernel == (KEY_STATIONARY if fits else TWO_PASS)
    assert (BOXES in forward.workspace) == (BOXES in backward.workspace) == fits
    assert backward.dbias == "of a relative-position bias, from dS recomputed over the batch"


def test_nothing_is_written_without_a_workspace(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", "0")
    forward, backward = plans(wanted=WITH_BIAS)
    assert (forward.kernel, forward.score_mode) == (WARP_SPECIALISED, "generic")
    assert backward.kernel == RECOMPUTE
    assert backward.dbias == "of a relative-position bias, from recomputed dS"


@pytest.mark.parametrize(
    ("tokens", "heads", "backend", "splits"), [(256, 4, "sm90", 8), (256, 4, "sm80", 8), (LONG, HEADS, "sm90", None)]
)
def test_ctas_share_the_batch_where_block_diagonals_are_few(tokens, heads, backend, splits):
    options = {"backend": backend}
    _, backward = Call(tokens, heads=heads, relative_bias=True, options=options, wanted=WITH_BIAS).plans()
    assert backward.dbias_splits == splits
    assert ("dbias splits 8" in str(backward)) == (splits == 8)
