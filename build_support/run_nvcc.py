"""Run nvcc for one kernel object: `run_nvcc.py OBJECT NVCC ARGS...`. Run as a script by ninja.

The object appears under its name only when it is complete, because the name is taken as proof of its contents. What
nvcc and ptxas said is kept beside it, and a wgmma pipeline that ptxas had to serialise fails the build: such a kernel
is right but slow, which no test of values would notice.
"""

import subprocess
import sys
from pathlib import Path

SERIALISED = "wgmma.mma_async instructions are serialized"


def main(output: str, command: list[str]) -> int:
    target = Path(output)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial.o")
    done = subprocess.run([*command, "-o", str(partial)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sys.stdout.write(done.stdout)
    target.with_suffix(".log").write_text(done.stdout)
    if done.returncode != 0 or SERIALISED in done.stdout:
        partial.unlink(missing_ok=True)
        return done.returncode or 1
    partial.replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
