"""The order in which key tiles add to dQ on Hopper, compiled for the host, is complete and free of deadlock.
Launches of query chunks do together what one launch does."""

from pathlib import Path

from support.host_programs import CSRC, run_host_program

PLAN_FILES = (
    "sm90_backward.cpp",
    "sm90_backward_query_stationary.cpp",
    "sm90_backward_two_pass.cpp",
    "sm90_score_mode.cpp",
    "sm80_backward.cpp",
    "bias_stationary.cpp",
    "short_bias.cpp",
)
PLANS = [CSRC / "kernels" / "plan" / name for name in PLAN_FILES]


def test_nobody_waits_for_ever(tmp_path):
    run_host_program(Path(__file__).with_name("loop_order.cpp"), tmp_path, *PLANS)


def test_query_chunks(tmp_path):
    run_host_program(Path(__file__).with_name("query_chunks.cpp"), tmp_path, *PLANS)
