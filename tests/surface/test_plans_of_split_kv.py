"""Which calls are split-KV, and into how many splits.

As in test_plans.py, plans need no GPU. Without one they are those of a GPU with 132 SMs.
"""

import dataclasses

import pytest

from flash_attn_ext._explanation import Plan
from support.plans import (
    F16,
    F32,
    F64,
    KEY_STATIONARY,
    MATERIALISE_DS,
    MATERIALISE_P_DS,
    QUERY_STATIONARY,
    RECOMPUTE,
    TWO_PASS,
    WARP_SPECIALISED,
    Call,
    label,
    mismatches,
)

LONG = 32768


def llama(sq: int, sk: int = LONG, **more) -> Call:
    """Heads as in a model of 8B parameters."""
    return Call(sq, sk, **(dict(d=128, batch=1, heads=32, key_heads=8) | more))


def wide(sq: int, sk: int = LONG, **more) -> Call:
    """Few heads, so that query tiles leave most of a GPU idle."""
    return Call(sq, sk, **(dict(d=128, batch=1, heads=8) | more))


# What reading the keys bounds: up to 64 rows of a key head's group, from 512 keys on. The same on every GPU.
ROWS = [
    (llama(1), dict(score_mode="scale only", head_dims=(128, 128), tile=(16, 64))),
    (llama(4), dict(score_mode="scale only", head_dims=(128, 128), tile=(16, 64))),
    (llama(5), dict(score_mode="scale only", head_dims=(128, 128), tile=(32, 64))),
    (llama(8), dict(score_mode="scale only", head_dims=(128, 128), tile=(32, 64))),
    (llama(9), dict(score_mode="scale only", head_dims=(128, 128), tile=(64, 64))),
    (llama(16), dict(score_mode="scale only", head_dims=(128, 128), tile=(64, 64))),
    (llama(1, dtype=F16), dict(score_mode="scale only", head_dims=(128, 128), tile=(16, 64))),
    (
        llama(1, key_heads=1),
        dict(score_mode="scale only", head_dims=(128, 128), tile=(32, 64)),
    ),  # multi-query: all 32 heads in one tile
    (llama(1, key_heads=32), dict(score_mode="scale only", head_dims=(128, 128), tile=(16, 64))),
    (llama(1, 512), dict(score_mode="scale only", head_dims=(128, 128), tile=(16, 64))),
    (llama(1, batch=64), dict(score_mode="scale only", head_dims=(128, 128), tile=(16, 64))),
    # Head dims: 64, 128, 256, 512 and 576, the larger one of q's and v's.
    (llama(1, d=1), dict(score_mode="scale only", head_dims=(64, 64))),
    (llama(1, d=65), dict(score_mode="scale only", head_dims=(128, 128))),
    (llama(1, d=64, dv=128), dict(score_mode="scale only", head_dims=(128, 128))),
    (llama(1, d=129), dict(score_mode="scale only", head_dims=(256, 256))),
    (llama(1, d=257), dict(score_mode="scale only", head_dims=(512, 512))),
    (llama(1, d=512), dict(score_mode="scale only", head_dims=(512, 512))),
    (llama(1, d=576, dv=512, key_heads=1), dict(score_mode="scale only", head_dims=(576, 576), tile=(32, 32))),
    (llama(1, dtype=F32), dict(score_mode="scale only", head_dims=(128, 128))),
    (llama(1, d=129, dtype=F32), dict(score_mode="scale only", head_dims=(256, 256))),
    # What changes a score, beside visibility.
    (llama(1, sink=True), dict(score_mode="scale only")),
    (llama(1, options={"causal": "bottom_right"}), dict(score_mode="scale only")),
    (llama(1, options={"window": (511, 0)}), dict(score_mode="scale only")),
    (llama(1, slopes=True), dict(score_mode="generic", head_dims=(128, 128), tile=(16, 64))),
    (llama(4, mask=(1, 1, 1, LONG)), dict(score_mode="generic", head_dims=(128, 128), tile=(16, 64))),
    (llama(5, mask=(1, 1, 1, LONG)), dict(score_mode="generic", head_dims=(128, 128), tile=(64, 64))),
    (llama(1, d=64, mask=(1, 1, 1, LONG)), dict(score_mode="generic", head_dims=(64, 64), tile=(16, 128))),
    (llama(1, d=256, mask=(1, 1, 1, LONG)), dict(score_mode="generic", head_dims=(256, 256), tile=(16, 32))),
    (llama(1, slopes=True, dtype=F32), dict(score_mode="generic", head_dims=(128, 128), tile=(16, 32))),
    # Rows of 1 KiB: one tile for all.
    (llama(1, d=512, slopes=True), dict(score_mode="generic", head_dims=(512, 512), tile=(32, 32))),
    (llama(1, d=513, slopes=True), dict(score_mode="generic", head_dims=(576, 576), tile=(32, 32))),
    (llama(1, d=129, slopes=True, dtype=F32), dict(score_mode="generic", head_dims=(256, 256), tile=(32, 32))),
    (llama(1, bias=(1, 32, 1, LONG)), dict(score_mode="generic")),
    (llama(1, options={"softcap": 9.0}), dict(score_mode="generic")),
    (llama(1, options={"scale": -1.0}), dict(score_mode="generic")),
    (llama(1, options={"dropout_p": 0.1}), dict(score_mode="generic")),
]

