"""The CPU kernels' own GEMM of a tile, for every length of vectors."""

from pathlib import Path

from support.host_programs import run_host_program

CPU = Path(__file__).parents[2] / "csrc/kernels/cpu"
LINKED = [CPU / name for name in ("gemm/tile_gemm.cpp", "gemm/few_rows.cpp", "services.cpp")]


def test_odd_sizes_gaps_and_numbers_that_are_not_finite(tmp_path):
    run_host_program(Path(__file__).with_name("microkernel.cpp"), tmp_path, *LINKED)
