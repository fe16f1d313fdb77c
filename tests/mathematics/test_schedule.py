"""Which CTA of a launch works on which tile, compiled for the host."""

from pathlib import Path

from support.host_programs import run_host_program


def test_each_tile_belongs_to_one_block(tmp_path):
    run_host_program(Path(__file__).with_name("schedule.cpp"), tmp_path)
