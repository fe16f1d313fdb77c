"""Augmented columns, which add a number to each column of a GEMM (tile/sm90/augmented_columns.h), on the host."""

from pathlib import Path

from support.host_programs import run_device_program


def test_what_a_step_adds(tmp_path):
    run_device_program(Path(__file__).with_name("augmented_columns.cpp"), tmp_path)
