"""How a work list of key tiles is divided among CTAs, and which splits a work tile has, compiled for the host."""

from pathlib import Path

from support.host_programs import run_host_program


def test_tiles_and_parts_belong_to_blocks(tmp_path):
    run_host_program(Path(__file__).with_name("stream_k.cpp"), tmp_path)
