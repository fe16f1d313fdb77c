"""Which tiles of scores the backward pass of large head dims stores on Hopper, and reads, compiled for the host."""

from pathlib import Path

from support.host_programs import run_host_program


def test_what_is_read_was_stored(tmp_path):
    run_host_program(Path(__file__).with_name("materialised_tiles.cpp"), tmp_path)
