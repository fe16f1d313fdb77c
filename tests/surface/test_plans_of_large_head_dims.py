"""Which backward kernels calls of head dims from 129 to 576 take on Hopper. Plans need no GPU (test_plans.py)."""

import pytest

from support.plans import F16, RECOMPUTE, TWO_PASS, Call, label, mismatches

LONG = 2048


def hopper(sq: int = LONG, sk: int | None = None, **more) -> Call:
    options = {"backend": "sm90"} | more.pop("options", {})
    return Call(sq, sk, options=options, **{"d": 256, "batch": 2, "heads": 4} | more)


TAKEN = [
    (
        hopper(),
        dict(
            kernel=TWO_PASS,
            score_mode="scale only",
            head_dims=(256, 256),
            launches=1,
            key_heads_per_launch=8,
            query_chunks=None,
            delta="within another kernel",
        ),
    ),
    (hopper(dtype=F16), dict(head_dims=(256, 256))),
    (hopper(d=136), dict(head_dims=(192, 192))),
    (hopper(d=136, dv=64), dict(head_dims=(192, 128))),
    (hopper(d=64, dv=136), dict(head_dims=(192, 192))),
    (hopper(d=192, dv=128), dict(head_dims=(192, 128))),
    (hopper(d=192, dv=136), dict(head_dims=(192, 192))),
    (hopper(d=200, dv=128), dict(head_dims=(256, 256))),
    (hopper(257), dict(kernel=TWO_PASS)),
    (hopper(257, 1), dict(kernel=TWO_PASS)),
    (hopper(options={"causal": "top_left"}), dict(kernel=TWO_PASS)),
    (hopper(options={"causal": "bottom_right"}), dict(kernel=TWO_PASS)),
    (hopper(options={"window": (100, 0)}), dict(kernel=TWO_PASS)),
    (hopper(key_heads=2), dict(key_heads_per_launch=4)),
    (hopper(wanted=("q", "k")), dict(kernel=TWO_PASS)),
    (hopper(wanted=("q", "v")), dict(kernel=TWO_PASS)),
    # Two bytes of P and of dS for each pair: 2 GiB hold two heads of 16384 tokens.
    (hopper(16384), dict(launches=4, key_heads_per_launch=2, query_chunks=None)),
    # Of more, or where GEMMs have too few key tiles, a query chunk at a time, unless its queries are too few for
    # most of the SMs. 23168 tokens have 362 rows of 362 tiles; two heads' CTAs of 121 rows fit 132 SMs.
    (hopper(23168), dict(launches=12, key_heads_per_launch=2, query_chunks=3)),
    (hopper(16384, batch=1, key_heads=1), dict(launches=2, key_heads_per_launch=1, query_chunks=2)),
    (hopper(8192, key_heads=1, batch=1, heads=16), dict(launches=2, key_heads_per_launch=1, query_chunks=2)),
    (hopper(8192, key_heads=2, heads=32), dict(launches=8, key_heads_per_launch=4, query_chunks=8)),
    # Where these fill less than three quarters of the SMs, its keys are divided too. 65536 tokens have 1024 rows of
    # 1024 tiles; 4 chunks of 128 CTAs have 3 key chunks each. With 8 query heads for a key head, 16 rows have 128 CTAs.
    (hopper(65536, batch=1, heads=1), dict(launches=12, query_chunks=4, key_chunks=True)),
    (hopper(127041, batch=1, heads=1), dict(launches=32, key_heads_per_launch=1, query_chunks=8, key_chunks=True)),
    (hopper(65536, batch=1, heads=8, key_heads=1), dict(query_chunks=32, key_chunks=True)),
    (hopper(32768, batch=1, heads=1, options={"causal": "top_left"}), dict(key_chunks=False)),
    # Not where a window hides keys before a query.
    (hopper(1 << 18, batch=1, heads=1, options={"window": (130_000, 0)}), dict(kernel=RECOMPUTE)),
    # Scores that causal queries do not see are not materialised. So there is room for three heads of 16384 tokens, of
    # which two are taken, and for one of 32704.
    (hopper(16384, batch=1, heads=8, options={"causal": "top_left"}), dict(launches=4, key_heads_per_launch=2)),
    (
        hopper(16384, 8192, batch=1, heads=8, options={"causal": "bottom_right"}),
        dict(launches=1, key_heads_per_launch=8),
    ),
    (hopper(32704, options={"causal": "top_left"}), dict(launches=8, key_heads_per_launch=1)),
    (hopper(32705, options={"causal": "top_left"}), dict(launches=16, key_heads_per_launch=1, query_chunks=2)),
    # A window's rows have room for what they can see: 27 tiles of keys.
    (hopper(65536, options={"window": (1600, 0)}), dict(launches=2, key_heads_per_launch=4)),
]


