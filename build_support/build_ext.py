"""The setuptools command that builds flash_attn_ext._C."""

import sys
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from build_support.plan import ROOT, build_library, replace_if_different
from build_support.toolchain import BuildError


class BuildExt(build_ext):
    """build_ext that hands the whole extension to ninja and copies the result where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        try:
            library = build_library()
        except BuildError as error:
            sys.exit(f"\nflash_attn_ext cannot be built: {error}\n")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_if_different(library, target)

    def copy_extensions_to_source(self) -> None:
        """Editable builds: as setuptools does, except that a shared object in use is replaced and not written into."""
        for ext in self.extensions:
            inside_package = Path(self.get_finalized_command("build_py").get_package_dir("flash_attn_ext"))
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            replace_if_different(built, ROOT / inside_package / built.name)
