"""The barriers by which dQ of visits goes to memory (sm90/backward/dq_outlet.cuh, dq_adders.cuh), on the host."""

from pathlib import Path

from support.host_programs import run_device_program


def test_every_visit_is_added_once_and_in_its_turn(tmp_path):
    run_device_program(Path(__file__).with_name("announced_visits.cpp"), tmp_path)