@pytest.mark.parametrize(("call", "expected"), TAKEN, ids=label)
def test_calls_that_only_scale(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


# Above head dim 256, where scores are only scaled.
WIDE = [
    (hopper(d=512), dict(kernel=TWO_PASS, score_mode="scale only", head_dims=(576, 512), launches=1)),
    (hopper(d=264, dtype=F16), dict(kernel=TWO_PASS, head_dims=(576, 512))),
    (hopper(d=320, dv=64), dict(kernel=TWO_PASS, head_dims=(576, 512))),
    (hopper(d=64, dv=384), dict(kernel=TWO_PASS, head_dims=(576, 512))),
    (hopper(d=576, dv=512, key_heads=1), dict(kernel=TWO_PASS, head_dims=(576, 512))),
    (hopper(d=520, dv=64, dtype=F16), dict(kernel=TWO_PASS, head_dims=(576, 512))),
    (hopper(d=512, options={"causal": "bottom_right"}), dict(kernel=TWO_PASS)),
    (hopper(d=512, options={"window": (100, 0)}, key_heads=1), dict(kernel=TWO_PASS)),
    (hopper(d=512, wanted=("q", "k")), dict(kernel=TWO_PASS)),
    # Each column part of dK and dV is a work tile of a GEMM: 86 key tiles have 344 of them, which fill the SMs.
    (hopper(16384, d=512, batch=1, key_heads=1), dict(launches=2, key_heads_per_launch=1, query_chunks=2)),
    (hopper(65536, d=512, batch=1, heads=1), dict(launches=12, query_chunks=4, key_chunks=True)),
]


@pytest.mark.parametrize(("call", "expected"), WIDE, ids=label)
def test_calls_above_head_dim_256(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


MASK = (1, 1, LONG, LONG)
WITH_SLOPES = ("q", "k", "v", "alibi_slopes")
CHANGED = [
    (
        hopper(mask=MASK),
        dict(kernel=TWO_PASS, score_mode="mask", head_dims=(256, 256), launches=1, key_heads_per_launch=8),
    ),
    (hopper(mask=(2, 1, 1, LONG), d=136), dict(score_mode="mask", head_dims=(192, 192))),
    (
        hopper(mask=MASK, d=192, dv=128, options={"causal": "top_left"}),
        dict(workspace={"mask tiles": 1024, "mask bits": 557056}),
    ),
    (hopper(mask=(1, 1, 16384, 16384), sq=16384, batch=1, key_heads=1), dict(key_heads_per_launch=1, query_chunks=2)),
    (
        hopper(options={"softcap": 9.0}),
        dict(kernel=TWO_PASS, score_mode="generic without bias and mask", head_dims=(256, 256)),
    ),
    (
        hopper(options={"softcap": 9.0, "dropout_p": 0.1, "causal": "top_left"}, dtype=F16),
        dict(score_mode="generic without bias and mask"),
    ),
    (
        hopper(options={"dropout_p": 0.1}, d=192, dv=128),
        dict(score_mode="generic without bias and mask", head_dims=(192, 128)),
    ),
    (hopper(options={"scale": -1.0}, d=160), dict(score_mode="generic without bias and mask", head_dims=(192, 192))),
    (hopper(slopes=True, options={"window": (100, 0)}), dict(score_mode="generic without bias and mask")),
    (hopper(slopes=True, wanted=WITH_SLOPES), dict(kernel=TWO_PASS, score_mode="generic without bias and mask")),
    *(
        (hopper(options=options, **hides), dict(kernel=TWO_PASS, score_mode="generic without bias"))
        for options in ({"dropout_p": 0.1}, {"softcap": 9.0}, {"scale": -1.0})
        for hides in ({"mask": MASK}, {"intervals": (1, 1, LONG, 4)})
    ),
]


@pytest.mark.parametrize(("call", "expected"), CHANGED, ids=label)
def test_calls_whose_scores_change(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


PORTABLE = {
    "a bias": {"bias": MASK},
    "a bias and a mask": {"bias": MASK, "mask": MASK},
    "a mask that is broadcast along keys": {"mask": (1, 1, LONG, 1)},
    "a mask that is broadcast along keys and a softcap": {"mask": (1, 1, LONG, 1), "options": {"softcap": 9.0}},
    "intervals and a mask": {"mask": MASK, "intervals": (1, 1, LONG, 4)},
    "gradients of slopes above head dim 256": {"d": 512, "slopes": True, "wanted": WITH_SLOPES},
    "few queries": {"sq": 200, "sk": 2048},
    "few queries of a softcap": {"sq": 200, "sk": 2048, "options": {"softcap": 9.0}},
    "head dims that are no multiples of 8": {"d": 132},
    "a mask above head dim 256": {"d": 512, "mask": MASK},
    "a softcap of MLA": {"d": 576, "dv": 512, "options": {"softcap": 9.0}},
    "few queries of MLA": {"d": 576, "dv": 512, "sq": 200, "sk": 2048},
    "a bias above head dim 256": {"d": 512, "bias": MASK},
    "a softcap above head dim 256": {"d": 512, "options": {"softcap": 9.0}},
    "dropout above head dim 256": {"d": 512, "options": {"dropout_p": 0.1}},
    "a negative scale above head dim 256": {"d": 512, "options": {"scale": -1.0}},
    "few queries above head dim 256": {"d": 512, "sq": 200, "sk": 2048},
}


@pytest.mark.parametrize("more", PORTABLE.values(), ids=PORTABLE.keys())
def test_other_calls_take_the_portable_kernels(more):
    call = hopper(**more)
    portable = Call(**vars(call) | {"options": call.options | {"backend": "sm80"}})
    assert call.plans()[1] == portable.plans()[1]


def test_what_the_workspace_holds():
    """Two heads of 300 queries and 200 keys: 5 x 4 tiles of 8 KiB, P and dS; statistics and flags in tiles of 64."""
    workspace = hopper(300, 200, batch=1, heads=2).plans()[1].workspace
    expected = {
        "materialised scores": 2 * 2 * 5 * 4 * 8192,
        "dQ NaN flags": 2 * 5 * 4,
        "dK and dV NaN flags": 2 * 2 * 6,
        "statistics": 2 * 5 * 64 * 12,
        "work counters": 8,
    }
    assert expected.items() <= workspace.items()


def test_what_the_workspace_of_wide_heads_holds():
    """As above; and a third counter, of the work tiles of dQ."""
    workspace = hopper(300, 200, d=512, batch=1, heads=2).plans()[1].workspace
    assert {"materialised scores": 2 * 2 * 5 * 4 * 8192, "work counters": 12}.items() <= workspace.items()


def test_partial_sums_of_wide_heads():
    """A key head of 16384 tokens in chunks hands on dK and dV, of 86 key tiles of 192 keys and 2 column parts each."""
    workspace = hopper(16384, d=512, batch=1, key_heads=1).plans()[1].workspace
    assert workspace["partial dK and dV"] == 86 * 192 * 2 * 512 * 4


@pytest.mark.parametrize(("d", "parts"), [(264, 2), (512, 2), (576, 3)])
def test_partial_dq_has_whole_column_parts(d, parts):
    narrow, wide = (hopper(65536, d=n, dv=264, batch=1, heads=1).plans()[1] for n in (200, d))
    assert wide.key_chunks
    sums = "partial dQ of key chunks"
    assert wide.workspace[sums] == parts * narrow.workspace[sums]


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
    workspace = hopper(300, 200, batch=1, heads=2, options=options).plans()[1].workspace
    assert workspace["materialised scores"] == 2 * 2 * tiles * 8192


@pytest.mark.parametrize(("mebibytes", "launches"), [("0", None), ("15", None), ("16", 8), ("64", 2), ("2048", 1)])
def test_the_bound_of_the_workspace(mebibytes, launches, monkeypatch):
    """A head of 2048 tokens takes 16 MiB of materialised scores."""
    monkeypatch.setenv("FLASH_ATTN_EXT_WORKSPACE_MIB", mebibytes)
    plan = hopper().plans()[1]
    assert plan.launches == launches
    assert plan.kernel == (RECOMPUTE if launches is None else TWO_PASS)
