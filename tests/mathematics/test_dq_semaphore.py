"""The barriers and semaphores by which partial dQ reaches memory (sm90/backward/key_stationary/: dq_epilogue.cuh,
dq_reducers.cuh), compiled for the host."""

from pathlib import Path

from support.host_programs import run_device_program


def test_every_partial_dq_is_added_once_and_at_its_rank(tmp_path):
    run_device_program(Path(__file__).with_name("dq_semaphore.cpp"), tmp_path)
