"""`python -m build_support.aarch64`: what tests/packaging/test_aarch64.py needs besides a cross compiler, qemu, nvcc.

Where one of these tools is missing it says so and ends with status 3; with the argument `tools` it does nothing else.
build/aarch64 gets Debian's Python for that architecture, with its C headers, and torch with all that it depends on,
which has the CUDA runtime. On an aarch64 machine none of this is needed: there the build is the one of every machine.
"""

import os
import shutil
import subprocess
import sys

from build_support.plan import ROOT
from build_support.toolchain import find_nvcc

FOLDER = ROOT / "build" / "aarch64"
SYSTEM = FOLDER / "system"  # the root folder of a system, as qemu's option -L takes it
PACKAGES = FOLDER / "packages"  # of Python
PYTHON = SYSTEM / "usr" / "bin" / "python3.11"
PYTHON_INCLUDE = SYSTEM / "usr" / "include" / "python3.11"
TORCH = "2.11.0"

# The cross compiler links with its own C library, which may not be newer than the one that results run with.
CXX = shutil.which("aarch64-linux-gnu-g++")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
TOOL_IS_MISSING = 3  # the status, which .ci/run knows
DONE = f"complete-with-torch-{TORCH}"

DEBIAN = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main"
DEBIAN_PACKAGES = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libpython3.11-dev"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8"),
    *("libbz2-1.0", "liblzma5", "libuuid1", "libsqlite3-0"),
)
WHEEL_PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)))


def fetch_system() -> None:
    """With an apt that has lists of its own: the machine's stay as they are."""
    apt = FOLDER / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "packages"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"{DEBIAN}\n")
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",  # another user may not see this folder
        "Dir::State::status": apt / "status",
        "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "-",
    }
    (apt / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    environment = os.environ | {"APT_CONFIG": str(apt / "apt.conf")}
    subprocess.run(["apt-get", "--quiet", "update"], env=environment, check=True)
    command = ["apt-get", "--quiet", "download", *DEBIAN_PACKAGES]
    subprocess.run(command, cwd=apt / "packages", env=environment, check=True)
    for package in sorted((apt / "packages").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, SYSTEM], check=True)
    # pyconfig.h here includes that of the architecture, which a compiler finds in /usr/include on such a machine.
    (PYTHON_INCLUDE / "aarch64-linux-gnu").symlink_to("../aarch64-linux-gnu")
    shutil.rmtree(apt)


def fetch_packages() -> None:
    platforms = [word for platform in WHEEL_PLATFORMS for word in ("--platform", platform)]
    options = ("--no-compile", "--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, *platforms]
    subprocess.run([*command, "--target", PACKAGES, f"torch=={TORCH}", "numpy"], check=True)


def require_tools() -> None:
    """Ends the process if one is missing. The tests of pytest would be skipped instead, and a target of make that does
    nothing would look like one that passed."""
    packages = {"g++-aarch64-linux-gnu": CXX, "qemu-user-static": QEMU}
    missing = [name for name, found in packages.items() if found is None]
    problems = (
        [f"{' and '.join(missing)}: not installed; on Debian: apt-get install {' '.join(missing)}"] if missing else []
    )
    if find_nvcc() is None:
        problems.append("no nvcc in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda; install the CUDA Toolkit")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        sys.exit(TOOL_IS_MISSING)


def fetch() -> None:
    if not (SYSTEM / DONE).exists():  # an earlier run may have been interrupted
        shutil.rmtree(SYSTEM, ignore_errors=True)
        fetch_system()
        (SYSTEM / DONE).touch()
    if not (PACKAGES / DONE).exists():
        shutil.rmtree(PACKAGES, ignore_errors=True)
        fetch_packages()
        (PACKAGES / DONE).touch()


if __name__ == "__main__":
    require_tools()
    if sys.argv[1:] != ["tools"]:
        fetch()
