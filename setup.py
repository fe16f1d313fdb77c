"""Metadata is in pyproject.toml; what is built, and how, is in build_support/."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

from build_support.build import build_into, replace_if_different
from build_support.plan import ROOT


class BuildExt(build_ext):
    """build_ext that hands everything to ninja and copies the results where setuptools wants them. What an extension's
    file is called depends on torch, so setuptools is told which files there are."""

    def build_extension(self, ext: Extension) -> None:
        package = Path(self.get_ext_fullpath(ext.name)).parent
        package.mkdir(parents=True, exist_ok=True)
        self.built = build_into(package)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in getattr(self, "built", [])]

    def get_output_mapping(self) -> dict[str, str]:
        return {str(path): str(self._in_sources(path)) for path in getattr(self, "built", []) if self.inplace}

    def copy_extensions_to_source(self) -> None:
        """Editable builds: as setuptools does, except that a shared object in use is replaced and not written into."""
        for path in self.built:
            replace_if_different(path, self._in_sources(path))

    def _in_sources(self, path: Path) -> Path:
        return ROOT / self.get_finalized_command("build_py").get_package_dir("flash_attn_ext") / path.name


setup(
    license="BSD-3-Clause",  # here, because older and newer setuptools want it spelled differently in pyproject.toml
    ext_modules=[Extension("flash_attn_ext._C", sources=[])],
    cmdclass={"build_ext": BuildExt},
)
