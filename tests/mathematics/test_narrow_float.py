"""Conversions between float and the CPU kernels' 16-bit types."""

from pathlib import Path

from support.host_programs import run_host_program


def test_every_number_and_the_middles_between_them(tmp_path):
    run_host_program(Path(__file__).with_name("narrow_float.cpp"), tmp_path)
