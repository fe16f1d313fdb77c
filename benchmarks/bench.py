"""``python -m flash_attn_ext bench`` with two additions: goals for a suite's figures, and text generation by a model.

    python benchmarks/bench.py --device cuda --goals benchmarks/goals.py    # goals for an H200 beside each suite
    python benchmarks/bench.py --suite generate                             # a Llama's tokens per second; transformers

It takes every option of ``bench``.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys

import generate
from flash_attn_ext.cli.bench import suites
from flash_attn_ext.cli.bench.command import KINDS, Bench, run
from flash_attn_ext.cli.bench.options import add_bench_options
from generate_suites import GenerateWorkload, generate_on_cpu, generate_on_gpu
from goal_rules import judged

ABOUT = {**suites.ABOUT, "generate": "tokens per second of a Llama of 1B parameters, by transformers; only when named"}
GENERATE = {"cuda": tuple(generate_on_gpu()), "cpu": tuple(generate_on_cpu())}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status of ``bench``."""
    parser = argparse.ArgumentParser(prog="python benchmarks/bench.py", description=__doc__)
    offered = {device: {**loads, "generate": GENERATE[device]} for device, loads in suites.SUITES.items()}
    add_bench_options(parser, offered, ABOUT)
    parser.add_argument("--goals", metavar="FILE", help="a Python file with GOALS to print each suite's mean beside")
    options = parser.parse_args(arguments)
    if "generate" in (options.suite or ()) and (reason := generate.missing()) is not None:
        print(f"--suite generate: {reason}")
        return 2
    try:
        goals = runpy.run_path(options.goals)["GOALS"] if options.goals else ()
    except (OSError, KeyError, SyntaxError) as error:
        print(
            f"--goals {options.goals}: {error!r}; allowed is a Python file that sets GOALS, as benchmarks/goals.py does"
        )
        return 2
    bench = Bench(
        program="python benchmarks/bench.py",
        suites=offered,
        about=ABOUT,
        only_when_named=("generate",),
        kinds={**KINDS, GenerateWorkload: generate},
        summary=functools.partial(judged, goals=goals),
    )
    return run(options, bench)


if __name__ == "__main__":
    sys.exit(main())
