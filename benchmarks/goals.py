"""Goals for the figures on an H200, and the floors below which a suite is not done.

`python benchmarks/bench.py --device cuda --goals benchmarks/goals.py` reads GOALS. They are for Hopper's own kernels,
and those of float32 are for sm80's.
"""

from goal_rules import Goal, PointGoals

GRID_SEQLENS = (512, 2048, 8192, 16384)
GRID_TFLOPS = {
    ("full", 64): (460, 600, 660, 640),
    ("causal", 64): (300, 500, 630, 640),
    ("full", 128): (570, 770, 800, 790),
    ("causal", 128): (370, 650, 790, 780),
    ("full", 256): (590, 800, 840, 820),
    ("causal", 256): (390, 680, 780, 840),
}
GRID_BACKWARD_TFLOPS = {
    ("full", 64): (430, 560, 575, 575),
    ("causal", 64): (290, 480, 560, 560),
    ("full", 128): (400, 610, 660, 660),
    ("causal", 128): (260, 490, 600, 610),
    ("full", 256): (250, 400, 560, 570),
    ("causal", 256): (190, 340, 500, 520),
}
# (head dim, v's head dim): times as fast as cuDNN
HEAD_DIMS = {(40, 40): 1.2, (96, 96): 1.3, (160, 160): 1.0, (192, 192): 1.05, (192, 128): 1.2, (128, 256): 1.0}


# Times as fast as our own call without a window: 1 / 1.6 of the pairs without it, divided by those with it. Of these,
# 8192 queries have keys at most 512 away.
PAIRS_OF_A_SIDE = 8192 * 512 - 512 * 513 / 2
WINDOW_SPEEDUPS = {
    case: round(8192**2 / (1.6 * (8192 + sides * PAIRS_OF_A_SIDE)), 3)
    for case, sides in (("window 512", 2), ("causal window 512", 1))
}

MASKS = ("documents of 4k", "image blocks", "prefix of 2k", "chunks of 8k", "global and window", "shared prefix")

# Microseconds of a step with one query, by the number of sequences and their length. The floor is 1.1 times as long.
DECODE_US = {"B1 4k": 11, "B1 32k": 36, "B1 128k": 122, "B16 8k": 118, "B64 8k": 460}
DECODE = dict(head_dim=128, dtype="bfloat16")
# With pages, times as fast as without, by page size.
PAGES = {16: 0.91, 64: 0.952}

