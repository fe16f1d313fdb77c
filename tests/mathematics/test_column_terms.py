"""Numbers that a product adds to its columns (tile/sm90/column_terms.h), on the host."""

from pathlib import Path

from support.host_programs import run_device_program


def test_what_a_step_adds(tmp_path):
    run_device_program(Path(__file__).with_name("column_terms.cpp"), tmp_path)
