"""``python -m flash_attn_ext {info,verify,bench}``, and ``--version``. Each command says more with ``--help``."""

from __future__ import annotations

import argparse
import sys

from flash_attn_ext import __version__
from flash_attn_ext.cli.bench.options import add_bench_options


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_attn_ext", description="Exact attention for PyTorch.")
    parser.add_argument("--version", action="version", version=f"flash_attn_ext {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="versions, build, backends, what the GPU can run, a short self-test")
    info.add_argument("--json", action="store_true", help="print one JSON object")

    verify = commands.add_parser(
        "verify", help="accuracy against float64 as a ratio to PyTorch's own; exit status 1 when it breaks the rule"
    )
    verify.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda when a backend runs there, else cpu")
    verify.add_argument("--quick", action="store_true", help="bfloat16 only")

    bench = commands.add_parser("bench", help="time beside PyTorch's own attention kernels in the same run")
    add_bench_options(bench)

    options = parser.parse_args(arguments)
    # Imported here: `info` has no need of what `bench` imports.
    if options.command == "info":
        from flash_attn_ext.cli.info import run
    elif options.command == "verify":
        from flash_attn_ext.cli.verify import run
    else:
        from flash_attn_ext.cli.bench.command import run
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