GOALS = (
    *(
        PointGoals(
            "grid",
            pass_,
            {
                (*place, seqlen): goal
                for place, goals in tflops.items()
                for seqlen, goal in zip(GRID_SEQLENS, goals, strict=True)
            },
        )
        for pass_, tflops in (("forward", GRID_TFLOPS), ("backward", GRID_BACKWARD_TFLOPS))
    ),
    Goal("grid", "forward", 1.0, 1.0, worst=1.0, against="cudnn"),
    Goal("grid", "forward", 1.05, 1.05, against="best"),
    Goal("grid", "backward", 1.0, 1.0, worst=1.0, against="cudnn"),
    Goal("grid", "backward", 1.0, 1.0, worst=1.0, against="fa4"),
    Goal("mask", "forward", 1.5, 1.5, against="cudnn", at={"case": "bool [S,S]"}),
    Goal("mask", "forward", 1.5, 1.5, against="cudnn", at={"case": "bias [1,H,S,S]"}),
    Goal("mask", "forward", 2.0, 1.5, at={"case": "bias with grad"}),  # cuDNN does not take it
    Goal("mask", "forward", 1.0, 1.0, at={"case": "padding, packed"}),
    *(
        Goal("mask", "backward", 1.5, 1.5, against="cudnn", at={"case": case})
        for case in ("bool [S,S]", "bias [1,H,S,S]")
    ),
    Goal("mask", "backward", 2.5, 2.5, at={"case": "bias with grad"}),
    *(
        Goal("masks", pass_, bound, bound, against="flex", at={"case": case})
        for pass_, bound in (("forward", 1.8), ("backward", 1.4))
        for case in MASKS
    ),
    *(
        Goal("masks", pass_, bound, bound, at={"case": case})
        for pass_ in ("forward", "backward")
        for case, bound in (("documents, packed", 0.92), ("secretly causal", 0.952))
    ),
    Goal("float32", "forward", 2.0, 1.5),
    Goal("float32", "backward", 1.6, 1.2),
    Goal("dropout", "forward", 1.5, 1.5, against="cudnn"),
    Goal("dropout", "backward", 1.1, 1.1, against="cudnn"),
    *(
        Goal(
            "head_dims",
            "forward",
            bound,
            bound,
            against="cudnn",
            at={"head_dim": dim, "head_dim_v": dim_v, "seqlen_q": 4096},
        )
        for (dim, dim_v), bound in HEAD_DIMS.items()
    ),
    *(Goal("head_dims", "forward", 1.1, 1.0, at={"case": "causal", "head_dim": dim}) for dim in (72, 80)),
    Goal("head_dims", "backward", 1.1, 1.0),
    PointGoals("head_dims", "backward", {("full", 192, 8192): 535, ("causal", 192, 8192): 480}),
    Goal("head_dims", "backward", 1.2, 1.2, against="cudnn", at={"head_dim": 96, "head_dim_v": 96}),
    *(Goal("short", "forward", 1.05, 1.05, at={"seqlen_q": seqlen}) for seqlen in (64, 128, 197, 577, 1000)),
    Goal("short", "backward", 1.1, 1.1),
    *(Goal("in_a_row", "forward", 1.05, 1.05, at={"seqlen_q": seqlen}) for seqlen in (64, 128, 197, 577, 1000)),
    Goal("in_a_row", "backward", 1.1, 1.1),
    *(Goal("encoders", pass_, 1.0, 1.0, worst=1.0) for pass_ in ("forward", "backward")),
    *(Goal(suite, pass_, 1.1, 1.1, worst=1.0) for suite in ("workloads", "long") for pass_ in ("forward", "backward")),
    Goal("few_queries", "forward", 1.0, 1.0),
    Goal("few_queries", "backward", 1.0, 1.0),
    Goal("varlen", "forward", 1.8, 1.8),
    Goal("varlen", "backward", 1.6, 1.6),
    *(Goal("window", pass_, 1.79, 1.79, at={"case": "causal"}) for pass_ in ("forward", "backward")),
    *(
        Goal("window", "forward", speedup, speedup, worst=speedup, at={"case": case})
        for case, speedup in WINDOW_SPEEDUPS.items()
    ),
    Goal("window", "backward", 6.67, 6.67, at={"case": "window 512"}),
    Goal("gqa", "forward", 1.05, 1.05, against="cudnn"),
    Goal("host", "forward", 12, 15, at_most=True),
    Goal("host", "forward", 1.25, 1.25, against="torch sdpa"),
    Goal("host", "forward+backward", 90, 105, at_most=True),
    *(Goal("switch", pass_, 0.87, 0.87) for pass_ in ("forward", "forward+backward")),
    *(
        Goal("decode", "forward", us, 1.1 * us, at={"case": case, "seqlen_q": 1, **DECODE}, at_most=True)
        for case, us in DECODE_US.items()
    ),
    Goal("decode", "forward", 0.91, 0.826, worst=0.826, against="1 query", at={"seqlen_q": 8}),
    Goal("decode", "forward", 300, 330, at={"seqlen_q": 256}, at_most=True),
    *(
        Goal("decode", "forward", bound, bound, at={"case": f"{case} page {page}"})
        for case in ("B1 32k", "B16 8k", "B64 8k")
        for page, bound in PAGES.items()
    ),
    Goal("generate", "decode", 1.0, 1.0, worst=1.0, against="torch sdpa"),
    *(
        goal
        for entry in ("cache", "append")
        for goal in (
            Goal("decode_host", "forward", 15, 16.5, at={"case": f"with_kvcache, {entry}"}, at_most=True),
            Goal("decode_host", "forward", 1.0, 1.0, against="torch sdpa", at={"case": f"with_kvcache, {entry}"}),
        )
    ),
)
