"""The order in which key tiles add to dQ on Hopper, compiled for the host, is complete and free of deadlock.
Launches of query chunks do together what one launch does."""

from pathlib import Path

import pytest

from support.host_programs import CSRC, compile_for_host_programs, run_host_program

pytestmark = pytest.mark.xdist_group("loop_order")  # they share objects

PLAN_FILES = (
    "sm90/backward.cpp",
    "sm90/backward_query_stationary.cpp",
    "sm90/backward_two_pass.cpp",
    "sm90/backward_unwanted.cpp",
    "sm90/backward_written_bias.cpp",
    "sm90/loop_order.cpp",
    "sm90/score_mode.cpp",
    "sm90/short_bias.cpp",
    "sm90/exact_delta.cpp",
    "sm80/backward.cpp",
    "sm80/bias_stationary.cpp",
)
PLANS = [CSRC / "kernels" / "plan" / name for name in PLAN_FILES]


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> list[Path]:
    return compile_for_host_programs(PLANS, tmp_path_factory.mktemp("plans"))


def test_nobody_waits_for_ever(plans, tmp_path):
    run_host_program(Path(__file__).with_name("loop_order.cpp"), tmp_path, *plans)


def test_query_chunks(plans, tmp_path):
    run_host_program(Path(__file__).with_name("query_chunks.cpp"), tmp_path, *plans)
