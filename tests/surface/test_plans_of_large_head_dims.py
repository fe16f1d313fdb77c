"""Which backward kernels calls of head dims from 129 to 256 take on Hopper. Plans need no GPU (test_plans.py)."""

import re

import pytest

from support.plans import F16, Call, label

LONG = 2048
STORING = "dQ storing P and dS, then dK and dV from them"


def hopper(sq: int = LONG, sk: int | None = None, **more) -> Call:
    options = {"backend": "sm90"} | more.pop("options", {})
    return Call(sq, sk, options=options, **{"d": 256, "batch": 2, "heads": 4} | more)


TAKEN = [
    (
        hopper(),
        f"warp-specialised (plain, head dims 256 and 256), {STORING}, in 1 launch of up to 8 key heads; delta by",
    ),
    (hopper(dtype=F16), "head dims 256 and 256"),
    (hopper(d=136), "head dims 192 and 192"),
    (hopper(d=136, dv=64), "head dims 192 and 128"),
    (hopper(d=64, dv=136), "head dims 192 and 192"),
    (hopper(d=192, dv=128), "head dims 192 and 128"),
    (hopper(d=192, dv=136), "head dims 192 and 192"),
    (hopper(d=200, dv=128), "head dims 256 and 256"),
    (hopper(257), STORING),
    (hopper(257, 1), STORING),
    (hopper(options={"causal": "top_left"}), STORING),
    (hopper(options={"causal": "bottom_right"}), STORING),
    (hopper(options={"window": (100, 0)}), STORING),
    (hopper(key_heads=2), "of up to 4 key heads"),
    (hopper(wanted=("q", "k")), STORING),
    (hopper(wanted=("q", "v")), STORING),
    # Two bytes of P and of dS for each pair: 2 GiB hold two heads of 16384 tokens.
    (hopper(16384), "in 4 launches of up to 2 key heads;"),
    # Of more, or where products have too few tiles of keys, some of the queries at a time, unless they are too few for
    # most of the multiprocessors. 23168 tokens have 362 rows of 362 tiles; two heads' blocks of 121 rows fit 132
    # multiprocessors.
    (hopper(23168), "in 12 launches of up to 2 key heads, of a part of their queries;"),
    (hopper(16384, batch=1, key_heads=1), "in 2 launches of up to 1 key heads, of a part of their queries"),
    (hopper(8192, key_heads=1, batch=1, heads=16), "in 2 launches of up to 1 key heads, of a part of their queries"),
    (hopper(8192, key_heads=2, heads=32), "in 8 launches of up to 4 key heads, of a part of their queries"),
    (hopper(127040, batch=1, heads=1), "in 31 launches of up to 1 key heads, of a part of their queries"),
    (hopper(127041, batch=1, heads=1), "each computing the scores"),
    # Of what causal queries do not see nothing is stored: there is room for three heads of 16384 tokens, of which two
    # are taken, and for one of 32704.
    (hopper(16384, batch=1, heads=8, options={"causal": "top_left"}), "in 4 launches of up to 2 key heads"),
    (hopper(16384, 8192, batch=1, heads=8, options={"causal": "bottom_right"}), "in 1 launch of up to 8 key heads"),
    (hopper(32704, options={"causal": "top_left"}), "in 8 launches of up to 1 key heads"),
    (hopper(32705, options={"causal": "top_left"}), "in 16 launches of up to 1 key heads, of a part of their queries"),
    # A window's rows have room for what they can see: 27 tiles of keys.
    (hopper(65536, options={"window": (1600, 0)}), "in 2 launches of up to 4 key heads"),
]


@pytest.mark.parametrize(("call", "words"), TAKEN, ids=label)
def test_calls_that_only_scale(call, words):
    assert words in call.plans()[1]


