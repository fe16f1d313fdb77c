"""Run nvcc for one kernel object: `run_nvcc.py OBJECT NVCC ARGS...`. Run as a script by ninja.

The object appears under its name only when it is complete, because the name is taken as proof of its contents. What
nvcc and ptxas said stays beside it, and a wgmma pipeline that ptxas had to serialise fails the build: such a kernel is
right but slow, which no test of values would notice.
"""

import subprocess
import sys
from pathlib import Path

SERIALISED = "instructions are serialized"

target, command = Path(sys.argv[1]), sys.argv[2:]
partial = target.with_suffix(".partial.o")
target.parent.mkdir(parents=True, exist_ok=True)
done = subprocess.run([*command, "-o", partial], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
target.with_suffix(".log").write_text(done.stdout)
sys.stdout.write(done.stdout)
if done.returncode == 0 and SERIALISED not in done.stdout:
    partial.replace(target)
else:
    partial.unlink(missing_ok=True)
    sys.exit(done.returncode or f"error: ptxas: wgmma {SERIALISED}, see above; so slow a kernel is not built")
