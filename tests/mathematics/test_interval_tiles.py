"""Which tiles intervals hide, leave whole, or cut, as kernels find it, compiled for the host, against brute force."""

from pathlib import Path

from support.host_programs import run_device_program


def test_tiles_are_classified_as_their_pairs_say(tmp_path):
    run_device_program(Path(__file__).with_name("interval_tiles.cpp"), tmp_path)
