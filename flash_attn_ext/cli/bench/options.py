"""The options of ``bench`` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from flash_attn_ext.cli.bench.suites import ABOUT, SUITES

NAME_WIDTH, DEVICES_WIDTH = 12, 10


def add_bench_options(
    parser: argparse.ArgumentParser,
    suites: Mapping[str, Mapping[str, object]] = SUITES,
    about: Mapping[str, str] = ABOUT,
) -> None:
    """`suites`: by device and name; `about`: a line for each, by name."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["suites, and the devices that have them:", *_lines(suites, about)])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda when a backend runs there, else cpu")
    parser.add_argument("--suite", nargs="+", metavar="NAME", help="default: all of the device; they are listed below")
    parser.add_argument("--backend", metavar="NAME", help="time this backend of ours, such as sm80; default: the best")
    parser.add_argument("--quick", action="store_true", help="few repetitions, and each suite's first head dim only")
    parser.add_argument(
        "--output",
        default="build/bench",
        metavar="FOLDER",
        help="where DEVICE[_SUITES][_BACKEND].json and .png go (%(default)s)",
    )
    parser.add_argument("--no-plot", action="store_true", help="do not draw (drawing needs matplotlib)")
    parser.add_argument("--draw", nargs="+", metavar="JSON", help="time nothing, draw these reports beside themselves")


def _lines(suites: Mapping[str, Mapping[str, object]], about: Mapping[str, str]) -> Iterable[str]:
    for name, text in about.items():
        devices = ", ".join(device for device in suites if name in suites[device])
        yield f"  {name:<{NAME_WIDTH}} {devices:<{DEVICES_WIDTH}} {text}"
