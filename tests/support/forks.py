"""Programs in a Python of their own, into which nothing of this project has been imported.

Importing torch takes longer than most of them run. So each is a fork of a process that has imported torch alone, or
what `preloaded` names.
"""

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# It has used no threads, no GPU and no random numbers when it forks.
SERVER = """
import atexit, importlib, json, os, sys, traceback, types

def run(job):
    for number, name in enumerate((os.devnull, job["stdout"], job["stderr"])):
        os.dup2(os.open(name, os.O_RDWR), number)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = [job["file"], *job["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = job["file"]
    code = 1
    try:
        exec(compile(job["program"], job["file"], "exec"), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

for name in sys.argv.pop(1).split():
    importlib.import_module(name)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def _path() -> str:
    return os.pathsep.join(filter(None, sys.path))


@functools.cache
def _server(preloaded: str) -> subprocess.Popen:
    environment = dict(os.environ, PYTHONPATH=_path())
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the first program leaves bytecode to the others
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, preloaded],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen) -> None:
    server.stdin.close()
    server.wait()


def run_forked(
    program: str | Path,
    *arguments: object,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    preloaded: str = "torch",
) -> subprocess.CompletedProcess:
    """Runs a program, given as its text or as a file. `folder`: the current folder, which is on its path.
    `environment`: the variables that differ from ours. torch is imported already, so those that it reads
    at import have no effect."""
    is_file = isinstance(program, Path)
    with tempfile.TemporaryDirectory() as outputs:
        stdout, stderr = (Path(outputs) / name for name in ("stdout", "stderr"))
        stdout.touch()
        stderr.touch()
        job = dict(
            program=program.read_text(encoding="utf-8") if is_file else program,
            file=str(program) if is_file else "<string>",
            arguments=list(map(str, arguments)),
            folder=str(folder or Path.cwd()),
            environment={**os.environ, "PYTHONPATH": _path(), **(environment or {})},
            stdout=str(stdout),
            stderr=str(stderr),
        )
        server = _server(preloaded)
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(json.dumps(job) + "\n")
            server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the process that forks ended with {server.wait()}"
        code = int(answer)
        printed = (path.read_text(encoding="utf-8") for path in (stdout, stderr))
        return subprocess.CompletedProcess(job["file"], code, *printed)
