"""Metadata is in pyproject.toml; what is built, and how, is in build_support/."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

from build_support.plan import ROOT, build_into, replace_if_different


class BuildExt(build_ext):
    """build_ext that hands the whole extension to ninja and copies the result where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        build_into(target)

    def copy_extensions_to_source(self) -> None:
        """Editable builds: as setuptools does, except that a shared object in use is replaced and not written into."""
        for ext in self.extensions:
            inside_package = Path(self.get_finalized_command("build_py").get_package_dir("flash_attn_ext"))
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            replace_if_different(built, ROOT / inside_package / built.name)


setup(
    license="BSD-3-Clause",  # here, because older and newer setuptools want it spelled differently in pyproject.toml
    ext_modules=[Extension("flash_attn_ext._C", sources=[])],
    cmdclass={"build_ext": BuildExt},
)
