"""The PEP 517 backend: setuptools', with a look around before pip starts to resolve and download anything.

Plain `pip install .` builds in a sandbox in which the user's torch cannot be seen. torch is deliberately no build
requirement, because the sandbox would then get a torch of its own, maybe another one. So the first hook that pip calls
there stops and names the command that works. With that command pip skips the first hook, and the second one looks for
everything else that the build needs. Source distributions need none of it and are not checked.
"""

import importlib.util
import sys
from collections.abc import Callable

try:
    from setuptools import build_meta
    from setuptools.build_meta import *  # noqa: F403 - a backend is its module's names
except ImportError:
    sys.exit("\nsetuptools is not installed in this environment.\nRun:\n    pip install setuptools wheel ninja\n")

from build_support.plan import find_torches, make_plans
from build_support.toolchain import INSTALL_COMMAND, BuildError, find_ninja


def _check_all() -> None:
    find_torches()
    if not any(importlib.util.find_spec(name) for name in ("setuptools.command.bdist_wheel", "wheel")):
        raise BuildError("this setuptools needs wheel, which is missing.", "pip install wheel", INSTALL_COMMAND)
    find_ninja()
    make_plans()


def _after(check: Callable[[], object], hook: str) -> Callable:
    def checked_hook(*arguments, **keywords):
        try:
            check()
        except BuildError as error:
            command = INSTALL_COMMAND.replace(" .", " -e .") if hook.endswith("editable") else INSTALL_COMMAND
            sys.exit("\n" + str(error).replace(INSTALL_COMMAND, command) + "\n")
        return getattr(build_meta, hook)(*arguments, **keywords)

    return checked_hook


def build_editable(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    """setuptools', by default as a path in a .pth file: type checkers and editors do not run the finder that it would
    install otherwise."""
    settings = {"editable_mode": "compat"} | (config_settings or {})
    return build_meta.build_editable(wheel_directory, settings, metadata_directory)


get_requires_for_build_wheel = _after(find_torches, "get_requires_for_build_wheel")
get_requires_for_build_editable = _after(find_torches, "get_requires_for_build_editable")
prepare_metadata_for_build_wheel = _after(_check_all, "prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _after(_check_all, "prepare_metadata_for_build_editable")
