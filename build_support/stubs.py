"""Functions in place of those whose sources a fast build leaves out: `stubs.py OBJECT COMPILER OBJECTS...`. Run as a
script by ninja.

A launch that is missing would be found out when it is called, by the dynamic loader, which ends the process. Each of
these returns an error of the CUDA runtime instead. They are for safety: the host refuses such calls before.
"""

import subprocess
import sys

NOT_SUPPORTED = 801  # cudaErrorNotSupported
OURS = "_ZN14flash_attn_ext"  # how names of the namespace begin


def names(option: str, objects: list[str]) -> set[str]:
    listing = subprocess.run(["nm", option, *objects], capture_output=True, text=True, check=True).stdout
    return {words[-1] for line in listing.splitlines() if (words := line.split()) and words[-1].startswith(OURS)}


def main(target: str, compiler: str, objects: list[str]) -> None:
    missing = sorted(names("--undefined-only", objects) - names("--defined-only", objects))
    source = [f"static int not_built(void) {{ return {NOT_SUPPORTED}; }}"]
    source += [f'int {name}(void) __attribute__((alias("not_built"), visibility("hidden")));' for name in missing]
    command = [compiler, "-x", "c", "-fPIC", "-c", "-", "-o", target]
    subprocess.run(command, input="\n".join(source) + "\n", text=True, check=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