UNSPLIT = [
    llama(1, 511),
    llama(1, options={"window": (510, 0)}),  # sees 511 keys
    llama(1, dtype=F64),
    # More rows are split only where their tiles leave half of the SMs idle, and up to 512 queries.
    llama(128, batch=3),
    llama(257),
    llama(256, 1023),
    wide(513),
    wide(1100),
    Call(65, 4096),
]

# Tiles of 128 queries that leave at least half of 132 SMs idle, and into how many splits Hopper's kernel divides their
# keys: the number of SMs for each tile, as far as each gets 512 keys. Of two splits each gets 1280, unless there are at
# most 16 tiles.
IDLE = [
    (llama(17), 16),  # four heads are rows of one tile
    (llama(256), 2),
    (llama(256, 2560), 2),
    (wide(300, 1536), 3),
    (wide(65, 1024), 2),
    (wide(65), 16),
    (wide(65, 4096), 8),
    (wide(512), 4),
    (wide(128, heads=66, key_heads=1), 2),
    (wide(256, options={"causal": "bottom_right"}), 8),
    (wide(256, sink=True), 8),
]


# On Hopper their keys stay together.
SHORT_SPLITS = [llama(256, 1024), llama(256, 2559), wide(300, 1535), wide(512, 1500, d=64)]

# Few queries whose heads fill the SMs, on Hopper: up to 8, or of query heads that share key heads, are split-KV.
OF_MANY_HEADS = [
    (Call(9, 512, batch=64, heads=8), WARP_SPECIALISED),
    (Call(8, 512, batch=64, heads=8), "split-KV"),
    (Call(32, 512, batch=1, heads=67, d=128), WARP_SPECIALISED),
    (Call(32, 512, batch=1, heads=66, d=128), "split-KV"),
    (Call(16, 512, batch=64, heads=8, key_heads=4), "split-KV"),
    (Call(32, 4096, batch=64, heads=8, d=256), WARP_SPECIALISED),
    (Call(32, 4096, batch=64, heads=8, d=256, mask=(64, 1, 1, 4096)), WARP_SPECIALISED),
    (Call(32, 511, batch=1, heads=8), WARP_SPECIALISED),
    # Above 2048 keys heads fill three quarters of the last wave.
    (Call(32, 2048, batch=9, heads=8), WARP_SPECIALISED),
    (Call(32, 2049, batch=9, heads=8), "split-KV"),
    (Call(32, 2049, batch=1, heads=99), WARP_SPECIALISED),
    (Call(32, 2049, batch=1, heads=98), "split-KV"),
    (Call(32, 4096, batch=17, heads=8), "split-KV"),  # two waves
    (Call(32, 4096, batch=64, heads=8, slopes=True, options={"softcap": 9.0}), "split-KV"),  # generic
    (Call(32, 4096, batch=64, heads=8, slopes=True), WARP_SPECIALISED),
    (Call(32, 4096, batch=64, heads=8, bias=(64, 1, 1, 4096)), WARP_SPECIALISED),
]


