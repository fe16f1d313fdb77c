"""``python -m flash_attn_ext {info,verify,bench}``. Each command says more with ``--help``."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_attn_ext", description="Exact attention for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="versions, build, backends, what the GPU can run, a short self-test")
    info.add_argument("--json", action="store_true", help="print one JSON object")

    verify = commands.add_parser(
        "verify", help="accuracy against float64 as a ratio to PyTorch's own; exit status 1 when it breaks the rule"
    )
    verify.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda when a backend runs there, else cpu")

    bench = commands.add_parser("bench", help="time beside PyTorch's own attention kernels in the same run")
    bench.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda when a backend runs there, else cpu")
    bench.add_argument(
        "--suite",
        nargs="+",
        metavar="NAME",
        help="default: all of the device but generate, which needs transformers. cuda has grid, mask, float32, "
        "dropout, head_dims, short, in_a_row, encoders, few_queries, varlen, window, gqa, host, switch, decode, "
        "decode_host and generate, cpu has cpu, few_keys, switch, decode, decode_host and generate",
    )
    bench.add_argument("--backend", metavar="NAME", help="time this backend of ours, such as sm80; default: the best")
    bench.add_argument("--quick", action="store_true", help="few repetitions, and each suite's first head dim only")
    bench.add_argument(
        "--output",
        default="build/bench",
        metavar="FOLDER",
        help="where DEVICE[_SUITES][_BACKEND].json and .png go (%(default)s)",
    )
    bench.add_argument("--goals", metavar="FILE", help="a Python file with GOALS to print each suite's mean beside")
    bench.add_argument("--no-plot", action="store_true", help="do not draw (drawing needs matplotlib)")
    bench.add_argument("--draw", nargs="+", metavar="JSON", help="time nothing, draw these reports beside themselves")

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
