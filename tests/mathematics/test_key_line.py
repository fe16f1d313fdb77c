"""How a line of tiles of keys is divided among blocks, and which parts an item has, compiled for the host."""

from pathlib import Path

from support.host_programs import run_host_program


def test_tiles_and_parts_belong_to_blocks(tmp_path):
    run_host_program(Path(__file__).with_name("key_line.cpp"), tmp_path)
