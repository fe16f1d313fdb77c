"""Which kernels calls with a cache take on Hopper. `explain` does not ask about such calls."""

from pathlib import Path

from support.host_programs import CSRC, compile_for_host_programs, run_host_program

PLANS = sorted((CSRC / "kernels" / "plan").glob("sm[89]0/*.cpp"))


def test_which_kernels_run(tmp_path):
    plans = compile_for_host_programs(PLANS, tmp_path)
    run_host_program(Path(__file__).with_name("plans_of_caches.cpp"), tmp_path, *plans)
