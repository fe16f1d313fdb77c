"""The bits by which kernels mask keys of blocks that a query does not see, compiled for the host, against the table."""

from pathlib import Path

from support.host_programs import run_host_program


def test_bits_are_the_keys_of_blocks(tmp_path):
    run_host_program(Path(__file__).with_name("block_mask.cpp"), tmp_path)
