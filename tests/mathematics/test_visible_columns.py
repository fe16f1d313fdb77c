"""The bits by which GPU kernels mask elements of a score tile, compiled for the host, against brute force."""

from pathlib import Path

from support.host_programs import run_host_program


def test_bits_are_the_visible_elements(tmp_path):
    run_host_program(Path(__file__).with_name("visible_columns.cpp"), tmp_path)