def plans_on(backend: str, call: Call) -> tuple[Plan, Plan]:
    return dataclasses.replace(call, options=call.options | {"backend": backend}).plans()


def forward_plan(call: Call, backend: str) -> Plan:
    return plans_on(backend, call)[0]


def ctas_of(plan: Plan) -> int | None:
    """Among how many CTAs keys are divided."""
    return plan.persistent_ctas or plan.splits


@pytest.fixture(params=["sm80", "sm90"])
def planner(request) -> str:
    return request.param


@pytest.mark.parametrize(("call", "expected"), ROWS, ids=label)
def test_calls_that_reading_keys_bounds(call, expected, planner, monkeypatch):
    """One kernel on every GPU, whatever the number of SMs."""
    for num_sms in ("1", "132"):
        monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", num_sms)
        plan = forward_plan(call, planner)
        assert mismatches(plan, dict(kernel="split-KV") | expected) == {}


@pytest.mark.parametrize("call", UNSPLIT, ids=lambda call: f"q{call.sq}-k{call.sk}")
def test_calls_whose_keys_stay_together(call, planner):
    assert ctas_of(forward_plan(call, planner)) is None


@pytest.mark.parametrize(("call", "splits"), IDLE, ids=label)
def test_calls_that_would_leave_sms_idle(call, splits, planner, monkeypatch):
    plan = forward_plan(call, planner)
    if planner == "sm80":
        assert plan.kernel == "split-KV"
    else:
        expected = dict(kernel=WARP_SPECIALISED, score_mode="scale only", head_dims=(128, 128), splits=splits)
        assert mismatches(plan, expected) == {}
    monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", "7")
    assert ctas_of(forward_plan(call, planner)) is None  # none is idle there


@pytest.mark.parametrize("call", SHORT_SPLITS, ids=label)
def test_splits_that_would_be_short(call):
    assert mismatches(forward_plan(call, "sm90"), dict(kernel=WARP_SPECIALISED, splits=None)) == {}


@pytest.mark.parametrize(("call", "kernel"), OF_MANY_HEADS, ids=label)
def test_few_queries_of_many_heads(call, kernel):
    assert forward_plan(call, "sm90").kernel == kernel


# Of 8 key heads, by SMs, with room for 3 CTAs each: a whole number of CTAs for a head, about 2 per SM (32 for a head
# rather than 33, which four warps combine), or 1 where they would have fewer than 8 tiles of 64 keys. And of 1024 keys,
# of which no CTA has fewer than 128.
CTAS = {1: (3, 3), 2: (6, 6), 7: (8, 8), 50: (96, 48), 132: (256, 64), 300: (296, 64)}


@pytest.mark.parametrize(("num_sms", "ctas"), CTAS.items())
def test_the_number_of_sms_is_a_switch(num_sms, ctas, planner, monkeypatch):
    """As many as there is room for where heads are many."""
    monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", str(num_sms))
    assert tuple(ctas_of(forward_plan(llama(1, sk), planner)) for sk in (LONG, 1024)) == ctas
    assert ctas_of(forward_plan(llama(1, batch=200), planner)) == 3 * num_sms


SHORT = [
    (llama(1, 4096), 128),
    (llama(8, 4096), 128),
    (llama(1, 16_896), 256),
    (llama(1, 16_832), 128),  # 8 x 263 tiles, less than 2 x 132 x 8
    (llama(1, 2048, batch=4), 128),
    (llama(1, 2048, batch=6), 240),  # one for each head would leave a quarter of the SMs idle
    (llama(1, 4096, mask=(1, 1, 1, 4096)), 256),
    (llama(1, d=64), 128),  # 8 x 256 tiles of 128 keys
]


@pytest.mark.parametrize(("call", "ctas"), SHORT, ids=label)
def test_short_ranges_have_an_sm_each(call, ctas, planner):
    assert ctas_of(forward_plan(call, planner)) == ctas