MASK = (1, 1, LONG, LONG)
CHANGED = [
    (hopper(mask=MASK), f"(mask, head dims 256 and 256), {STORING}, in 1 launch of up to 8 key heads"),
    (hopper(mask=(2, 1, 1, LONG), d=136), "(mask, head dims 192 and 192)"),
    (hopper(mask=MASK, d=192, dv=128, options={"causal": "top_left"}), "mask tiles 1024, mask bits 557056"),
    (hopper(mask=(1, 1, 16384, 16384), sq=16384, batch=1, key_heads=1), "launches of up to 1 key heads, of a part"),
    (hopper(options={"softcap": 9.0}), f"(modified, head dims 256 and 256), {STORING}"),
    (hopper(options={"softcap": 9.0, "dropout_p": 0.1, "causal": "top_left"}, dtype=F16), "(modified,"),
    (hopper(options={"dropout_p": 0.1}, d=192, dv=128), "(modified, head dims 192 and 128)"),
    (hopper(options={"scale": -1.0}, d=160), "(modified, head dims 192 and 192)"),
    (hopper(slopes=True, options={"window": (100, 0)}), "(modified,"),
]


@pytest.mark.parametrize(("call", "words"), CHANGED, ids=label)
def test_calls_whose_scores_change(call, words):
    assert words in call.plans()[1]


PORTABLE = {
    "a bias": {"bias": MASK},
    "a bias and a mask": {"bias": MASK, "mask": MASK},
    "a mask that is broadcast along keys": {"mask": (1, 1, LONG, 1)},
    "a mask and dropout": {"mask": MASK, "options": {"dropout_p": 0.1}},
    "a mask and a softcap": {"mask": MASK, "options": {"softcap": 9.0}},
    "gradients of slopes": {"slopes": True, "wanted": ("q", "k", "v", "alibi_slopes")},
    "few queries": {"sq": 200, "sk": 2048},
    "few queries of a softcap": {"sq": 200, "sk": 2048, "options": {"softcap": 9.0}},
    "head dims that are no multiples of 8": {"d": 132},
    "dQ alone": {"wanted": ("q",)},
    "no dQ": {"wanted": ("k", "v")},
}


@pytest.mark.parametrize("more", PORTABLE.values(), ids=PORTABLE.keys())
def test_other_calls_take_the_portable_kernels(more):
    call = hopper(**more)
    portable = Call(**vars(call) | {"options": call.options | {"backend": "sm80"}})
    assert call.plans()[1] == portable.plans()[1]


def test_what_the_workspace_holds():
    """Two heads of 300 queries and 200 keys: 5 x 4 tiles of 8 KiB, P and dS; statistics and flags in tiles of 64."""
    words = hopper(300, 200, batch=1, heads=2).plans()[1]
    assert f"stored scores {2 * 2 * 5 * 4 * 8192}, dQ NaN flags {2 * 5 * 4}, dK and dV NaN flags {2 * 2 * 6}" in words
    assert f"statistics {2 * 5 * 64 * 12}" in words and "claims 8" in words


# The last of 300 queries sees 200 keys, the first hundred none.
@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({"causal": "top_left"}, 1 + 2 + 3 + 4 + 4),
        ({"causal": "bottom_right"}, 0 + 1 + 2 + 3 + 4),
        ({"causal": "top_left", "window": (10, None)}, 1 + 2 + 3 + 3 + 3),
        ({"window": (0, None)}, 5 * 4),
    ],
    ids=str,
)
def test_rows_have_room_for_what_they_see(options, tiles):
    assert f"stored scores {2 * 2 * tiles * 8192}," in hopper(300, 200, batch=1, heads=2, options=options).plans()[1]


@pytest.mark.parametrize(("mebibytes", "launches"), [("0", None), ("15", None), ("16", 8), ("64", 2), ("2048", 1)])
def test_the_bound_of_the_workspace(mebibytes, launches, monkeypatch):
    """A head of 2048 tokens stores 16 MiB."""
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    words = hopper().plans()[1]
    found = re.search(STORING + r", in (\d+) launch", words)
    assert (int(found[1]) if found else None) == launches
    assert found or "each computing the scores" in words
