"""The bits by which kernels mask keys outside of intervals, compiled for the host, against brute force."""

from pathlib import Path

from support.host_programs import run_host_program


def test_bits_are_the_keys_of_intervals(tmp_path):
    run_host_program(Path(__file__).with_name("row_intervals.cpp"), tmp_path)