# A third CTA per SM, from 4 tiles of 64 keys for each on.
MASKED = [
    (llama(1, 12_608, mask=(1, 1, 1, 12_608)), 256),
    (llama(1, 12_609, mask=(1, 1, 1, 12_609)), 392),  # 8 x 198 tiles
    (llama(1, 17_409), 256),
    (llama(1, 8192, key_heads=32, mask=(1, 1, 1, 8192)), 384),
    (llama(1, 8192, key_heads=32), 256),  # 4096 tiles
]


@pytest.mark.parametrize(("call", "ctas"), MASKED, ids=label)
def test_long_calls_with_masks_have_more_ctas(call, ctas, planner):
    assert ctas_of(forward_plan(call, planner)) == ctas


def test_more_sms_split_more_calls(planner, monkeypatch):
    """A tile of 128 queries in each of 32 heads."""
    plans = {}
    for num_sms in (63, 64, 300):
        monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", str(num_sms))
        plans[num_sms] = forward_plan(llama(128), planner)
    assert ctas_of(plans[63]) is None
    if planner == "sm90":
        assert (ctas_of(plans[64]), ctas_of(plans[300])) == (2, 9)
    else:
        assert (ctas_of(plans[64]), ctas_of(plans[300])) == (128, 576)


SPLIT_DQ = [
    (llama(8, 4096), dict(kernel=MATERIALISE_DS, splits=8)),
    (wide(64, 4096), dict(kernel=MATERIALISE_DS, splits=16)),  # 256 keys each
    (wide(512, 4096), dict(kernel=MATERIALISE_DS, splits=8)),
    (wide(513, 4096), dict(kernel=MATERIALISE_DS, splits=None, launches=1)),
    (wide(64, 1023), dict(kernel=MATERIALISE_P_DS, dq_score_mode="generic", dq_head_dim=128, splits=None)),
    (wide(64, 1024), dict(kernel=MATERIALISE_DS, splits=4)),
    (
        wide(64, 4096, options={"dropout_p": 0.1}),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="generic", dq_head_dim=128, splits=16),
    ),
    (wide(64, 4096, d=256), dict(kernel=MATERIALISE_P_DS, dq_score_mode="scale only", dq_head_dim=256, splits=16)),
    (wide(64, 4096, d=257), dict(kernel=RECOMPUTE, dq_score_mode="generic", dq_head_dim=512)),
    (
        wide(64, 4096, batch=17),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="generic", dq_head_dim=128, splits=None),
    ),  # 136 tiles
]


@pytest.mark.parametrize(("call", "expected"), SPLIT_DQ, ids=label)
def test_the_keys_of_dq(call, expected):
    assert mismatches(call.plans()[1], expected) == {}


# On Hopper, up to 128 queries of more than 8 keys each, with a key head of their own: query-stationary.
QUERY_STATIONARY_CALLS = [
    (wide(64, 4096), dict(kernel=QUERY_STATIONARY, head_dims=(128, 128), persistent_ctas=128)),
    (wide(128, 4096), dict(head_dims=(128, 128), persistent_ctas=128)),
    (wide(64, 1024), dict(head_dims=(128, 128), persistent_ctas=128)),  # a tile of 64 keys for each CTA
    (wide(1, 1024, batch=9), dict(head_dims=(128, 128), persistent_ctas=132)),  # 72 heads
    (wide(64, 1024, heads=3), dict(head_dims=(128, 128), persistent_ctas=48)),
    (wide(64, 4096, d=72), dict(head_dims=(128, 128))),
    (wide(64, 4096, d=64), dict(head_dims=(64, 64))),
    (wide(64, 4096, d=40, dv=64), dict(head_dims=(64, 64))),
    (wide(64, 4096, d=40, dv=72), dict(head_dims=(128, 128))),
    (wide(64, 4096, dtype=F16), dict(head_dims=(128, 128))),
    (wide(64, 4096, sink=True), dict(head_dims=(128, 128), score_mode="scale only")),
    # With a boolean mask, too.
    (wide(64, 4096, mask=(1, 1, 1, 4096)), dict(head_dims=(128, 128), score_mode="mask")),
    (wide(100, 850, d=32, mask=(1, 8, 100, 850)), dict(head_dims=(64, 64), score_mode="mask", persistent_ctas=112)),
    (wide(65, 257, d=64, mask=(1, 1, 65, 257), sink=True), dict(head_dims=(64, 64), score_mode="mask")),
]

# Others: a dQ accumulator for each phase of key tiles where there are more than 8 keys for each query. There are as
# many as a head has tiles in flight on 132 SMs, or half as many where a key tile has several iterations. Otherwise all
# contributors of a query tile share a semaphore.
CAUSAL = {"causal": "bottom_right"}
PHASES = [
    (llama(8, 4096), dict(phases=8, dq_accumulators=8)),
    (wide(64, 4096, options=CAUSAL), dict(phases=16, dq_accumulators=16)),
    (wide(64, 1024, options=CAUSAL), dict(phases=8, dq_accumulators=8)),  # a tile of keys each
    (wide(128, 4096, options=CAUSAL), dict(phases=8, dq_accumulators=8)),
    (wide(129, 4096), dict(phases=8, dq_accumulators=8)),
    (wide(64, batch=4, options=CAUSAL), dict(phases=4, dq_accumulators=4)),
    (
        wide(64, 4096, d=64, options=CAUSAL),
        dict(kernel=KEY_STATIONARY, head_dims=(64, 64), tile=(64, 128), cyclic=False, phases=16),
    ),
    (
        wide(64, batch=17, options=CAUSAL),
        dict(kernel=KEY_STATIONARY, cyclic=False, phases=1, pre_signals_dq=True),
    ),  # more heads than CTAs
    (wide(512, 4096), dict(kernel=KEY_STATIONARY, cyclic=True)),
    # No more accumulators than for 8 iterations of each tile in flight.
    (llama(128, key_heads=1), dict(phases=32, dq_accumulators=32)),
    (llama(512, key_heads=1), dict(phases=8, dq_accumulators=8)),
    (wide(513, 8192), dict(launches=1)),
    (wide(32, 257, options=CAUSAL), dict(kernel=KEY_STATIONARY, cyclic=False)),
    # Few that are visible, too.
    (wide(31, 256), dict(kernel=MATERIALISE_P_DS, dq_score_mode="generic", dq_head_dim=128, splits=None)),
    (wide(31, 256, d=64), dict(kernel="fused")),
    (
        wide(64, 4096, options={"window": (100, 30)}),
        dict(kernel=MATERIALISE_P_DS, dq_score_mode="generic", dq_head_dim=128, splits=None),
    ),
    (wide(64, 4096, options={"softcap": 9.0}), dict(kernel=TWO_PASS)),
]


@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0}, {"sq": 0}, {"sk": 0}], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_empty_calls_have_plans(d, empty, planner):
    call = Call(**(dict(sq=64, sk=4096, d=d, heads=8, options={"backend": planner}) | empty))
    assert not any(WARP_SPECIALISED in plan.kernel for plan in call.plans())


@pytest.mark.parametrize(("call", "expected"), QUERY_STATIONARY_CALLS, ids=label)
def test_the_query_stationary_kernel(call, expected):
    expected = dict(kernel=QUERY_STATIONARY) | expected
    assert mismatches(plans_on("sm90", call)[1], expected) == {}


@pytest.mark.parametrize(("call", "expected"), PHASES, ids=label)
def test_phases_with_accumulators_of_their_own(call, expected):
    assert mismatches(plans_on("sm90", call)[1], expected) == {}


@pytest.mark.parametrize(("num_sms", "splits"), [(7, None), (8, 2), (50, 12), (132, 16), (300, 16)])
def test_the_switch_counts_in_the_backward_pass(num_sms, splits, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXT_MULTIPROCESSORS", str(num_sms))
    plan = wide(64, 4096).plans()[1]
    assert plan.splits == splits and (splits is None or plan.kernel == MATERIALISE_DS)
